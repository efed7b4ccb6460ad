"""One decoder layer of an encoder-decoder, pre-norm, in the order of T5 (arXiv 1910.10683, 2.1).

    x += drop(attention(norm(x)))     causal self attention
    x += drop(cross(norm(x), y))      y: the encoder's output, normed by the encoder
    x += drop(mlp(norm(x)))

Collectives forward + backward: Q messages of b*q*h elements, decoder rows, and S messages of b*s*h,
encoder rows; whole messages:

    tensor parallel             3Q all-reduce + 3Q, 1S all-reduce
    with sequence parallelism   3Q, 1S all-gather, 3Q reduce-scatter
                                + 6Q, 1S all-gather, 3Q, 1S reduce-scatter
    recompute full              backward has the forward's too, without dropout one of Q fewer
    full, partition             and 1Q all-gather of the kept input
    context parallelism         1 all-gather of 2*b*(a/t)*q*d and 1 of 2*b*(a/t)*s*d elements
                                + a reduce-scatter of each

Every layer sends its own S, and keeps y, one tensor for all of them: recompute full, partition and
offload drop, split or move x alone. b=1, q=8, s=16, h=4 in float32: Q is 128 bytes, S 256.

Letters: b batch, q decoder positions, s encoder positions, h hidden, a heads, d head size, t tp,
c cp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpctl.kernels.attention import ParallelSelfAttention
from mpctl.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.kernels.cache import ContextCache, KeyValueCache
from mpctl.kernels.counter_rng import CounterRNG
from mpctl.kernels.cross_attention import ParallelCrossAttention
from mpctl.kernels.layer import Norm, Recompute, ResidualLayer
from mpctl.kernels.mlp import Activation, ParallelMLP
from mpctl.transport.group import Group

Caches = tuple[KeyValueCache | None, ContextCache | None]


class ParallelDecoderLayer(ResidualLayer):
    """hidden [b, q/c, h], context [b, s/c, h] -> [b, q/c, h].

    With sequence_parallel all three are split over the group too, [b, q/(ct), h] and so on. site,
    dropout, attention_dropout, output_std (of the three projections into the residual), scale: as
    ParallelTransformerLayer's. attention_dropout and scale count for both attentions.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        ffn: int,
        *,
        group: Group,
        site: str,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        head_dim: int | None = None,
        scale: float | None = None,
        activation: Activation = "gelu",
        bias: bool = True,
        norm: Norm = "layernorm",
        eps: float = 1e-5,
        cp: Group | None = None,
        sequence_parallel: bool = False,
        recompute: Recompute = "none",
        partition: bool = False,
        offload: bool = False,
        init_std: float = 0.02,
        output_std: float | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        backend: KernelBackend = TORCH_BACKEND,
    ) -> None:
        super().__init__(
            group=group, site=site, dropout=dropout, cp=cp, sequence_parallel=sequence_parallel,
            recompute=recompute, partition=partition, offload=offload,
        )  # fmt: skip
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        linear: dict[str, Any] = {
            "group": group, "bias": bias, "sequence_parallel": sequence_parallel,
            "init_std": init_std, "output_std": output_std, **place,
        }  # fmt: skip
        core: dict[str, Any] = {
            "head_dim": head_dim, "dropout": attention_dropout, "scale": scale, "cp": cp,
            "backend": backend, "recompute_core": recompute == "selective",
        }  # fmt: skip
        self.attention_norm = self._norm(norm, hidden, eps=eps, backend=backend, **place)
        self.attention = ParallelSelfAttention(
            hidden, heads, site=f"{site}.attention.probabilities", **core, **linear
        )
        self.cross_norm = self._norm(norm, hidden, eps=eps, backend=backend, **place)
        self.cross = ParallelCrossAttention(
            hidden, heads, site=f"{site}.cross.probabilities", **core, **linear
        )
        self.mlp_norm = self._norm(norm, hidden, eps=eps, backend=backend, **place)
        self.mlp = ParallelMLP(hidden, ffn, activation=activation, **linear)

    def forward(
        self, hidden: Tensor, context: Tensor, noise: CounterRNG | None = None, *,
        bias: Tensor | None = None, mask: Tensor | None = None,
        context_mask: Tensor | None = None, caches: Caches = (None, None),
    ) -> Tensor:  # fmt: skip
        """bias [1 or b, a/t, q/c, q], relative.py's, and mask [b or 1, 1, q/c, q]: of the self
        attention; context_mask [b or 1, 1, q/c, s]: which of the encoder's tokens are seen. caches:
        of the self-attention and of the cross-attention (cache.py)."""
        return self._kept(
            self._once, hidden, context, noise, bias=bias, mask=mask, context_mask=context_mask,
            caches=caches,
        )  # fmt: skip

    def _once(
        self, hidden: Tensor, context: Tensor, noise: CounterRNG | None, *, bias: Tensor | None,
        mask: Tensor | None, context_mask: Tensor | None, caches: Caches,
    ) -> Tensor:  # fmt: skip
        def attend(x: Tensor) -> Tensor:
            return self.attention(x, noise, bias=bias, mask=mask, cache=caches[0])

        def look(x: Tensor) -> Tensor:
            return self.cross(x, context, noise, mask=context_mask, cache=caches[1])

        hidden = self._branch("attention", hidden, self.attention_norm, attend, noise)
        hidden = self._branch("cross", hidden, self.cross_norm, look, noise)
        return self._branch("mlp", hidden, self.mlp_norm, self.mlp, noise)
