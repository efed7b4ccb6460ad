"""One transformer layer, pre-norm or post-norm, and what it shares with the decoder's.

    pre     x += drop(attention(norm(x)))          x += drop(mlp(norm(x)))              GPT-2, T5
    post    x = norm(x + drop(attention(x)))       x = norm(x + drop(mlp(x)))           BERT

(post: Vaswani et al., arXiv 1706.03762, section 3.1; BERT, arXiv 1810.04805, keeps it.) The
parallel split is Megatron-LM's (arXiv 1909.08053, figure 4), for either order. Collectives of b*s*h
elements each, whole message, forward + backward:

    tensor parallel                 2 all-reduce + 2 all-reduce
    with sequence parallelism       2 all-gather, 2 reduce-scatter + 4 all-gather, 2 reduce-scatter
    recompute full, pre             backward has the forward's too, without dropout one fewer
    recompute full, post            backward has the forward's too, all: the last norm's input
                                    follows the last reduction
    full, partition                 and 1 all-gather of the kept input

Under sequence parallelism (arXiv 2205.05198, section 4.2.2) norms, dropout and residual see this
rank's positions only; two of the four all-gathers are of inputs gathered again for dW. With b=2,
s=8, h=16 in float32 each message is 1024 bytes. A mask depends on the global position alone, so
every row of this table draws the same.

Letters: b batch, s sequence, h hidden, t tp, c cp.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import chain
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from mpctl.kernels.attention import ParallelSelfAttention
from mpctl.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.kernels.context import context_positions
from mpctl.kernels.counter_rng import CounterRNG
from mpctl.kernels.masks import Positions
from mpctl.kernels.mlp import Activation, ParallelMLP
from mpctl.kernels.norm import LayerNorm, RMSNorm
from mpctl.kernels.parameters import mark_partial
from mpctl.kernels.recompute import checkpointed
from mpctl.kernels.rotary import Rotary
from mpctl.sharding import local_range
from mpctl.transport.group import Group

Recompute = Literal["none", "selective", "full"]
Order = Literal["pre", "post"]
Norm = Literal["layernorm", "rmsnorm"]
NORMS: dict[Norm, type[LayerNorm] | type[RMSNorm]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}


class ResidualLayer(nn.Module):
    """What layers share: branches with norm, dropout and residual, and their recomputation.

    recompute full keeps the layer's input only: partition in parts over the group, offload on the
    host (saved.py). Raises ValueError where these are asked for without it, and for a partition
    under sequence parallelism, whose input is a part already.
    """

    def __init__(
        self, *, group: Group, site: str, dropout: float, cp: Group | None,
        sequence_parallel: bool, recompute: Recompute, partition: bool, offload: bool,
        order: Order = "pre",
    ) -> None:  # fmt: skip
        super().__init__()
        _known("recompute", recompute, get_args(Recompute))
        _known("order", order, get_args(Order))
        _check_kept(recompute, partition, offload, sequence_parallel)
        self.dropout, self.site, self.group, self.cp = dropout, site, group, cp or Group(name="cp")
        self.sequence_parallel, self.recompute, self.order = sequence_parallel, recompute, order
        self.partition, self.offload = partition, offload

    def _norm(self, kind: Norm, hidden: int, **rest: Any) -> nn.Module:
        _known("norm", kind, NORMS)
        made = NORMS[kind](hidden, **rest)
        if self.sequence_parallel:
            mark_partial(made)
        return made

    def _kept(self, once: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """once(hidden, ..), keeping what the layer's `recompute` says; frozen, nothing is kept."""
        if self.recompute != "full" or not self._computes_gradients(*args, *kwargs.values()):
            return once(*args, **kwargs)
        return checkpointed(
            once, *args, group=self.group, partition=self.partition, offload=self.offload, **kwargs
        )

    def _computes_gradients(self, *given: Any) -> bool:
        tensors = (value for value in given if isinstance(value, Tensor))
        return any(tensor.requires_grad for tensor in chain(tensors, self.parameters()))

    def _branch(
        self, name: str, x: Tensor, norm: nn.Module, work: Callable[[Tensor], Tensor],
        noise: CounterRNG | None,
    ) -> Tensor:  # fmt: skip
        if self.order == "post":
            return norm(x + self._dropped(work(x), noise, name))
        return x + self._dropped(work(norm(x)), noise, name)

    def _dropped(self, x: Tensor, noise: CounterRNG | None, branch: str) -> Tensor:
        if noise is None or not noise.active(self.dropout):
            return x
        rows = held_rows(
            x.shape[1], group=self.group, cp=self.cp, sequence_parallel=self.sequence_parallel,
            device=x.device,
        )  # fmt: skip
        return noise.dropout(x, self.dropout, site=f"{self.site}.{branch}", rows=rows)

    def extra_repr(self) -> str:
        unusual = {
            f"order={self.order}": self.order != "pre",
            "sequence_parallel": self.sequence_parallel,
            f"recompute={self.recompute}": self.recompute != "none",
            "partition": self.partition,
            "offload": self.offload,
        }
        set_ = "".join(f", {name}" for name, given in unusual.items() if given)
        return f"site={self.site}, dropout={self.dropout}{set_}"


