"""One pre-norm transformer layer: x += drop(attention(norm(x))), then x += drop(mlp(norm(x))).

GPT-2's order; the parallel split is Megatron-LM's (arXiv 1909.08053, figure 4). Collectives of
b*s*h elements each, whole message, forward + backward:

    tensor parallel                 2 all-reduce + 2 all-reduce
    with sequence parallelism       2 all-gather, 2 reduce-scatter + 4 all-gather, 2 reduce-scatter
    recompute full                  backward has the forward's too, without dropout one fewer
    full, partition                 and 1 all-gather of the kept input

Under sequence parallelism (arXiv 2205.05198, section 4.2.2) norms, dropout and residual see this
rank's positions only; two of the four all-gathers are of inputs gathered again for dW. With b=2,
s=8, h=16 in float32 each message is 1024 bytes. A mask depends on the global position alone, so
every row of this table draws the same.

Letters: b batch, s sequence, h hidden, t tp, c cp.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from mpctl.kernels.attention import ParallelSelfAttention
from mpctl.kernels.context import context_positions
from mpctl.kernels.group import Group
from mpctl.kernels.masks import Places
from mpctl.kernels.mlp import Activation, ParallelMLP
from mpctl.kernels.noise import Noise
from mpctl.kernels.norm import LayerNorm, RMSNorm
from mpctl.kernels.parameters import mark_partial
from mpctl.kernels.recompute import checkpointed
from mpctl.kernels.rotary import Rotary
from mpctl.sharding import local_range

Recompute = Literal["none", "selective", "full"]
Norm = Literal["layernorm", "rmsnorm"]
NORMS: dict[Norm, type[LayerNorm] | type[RMSNorm]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}


class ParallelTransformerLayer(nn.Module):
    """[b, s/c, h] -> [b, s/c, h]; with sequence_parallel both are [b, s/(ct), h].

    site names the layer to the dropout masks and must not depend on the layout: `layers.7` by the
    layer's global number. dropout is for the two residual branches, attention_dropout for the
    probabilities. output_std: std of the two projections into the residual, 0.02/sqrt(2L) for L
    layers; by default init_std.

    recompute full keeps the layer's input only: partition in parts over the group, offload on the
    host (saved.py). Raises ValueError where these are asked for without it, and for a partition
    under sequence parallelism, whose input is a part already.
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
        kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = True,
        activation: Activation = "gelu",
        bias: bool = True,
        norm: Norm = "layernorm",
        eps: float = 1e-5,
        rotary: Rotary | None = None,
        cp: Group | None = None,
        sequence_parallel: bool = False,
        recompute: Recompute = "none",
        partition: bool = False,
        offload: bool = False,
        init_std: float = 0.02,
        output_std: float | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        _check(norm, recompute, partition, offload, sequence_parallel)
        self.dropout, self.site, self.group, self.cp = dropout, site, group, cp or Group(name="cp")
        self.sequence_parallel, self.recompute = sequence_parallel, recompute
        self.partition, self.offload = partition, offload
        self.attention_norm = NORMS[norm](hidden, eps=eps, dtype=dtype, device=device)
        self.attention = ParallelSelfAttention(
            hidden, heads, group=group, site=f"{site}.attention.probabilities", kv_heads=kv_heads,
            head_dim=head_dim, dropout=attention_dropout, causal=causal, bias=bias, rotary=rotary,
            recompute_core=recompute == "selective", sequence_parallel=sequence_parallel, cp=cp,
            init_std=init_std, output_std=output_std, dtype=dtype, device=device,
        )  # fmt: skip
        self.mlp_norm = NORMS[norm](hidden, eps=eps, dtype=dtype, device=device)
        self.mlp = ParallelMLP(
            hidden, ffn, group=group, activation=activation, bias=bias,
            sequence_parallel=sequence_parallel, init_std=init_std, output_std=output_std,
            dtype=dtype, device=device,
        )  # fmt: skip
        if sequence_parallel:
            mark_partial(self.attention_norm)
            mark_partial(self.mlp_norm)

    def forward(self, hidden: Tensor, noise: Noise | None = None, **attention: Any) -> Tensor:
        """attention: what the attention's forward takes, such as mask or positions."""
        if self.recompute != "full":
            return self._once(hidden, noise, **attention)
        return checkpointed(
            self._once, hidden, noise, group=self.group, partition=self.partition,
            offload=self.offload, **attention,
        )  # fmt: skip

    def _once(self, hidden: Tensor, noise: Noise | None, **attention: Any) -> Tensor:
        attended = self.attention(self.attention_norm(hidden), noise, **attention)
        hidden = hidden + self._dropped(attended, noise, "attention")
        widened = self.mlp(self.mlp_norm(hidden))
        return hidden + self._dropped(widened, noise, "mlp")

    def _dropped(self, x: Tensor, noise: Noise | None, branch: str) -> Tensor:
        if noise is None or not noise.active(self.dropout):
            return x
        rows = held_rows(
            x.shape[1], group=self.group, cp=self.cp, sequence_parallel=self.sequence_parallel,
            device=x.device,
        )  # fmt: skip
        return noise.dropout(x, self.dropout, site=f"{self.site}.{branch}", rows=rows)

    def extra_repr(self) -> str:
        unusual = {
            "sequence_parallel": self.sequence_parallel,
            f"recompute={self.recompute}": self.recompute != "none",
            "partition": self.partition,
            "offload": self.offload,
        }
        set_ = "".join(f", {name}" for name, given in unusual.items() if given)
        return f"site={self.site}, dropout={self.dropout}{set_}"


def _check(norm: str, recompute: str, partition: bool, offload: bool, split: bool) -> None:
    if norm not in NORMS:
        raise ValueError(f"norm {norm!r} is not one of {', '.join(NORMS)}")
    if recompute not in ("none", "selective", "full"):
        raise ValueError(f"recompute {recompute!r} is not one of none, selective, full")
    if (partition or offload) and recompute != "full":
        raise ValueError(
            f"recompute {recompute}: partition and offload keep the input of a layer "
            "that is recomputed (set recompute to full)"
        )
    if partition and split:
        raise ValueError(
            "partition: under sequence_parallel a layer's input is 1/t already (drop one)"
        )


def held_rows(
    length: int, *, group: Group, cp: Group, sequence_parallel: bool, device: torch.device
) -> Places:
    """The global positions of the `length` rows that a rank holds outside the regions.

    By hand: 8 positions, cp 2, tp 2 with sequence parallelism: cp rank 0 holds 0 1 6 7, of which
    its tp rank 1 has 6 7.
    """
    parts, index = (group.size, group.rank) if sequence_parallel else (1, 0)
    own = local_range(length * parts, parts=parts, index=index)
    if cp.size == 1:
        return own
    held = context_positions(length * parts * cp.size, cp.size, cp.rank, device=device)
    return held[own.start : own.stop]
