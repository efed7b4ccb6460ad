"""Multi-head latent attention (MLA): keys and values are made from one small latent a token.

DeepSeek-V2 (arXiv 2405.04434, section 2.1), DeepSeek-V3 (arXiv 2412.19437, section 2.1.1). Of a
position x [h], with latents c_q [l_q] and c [l] and a part of r columns for rotary positions:

    c_q = norm(W_dq x)      q_i = [W_uq c_q]_i, the last r columns of every head i turned
    [c' | k'] = W_dkv x     c = norm(c')          k_r = k' turned, one for all heads
    [k_i | v_i] = [W_ukv c]_i                     head i: softmax(scale q_i [k_i | k_r]^T) v_i

Without a query latent q = W_q x. Queries and keys have n + r columns a head, values v. The scale is
1/sqrt(n + r) by default. DeepSeek-V3: h 7168, 128 heads, l_q 1536, l 512, n 128, r 64, v 128: a
position has 576 numbers for all its keys and values, which would be 40,960 by head.

Tensor parallelism splits W_uq, W_ukv and W_o by heads. Latents are the same on every rank: the down
products W_dq and W_dkv and the norms are repeated on all of them. Under sequence parallelism these
run on the rank's positions, so that their gradients are partial sums, and the latents are gathered
instead of the hidden states. Under context parallelism c and k_r, turned already, are gathered by
position (context_parallel.py) and each rank makes the keys and values of the full sequence, for
which W_ukv multiplies c times as many rows on each rank.

Messages of a layer, each the bytes of the full message, for w bytes a number and S = s/c positions.
L = l + r columns, of c and k_r, are one tensor. Without a query latent read h for l_q.

    without sequence parallelism, t > 1
        forward                                       cp all_gather b s L w, tp all_reduce b S h w
        backward    cp reduce_scatter b s L w, tp all_reduce b S L w, tp all_reduce b S l_q w
    with sequence parallelism, t > 1
        forward     tp all_gather b S l_q w, tp all_gather b S L w, cp all_gather b s L w,
                    tp reduce_scatter b S h w
        backward    tp all_gather b S h w, cp reduce_scatter b s L w, tp reduce_scatter b S L w,
                    tp all_gather b S l_q w (for dW_uq, again), tp reduce_scatter b S l_q w

Messages over tp are sent where t > 1, those over cp where c > 1. c and k_r stay gathered for the
backward of W_ukv; c_q is gathered again, as by every column-parallel product. Full recomputation
repeats the forward's messages, selective recomputation none.

By hand, DeepSeek-V3 in bf16, b 1, s 4096, c 1: a gather of latents is 4 MiB and 12 MiB of c_q,
where hidden states take 56 MiB.

Letters: b batch, s sequence, h hidden, a heads, l latent, n, r, v columns of a head, t tp, c cp.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mpctl.core.sharding import local_range
from mpctl.train.kernels.counter_rng import CounterRNG
from mpctl.train.kernels.masks import Positions
from mpctl.train.kernels.rotary import CosSin, Rotary
from mpctl.train.layers.attention import AttentionConfig, AttentionCore, KeyValueCache
from mpctl.train.layers.config import InitialValues, check_positive
from mpctl.train.layers.context_parallel import gather_rows
from mpctl.train.layers.mappings import copy_to_region, gather_sequence
from mpctl.train.layers.norm import Norm
from mpctl.train.layers.shard_context import ShardContext


@dataclass(frozen=True)
class LatentAttentionConfig(InitialValues):
    """Multi-head latent attention over `hidden` features.

    q_lora_rank, kv_lora_rank: sizes of the latents of queries, and of keys with values; without
    q_lora_rank queries are made from the hidden states. qk_nope_head_dim, qk_rope_head_dim: columns
    of a head's queries and keys without and with rotary positions; v_head_dim: those of its values.
    (These are Hugging Face's names.) rotary: positions of the latter columns, None for none. norm,
    eps: of the latents. causal, scale, dropout, window, init_std, output_std: as AttentionConfig's;
    the scale is 1/sqrt(qk_size) by default. No projection has a bias.

    Raises ValueError where a value is out of its range, or rotary positions are of other heads.
    """

    hidden: int
    heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    causal: bool = True
    scale: float | None = None
    dropout: float = 0.0
    rotary: Rotary | None = None
    window: int | None = None
    norm: Norm = "rmsnorm"
    eps: float = 1e-6
    init_std: float = 0.02
    output_std: float | None = None

    def __post_init__(self) -> None:
        check_positive(
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            q_lora_rank=1 if self.q_lora_rank is None else self.q_lora_rank,
        )
        if self.rotary is not None and self.rotary.head_dim != self.qk_rope_head_dim:
            raise ValueError(
                f"rotary positions of {self.rotary.head_dim} features for qk_rope_head_dim "
                f"{self.qk_rope_head_dim} (make it with Rotary({self.qk_rope_head_dim}))"
            )
        _ = self.core  # which checks the rest

    @property
    def qk_size(self) -> int:
        """Columns of a head's queries and keys, n + r."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_columns(self) -> int:
        """Numbers of a position from which all its keys and values are made, l + r."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def core(self) -> AttentionConfig:
        """The attention between the projections, of as many key-value heads as heads."""
        return AttentionConfig(
            self.hidden,
            self.heads,
            head_dim=self.qk_size,
            causal=self.causal,
            scale=self.scale,
            dropout=self.dropout,
            window=self.window,
        )

    def build(self, shard_context: ShardContext, rng_site: str, *, recompute: bool = False) -> ParallelLatentAttention:
        """The module of this rank."""
        return ParallelLatentAttention(self, shard_context, rng_site, recompute=recompute)


class ParallelLatentAttention(nn.Module):
    """hidden [b, s/c, h] -> [b, s/c, h]; with sequence parallelism both are [b, s/(ct), h].

    rng_site, recompute: as AttentionCore's. Raises ValueError if the number of heads is not
    divisible by that of tensor-parallel ranks, and in other modes of tensor parallelism than 1d.
    """

    def __init__(
        self, config: LatentAttentionConfig, shard_context: ShardContext, rng_site: str, *, recompute: bool = False
    ) -> None:
        super().__init__()
        mode = shard_context.grid.mode
        if mode != "1d":
            raise ValueError(
                f"tensor_mode {mode}: latent attention has latents that no rank shares (use tensor_mode 1d)"
            )
        self.config, self.shard_context = config, shard_context
        self.core = AttentionCore(config.core, shard_context, rng_site, recompute=recompute)
        self.local_heads = shard_context.local_heads(config.heads)
        h, a, init, layers = config.hidden, config.heads, config.init, shard_context.layers
        self.query_down: nn.Module | None = None
        self.query_latent_norm: nn.Module | None = None
        if config.q_lora_rank is None:
            self.query = layers.column_linear(h, a * config.qk_size, bias=False, init=init)
        else:
            self.query_down = self._down(config.q_lora_rank)
            self.query_latent_norm = self._latent_norm(config.q_lora_rank)
            self.query_up = layers.column_linear(config.q_lora_rank, a * config.qk_size, bias=False, init=init)
        self.key_value_down = self._down(config.latent_columns)
        self.key_value_latent_norm = self._latent_norm(config.kv_lora_rank)
        self.key_value_up = shard_context.local_linear(
            config.kv_lora_rank, a * (config.qk_nope_head_dim + config.v_head_dim), dims=("heads", "latent"), init=init
        )
        self.output = layers.row_linear(a * config.v_head_dim, h, bias=False, init=config.output_init)

    def _down(self, outputs: int) -> nn.Module:
        config, dims = self.config, ("latent", "hidden")
        return self.shard_context.local_linear(config.hidden, outputs, dims=dims, init=config.init)

    def _latent_norm(self, size: int) -> nn.Module:
        config = self.config
        return self.shard_context.norm(config.norm, size, eps=config.eps, dim="latent")

    def forward(
        self,
        hidden: Tensor,
        rng: CounterRNG | None = None,
        *,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        positions: Positions | None = None,
        cos_sin: CosSin | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """The arguments are ParallelSelfAttention's. The cache stores latents, l + r numbers a
        position, of which keys and values are made anew in each call."""
        query = self._query(hidden)
        rows = None if cache is None else range(cache.length, cache.length + query.shape[1])
        if cos_sin is None and self.config.rotary is not None:
            given = rows if positions is None else positions
            cos_sin = self._cos_sin(self.config.rotary, query, given)
        latent, key = self._latents(hidden, cos_sin)
        if cache is not None:
            latent, key = (x[:, 0] for x in cache.append(latent[:, None], key[:, None]))
        tensors = self._turned(query, cos_sin), *self._keys_values(latent, key)
        if self.core.exchanges:
            heads = self.core.split(*tensors, rng, mask=mask, bias=bias)
        else:
            heads = self.core(*tensors, rng, mask=mask, bias=bias, rows=rows)
        # [b, a/t, s/c, v] -> [b, s/c, a/t*v] -> [b, s/c, h]
        output: Tensor = self.output(heads.transpose(1, 2).flatten(2))
        return output

    def _query(self, hidden: Tensor) -> Tensor:
        """[b, s/c, h] -> [b, s/c, a/t, n + r], not turned yet."""
        if self.query_down is None or self.query_latent_norm is None:
            query: Tensor = self.query(hidden)
        else:
            query = self.query_up(self.query_latent_norm(self.query_down(hidden)))
        return query.unflatten(-1, (-1, self.config.qk_size))

    def _turned(self, query: Tensor, cos_sin: CosSin | None) -> Tensor:
        """[b, s, a/t, n + r] -> [b, a/t, s, n + r]."""
        if cos_sin is None:
            return query.transpose(1, 2)
        config = self.config
        plain, turned = query.split((config.qk_nope_head_dim, config.qk_rope_head_dim), dim=-1)
        turned = self.core.backend.rotate(turned.transpose(1, 2), *cos_sin).transpose(1, 2)
        return torch.cat((plain, turned), dim=-1).transpose(1, 2)

    def _latents(self, hidden: Tensor, cos_sin: CosSin | None) -> tuple[Tensor, Tensor]:
        """[b, s/c, h] -> latents [b, s, l], and the part of the keys that heads share, [b, s, r],
        of all positions, those of this rank of cp where it exchanges heads."""
        context, config = self.shard_context, self.config
        sizes = config.kv_lora_rank, config.qk_rope_head_dim
        latent, key = self.key_value_down(hidden).split(sizes, dim=-1)
        latent = self.key_value_latent_norm(latent)
        if cos_sin is not None:
            cos, sin = (self._own_rows(x) for x in cos_sin)
            key = self.core.backend.rotate(key[:, None], cos, sin)[:, 0]
        if context.tp.size == 1 and not context.gathers_latents:
            return latent, key
        both = torch.cat((latent, key), dim=-1)
        enter = gather_sequence if context.sequence_parallel else copy_to_region
        both = enter(both, context.tp)
        both = gather_rows(both, context.cp) if context.gathers_latents else both
        latent, key = both.split(sizes, dim=-1)
        return latent, key

    def _own_rows(self, table: Tensor) -> Tensor:
        """[.., s/c, r/2] -> the rows of this rank's positions between layers."""
        context = self.shard_context
        if not context.sequence_parallel:
            return table
        own = local_range(table.shape[-2], parts=context.tp.size, index=context.tp.rank)
        return table[..., own.start : own.stop, :]

    def _keys_values(self, latent: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Latents [b, s, l] and shared keys [b, s, r] -> [b, a/t, s, n + r], [b, a/t, s, v]."""
        config = self.config
        # [b, s, a/t*(n+v)] -> [b, s, a/t, n+v] -> [b, s, a/t, n] and [b, s, a/t, v]
        by_head = self.key_value_up(latent).unflatten(-1, (len(self.local_heads), -1))
        plain, value = by_head.split((config.qk_nope_head_dim, config.v_head_dim), dim=-1)
        shared = key[:, :, None].expand(*plain.shape[:-1], -1)
        # a copy of the values, so that backward does not keep the product's result for them
        return torch.cat((plain, shared), dim=-1).transpose(1, 2), value.contiguous().transpose(1, 2)

    def _cos_sin(self, rotary: Rotary, query: Tensor, given: Positions | None) -> CosSin:
        if given is not None:
            return rotary.table(given, query)
        return self.shard_context.rotary_tables.rows(rotary, query.shape[1], self.core.cp, query)

    def extra_repr(self) -> str:
        config, t, c = self.config, self.shard_context.tp.size, self.core.cp.size
        parts = [f"heads {self.local_heads.start}..{self.local_heads.stop} of {config.heads}"]
        parts += [f"d={config.qk_size} ({config.qk_rope_head_dim} shared), v={config.v_head_dim}"]
        parts += [f"causal={config.causal}", f"dropout={config.dropout}"]
        if config.scale is not None:
            parts.append(f"scale={config.scale}")
        return ", ".join([*parts, f"t={t}", *([f"c={c}"] if c > 1 else [])])