class ParallelTransformerLayer(ResidualLayer):
    """[b, s/c, h] -> [b, s/c, h]; with sequence_parallel both are [b, s/(ct), h].

    site names the layer to the dropout masks and must not depend on the layout: `layers.7` by the
    layer's global number. dropout is for the two residual branches, attention_dropout for the
    probabilities. output_std: std of the two projections into the residual, 0.02/sqrt(2L) for L
    layers; by default init_std. scale: of the attention scores, by default 1/sqrt(head_dim).
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        ffn: int,
        *,
        group: Group,
        site: str,
        order: Order = "pre",
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = True,
        scale: float | None = None,
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
        backend: KernelBackend = TORCH_BACKEND,
    ) -> None:
        super().__init__(
            group=group, site=site, dropout=dropout, cp=cp, sequence_parallel=sequence_parallel,
            recompute=recompute, partition=partition, offload=offload, order=order,
        )  # fmt: skip
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        linear: dict[str, Any] = {
            "group": group, "bias": bias, "sequence_parallel": sequence_parallel,
            "init_std": init_std, "output_std": output_std, **place,
        }  # fmt: skip
        self.attention_norm = self._norm(norm, hidden, eps=eps, backend=backend, **place)
        self.attention = ParallelSelfAttention(
            hidden, heads, site=f"{site}.attention.probabilities", kv_heads=kv_heads,
            head_dim=head_dim, dropout=attention_dropout, causal=causal, scale=scale,
            rotary=rotary, recompute_core=recompute == "selective", cp=cp, backend=backend,
            **linear,
        )  # fmt: skip
        self.mlp_norm = self._norm(norm, hidden, eps=eps, backend=backend, **place)
        self.mlp = ParallelMLP(hidden, ffn, activation=activation, **linear)

    def forward(self, hidden: Tensor, noise: CounterRNG | None = None, **attention: Any) -> Tensor:
        """attention: what the attention's forward takes, such as mask or positions."""
        return self._kept(self._once, hidden, noise, **attention)

    def _once(self, hidden: Tensor, noise: CounterRNG | None, **attention: Any) -> Tensor:
        def attend(x: Tensor) -> Tensor:
            return self.attention(x, noise, **attention)

        hidden = self._branch("attention", hidden, self.attention_norm, attend, noise)
        return self._branch("mlp", hidden, self.mlp_norm, self.mlp, noise)


def _known(name: str, value: str, legal: Collection[str]) -> None:
    if value not in legal:
        raise ValueError(f"{name} {value!r} is not one of {', '.join(legal)}")


def _check_kept(recompute: str, partition: bool, offload: bool, split: bool) -> None:
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
) -> Positions:
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
