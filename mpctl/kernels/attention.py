"""Self attention split by whole heads: softmax(scale Q K^T) V, then an output projection.

Megatron-LM (arXiv 1909.08053, section 3, figure 3b): Q, K, V by columns, so a rank owns a/t heads
and the core (context.py) needs no sync; the projection by rows. One all-reduce of b*s*h forward,
one backward. Q, K and V are one product of fused parts [q | k | v]; 12 heads of 64 on t=4, rank 1:
heads 3..6, columns 192..384 of each part.

Fewer key-value heads than ranks (k < t, t = k*r): the projection stays split by columns, so that a
rank holds d/r columns of a head, each weight is held once and gradients and norms need no care. Its
outputs are gathered: one all-gather of 2*b*s*k*d elements forward, a reduce-scatter of as many
backward; each rank keeps the head that its queries share. 8 heads, k=2, t=4: ranks 0 and 1 use
key-value head 0, ranks 2 and 3 head 1.

Letters: b batch, s sequence, h hidden, a heads, k key-value heads, d head size, t tp, c cp.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mpctl.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.kernels.cache import KeyValueCache
from mpctl.kernels.context import WHOLE, AttentionCore, context_positions
from mpctl.kernels.counter_rng import CounterRNG
from mpctl.kernels.linear import ColumnParallelLinear, RowParallelLinear
from mpctl.kernels.masks import Positions
from mpctl.kernels.parameters import Init
from mpctl.kernels.regions import gather_sequence
from mpctl.kernels.rotary import Rotary
from mpctl.sharding import divisors, local_range, local_size, splits_kv_heads
from mpctl.transport.group import Group


class ParallelSelfAttention(nn.Module):
    """hidden [b, s/c, h] -> [b, s/c, h]; with sequence_parallel both are [b, s/(ct), h].

    kv_heads: fewer key and value heads, each shared by a/k queries (arXiv 2305.13245). site names
    the place to the dropout mask, with the layer's global number. recompute_core: scores are not
    kept for backward. cp: the group over which the sequence is split, scale: of the scores, by
    default 1/sqrt(d) (context.py). Raises ValueError where heads or kv_heads cannot be split over
    the group.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        group: Group,
        site: str,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        dropout: float = 0.0,
        causal: bool = True,
        scale: float | None = None,
        bias: bool = True,
        rotary: Rotary | None = None,
        recompute_core: bool = False,
        sequence_parallel: bool = False,
        cp: Group | None = None,
        init_std: float = 0.02,
        output_std: float | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        backend: KernelBackend = TORCH_BACKEND,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        self.head_dim = local_size(hidden, parts=heads) if head_dim is None else head_dim
        self.shared = local_size(heads, parts=kv_heads)
        self.heads, self.kv_heads, self.group, self.rotary = heads, kv_heads, group, rotary
        self.local_heads = local_range(heads, parts=group.size, index=group.rank)
        _check_kv(heads, kv_heads, self.head_dim, group.size)
        self.core = AttentionCore(
            site, self.local_heads, dropout, causal, recompute_core, cp or WHOLE, scale, backend
        )
        inner, outer = Init("normal", init_std), Init("normal", output_std or init_std)
        parts = (heads * self.head_dim, *[kv_heads * self.head_dim] * 2)
        self.qkv = ColumnParallelLinear(
            hidden,
            sum(parts),
            group=group,
            parts=parts,
            bias=bias,
            sequence_parallel=sequence_parallel,
            init=inner,
            dtype=dtype,
            device=device,
        )
        self.output = RowParallelLinear(
            parts[0],
            hidden,
            group=group,
            bias=bias,
            sequence_parallel=sequence_parallel,
            init=outer,
            dtype=dtype,
            device=device,
        )

    def forward(
        self, hidden: Tensor, noise: CounterRNG | None = None, *, mask: Tensor | None = None,
        bias: Tensor | None = None, positions: Positions | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:  # fmt: skip
        """mask, bias: see AttentionCore; they join `causal`. positions: of the rotary, [s/c] or
        [b, s/c]; by default where the tokens stand. cache: hidden holds the s positions that follow
        those in the cache, which gets theirs too; mask and bias are then [.., s, all positions]."""
        query, key, value = self._split(self.qkv(hidden))
        rows = None if cache is None else range(cache.length, cache.length + hidden.shape[1])
        if self.rotary is not None:
            places = rows if positions is None else positions
            query, key = self.rotary(query, key, self._positions(query, places))
        if cache is not None:
            key, value = cache.extended(key, value)
        context = self.core(query, key, value, noise, mask=mask, bias=bias, rows=rows)
        # [b, a/t, s, d] -> [b, s, a/t*d]
        return self.output(context.transpose(1, 2).flatten(2))

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, kv = qkv.tensor_split((len(self.local_heads) * self.head_dim,), dim=-1)
        if self.kv_heads < self.group.size:
            key, value = self._gathered(kv)
        else:
            key, value = (self._by_head(part) for part in kv.chunk(2, dim=-1))
        return self._by_head(query), key, value

    def _by_head(self, part: Tensor) -> Tensor:
        # [b, s, n*d] -> [b, n, s, d]
        return part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _gathered(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """A rank's columns of key and value -> 2 of [b, 1, s, d], the head of its queries."""
        t = self.group.size
        ranks = t // self.kv_heads
        first = self.group.rank // ranks * ranks
        # [b, s, 2kd/t] -> [b, t*s, 2kd/t] -> [b, t, s, 2, kd/t]
        columns = gather_sequence(kv, self.group).unflatten(1, (t, -1)).unflatten(-1, (2, -1))
        # -> [b, t/k, s, 2, kd/t] -> [2, b, s, t/k, kd/t] -> [2, b, 1, s, d]
        own = columns[:, first : first + ranks].permute(3, 0, 2, 1, 4).flatten(-2)[:, :, None]
        return own[0], own[1]

    def _positions(self, query: Tensor, given: Positions | None) -> Positions:
        if given is not None:
            return given
        cp = self.core.cp
        return context_positions(query.shape[-2] * cp.size, cp.size, cp.rank, device=query.device)

    def extra_repr(self) -> str:
        own = f"heads {self.local_heads.start}..{self.local_heads.stop} of {self.heads}"
        local = max(1, self.kv_heads // self.group.size)
        kv = f", {local} of {self.kv_heads} kv" if self.shared > 1 else ""
        core = self.core
        scale = "" if core.scale is None else f", scale={core.scale}"
        rest = f"d={self.head_dim}, causal={core.causal}, dropout={core.dropout}{scale}"
        split = f", c={core.cp.size}" if core.cp.size > 1 else ""
        return f"{own}{kv}, {rest}, t={self.group.size}{split}"


def _check_kv(heads: int, kv_heads: int, head_dim: int, t: int) -> None:
    """Whole key-value heads to a rank, or whole shares of one: kv_heads / t or its inverse."""
    if not splits_kv_heads(kv_heads, head_dim, parts=t):
        legal = ", ".join(str(ranks) for ranks in divisors(heads)
                          if splits_kv_heads(kv_heads, head_dim, parts=ranks))  # fmt: skip
        raise ValueError(
            f"kv_heads: {kv_heads} is not divisible by {t} ranks, nor do {t} ranks share a head's "
            f"{head_dim} columns evenly (use one of {legal} ranks)"
        )
