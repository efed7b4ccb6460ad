"""Transformer layers: residual branches around attention and MLP, in encoders and decoders.

pre       x += drop(branch(norm(x)))          GPT-2, T5, Llama
post      x = norm(x + drop(branch(x)))       BERT (arXiv 1706.03762, section 3.1)
output    x += drop(norm(branch(x)))          OLMo 2 (arXiv 2501.00656, section 3.2)
sandwich  x += drop(norm(branch(norm'(x))))   Gemma 2 (arXiv 2408.00118, section 2)

The MLP comes after attention, or both read the layer's input (parallel residual: GPT-NeoX, arXiv
2204.06745, section 2.1). A decoder's layer of an encoder-decoder has cross-attention to the
encoder's output between the two (T5, arXiv 1910.10683, section 2.1).

The split is Megatron-LM's (arXiv 1909.08053, figure 4). Collectives of b*s*h elements each (full
message), forward + backward:

    tensor parallel                 2 all-reduce + 2 all-reduce
    with sequence parallelism       2 all-gather, 2 reduce-scatter + 4 all-gather, 2 reduce-scatter
    recompute full, pre             backward repeats the forward's, without dropout one fewer
    recompute full, post            backward repeats all of the forward's: the last norm's input
                                    follows the last reduction
    full, partition_activations     and 1 all-gather of the saved input

Under sequence parallelism (arXiv 2205.05198, section 4.2.2) norms, dropout and residual see this
rank's positions only; two of the four all-gathers are of inputs gathered again for dW. A dropout
mask depends on the global position alone, so it is the same in every row of this table.

>>> import torch
>>> from mpctl.train.layers.attention import AttentionConfig
>>> from mpctl.train.layers.mlp import MLPConfig
>>> config = LayerConfig(AttentionConfig(hidden=16, heads=4), MLPConfig(hidden=16, ffn=64))
>>> layer = ParallelTransformerLayer(config, ShardContext(), rng_site="layers.0")
>>> layer(torch.zeros(2, 8, 16)).shape
torch.Size([2, 8, 16])

Letters: b batch, s sequence, h hidden, a heads, d head size, t tp, c cp; of a decoder layer q
decoder positions, s encoder positions.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, ClassVar, NamedTuple, Protocol, TypedDict, Unpack, runtime_checkable

from torch import Tensor, nn

from mpctl.train.kernels.counter_rng import CounterRNG
from mpctl.train.kernels.masks import Positions
from mpctl.train.kernels.rotary import CosSin
from mpctl.train.layers.adapters import AdapterRng
from mpctl.train.layers.attention import AttentionConfig, DecoderCaches, KeyValueCache, ParallelCrossAttention
from mpctl.train.layers.config import LayerConfig
from mpctl.train.layers.linear import summed_bias
from mpctl.train.layers.mlp import ParallelMLP
from mpctl.train.layers.recompute import checkpointed
from mpctl.train.layers.shard_context import ShardContext


class Attended(TypedDict, total=False):
    """Arguments that a layer passes to its self-attention; see ParallelSelfAttention.forward."""

    mask: Tensor | None
    bias: Tensor | None
    positions: Positions | None
    cos_sin: CosSin | None
    cache: KeyValueCache | None


@runtime_checkable
class ReusesChoice(Protocol):
    """A module whose forward makes discrete choices, which full recomputation must not make again:
    experts of tokens."""

    def reusing(self, first: list[Any]) -> Callable[[Tensor], Tensor]:
        """The forward. It adds its choices to an empty list, and reads them from one that is not:
        that of the first forward."""


class Branch(NamedTuple):
    """A residual branch. norm: of its input, or after the sum in the order post. output: the linear
    layer whose result `compute` returns, which may leave its bias's gradient to the caller."""

    name: str
    norm: nn.Module | None
    compute: Callable[..., Tensor]
    output_norm: nn.Module | None = None
    output: nn.Module | None = None


class ResidualLayer(nn.Module):
    """Base of the transformer layers.

    rng_site: the layer's name, on which dropout masks depend; it must not depend on the layout, for
    example `layers.7` by the layer's global number. RNG_SITES: names of the dropouts within a
    layer, the same in each, so that one compiled layer serves for all. Raises ValueError for
    partition_activations under sequence parallelism, where a layer's input is split already.
    """

    RNG_SITES: ClassVar[tuple[str, ...]] = ()
    mlp: nn.Module

    def __init__(self, config: LayerConfig, shard_context: ShardContext, rng_site: str) -> None:
        super().__init__()
        if config.partition_activations and shard_context.sequence_parallel:
            raise ValueError("partition_activations: under sequence_parallel a layer's input is 1/t already (drop one)")
        self.config, self.shard_context, self.rng_site = config, shard_context, rng_site
        self.adapter_rng = AdapterRng()

    def _norm(self) -> nn.Module:
        config = self.config
        return self.shard_context.norm(config.norm, config.hidden, eps=config.eps)

    def _checkpointed(self, hidden: Tensor, *inputs: Any, rng: CounterRNG | None, **kwargs: Any) -> Tensor:
        """The result of `_compute`, with the tensors saved for backward that `config.recompute`
        says; none if no gradient is needed."""
        config = self.config
        rng = None if rng is None else rng.within(self.rng_site)

        def compute(*inputs: Any, **kwargs: Any) -> Tensor:
            self.adapter_rng.rng = rng  # in the forward that backward repeats, too
            return self._compute(*inputs, **kwargs)

        if config.recompute != "full":
            return compute(hidden, *inputs, rng, **kwargs)
        given = chain((hidden, *inputs, *kwargs.values()), self.parameters())
        if not any(isinstance(x, Tensor) and x.requires_grad for x in given):
            return compute(hidden, *inputs, rng, **kwargs)
        if isinstance(self.mlp, ReusesChoice):
            kwargs["first"] = []
        return checkpointed(
            compute,
            hidden,
            *inputs,
            rng,
            group=self.shard_context.tp,
            partition=config.partition_activations,
            offload=self.shard_context.offload if config.offload_activations else None,
            **kwargs,
        )

    def _compute(self, hidden: Tensor, *inputs: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError

    def _feed_forward(self, first: list[Any] | None) -> Callable[[Tensor], Tensor]:
        """The MLP. first: choices of the first forward; see ReusesChoice."""
        if first is None:
            return self.mlp
        assert isinstance(self.mlp, ReusesChoice)
        return self.mlp.reusing(first)

    def _branches(self, x: Tensor, rng: CounterRNG | None, *branches: Branch) -> Tensor:
        """One residual branch after the other. In the orders pre and sandwich a norm takes the
        result of the branch before, where that is added without dropout, and hands the sum on, so
        that a device computes both, and adds both gradients, in one kernel. It, or dropout, then
        also sums the gradient of the branch's bias."""
        result: Tensor | None = None
        bias: Tensor | None = None
        before, drops = "", self._drops(rng)
        for name, norm, compute, output_norm, output in branches:
            if self.config.norm_order == "post" and norm is not None:
                x = norm(self._dropout_add(compute(x), rng, name, x))
                continue
            if result is not None and (norm is None or drops):
                x, result = self._dropout_add(result, rng, before, x, bias), None
            read = x
            if norm is not None:
                of_branch = {} if bias is None or drops else {"branch_bias": bias}
                x, read = norm(x, result, forks=True, **of_branch)
            is_summed = drops or name != branches[-1].name
            bias = self._bias(output) if self.config.norm_order == "pre" and is_summed else None
            result = compute(read) if bias is None else compute(read, bias_gradient=False)
            result, before = result if output_norm is None else output_norm(result), name
        return x if result is None else self._dropout_add(result, rng, before, x, bias)

    def _bias(self, output: nn.Module | None) -> Tensor | None:
        kernels = self.shard_context.backend
        bias = None if output is None else summed_bias(output, kernels)
        return bias if bias is not None and kernels.sums_branch(bias) else None

    def _drops(self, rng: CounterRNG | None) -> bool:
        return rng is not None and rng.active(self.config.dropout)

    def _dropout_add(
        self, x: Tensor, rng: CounterRNG | None, branch: str, residual: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        return self.shard_context.dropout_add(x, rng, self.config.dropout, residual, rng_site=branch, bias=bias)

    def extra_repr(self) -> str:
        config = self.config
        unusual = {
            f"norm_order={config.norm_order}": config.norm_order != "pre",
            "sequence_parallel": self.shard_context.sequence_parallel,
            f"recompute={config.recompute}": config.recompute != "none",
            "partition_activations": config.partition_activations,
            "offload_activations": config.offload_activations,
        }
        options = "".join(f", {name}" for name, is_set in unusual.items() if is_set)
        return f"rng_site={self.rng_site}, dropout={config.dropout}{options}"


def _output(mlp: nn.Module) -> nn.Module | None:
    """The last linear layer of a dense MLP."""
    return mlp.down if isinstance(mlp, ParallelMLP) else None


class ParallelTransformerLayer(ResidualLayer):
    """hidden [b, s/c, h] -> [b, s/c, h]; with sequence parallelism both are [b, s/(ct), h].

    rng_site: see ResidualLayer. Parameters are uninitialised (`parameters.initialise` fills them).
    Raises ValueError where heads, kv_heads or ffn cannot be split over `shard_context.tp`.
    """

    RNG_SITES = ("attention", "mlp", "attention.probabilities")

    def __init__(self, config: LayerConfig, shard_context: ShardContext, rng_site: str) -> None:
        super().__init__(config, shard_context, rng_site)
        order = config.norm_order
        has_first, has_result = order != "output", order in ("output", "sandwich")
        shares = config.parallel_residual and config.shared_norm
        self.attention_norm = self._norm() if has_first else None
        self.attention = config.attention.build(
            shard_context, "attention.probabilities", recompute=config.recompute == "selective"
        )
        self.attention_output_norm = self._norm() if has_result else None
        self.mlp_norm = self._norm() if has_first and not shares else None
        self.mlp = config.mlp.build(shard_context, f"{rng_site}.mlp")
        self.mlp_output_norm = self._norm() if has_result else None

    def forward(self, hidden: Tensor, rng: CounterRNG | None = None, **attended: Unpack[Attended]) -> Tensor:
        """rng: makes dropout masks; None is no dropout. attended: as ParallelSelfAttention's."""
        return self._checkpointed(hidden, rng=rng, **attended)

    def _compute(
        self, hidden: Tensor, rng: CounterRNG | None, first: list[Any] | None = None, **attended: Unpack[Attended]
    ) -> Tensor:
        feed_forward = self._feed_forward(first)

        def attend(x: Tensor, **how: bool) -> Tensor:
            return self.attention(x, rng, **attended, **how)

        if self.config.parallel_residual:
            return self._both(hidden, attend, feed_forward, rng)
        return self._branches(
            hidden,
            rng,
            Branch(
                "attention",
                self.attention_norm,
                attend,
                self.attention_output_norm,
                getattr(self.attention, "output", None),
            ),
            Branch("mlp", self.mlp_norm, feed_forward, self.mlp_output_norm, _output(self.mlp)),
        )

    def _both(
        self,
        hidden: Tensor,
        attend: Callable[[Tensor], Tensor],
        feed_forward: Callable[[Tensor], Tensor],
        rng: CounterRNG | None,
    ) -> Tensor:
        """x + drop(attention(norm(x))) + drop(mlp(norm(x))), with one norm or two."""
        assert self.attention_norm is not None
        hidden, read = self.attention_norm(hidden, forks=True)
        both = self._dropout_add(attend(read), rng, "attention", hidden)
        read = read if self.mlp_norm is None else self.mlp_norm(hidden)
        return self._dropout_add(feed_forward(read), rng, "mlp", both)


NO_CACHES = DecoderCaches()


class ParallelDecoderLayer(ResidualLayer):
    """hidden [b, q/c, h], context [b, s/c, h] -> [b, q/c, h].

    With sequence parallelism all three are split over tp too, [b, q/(ct), h] and so on.
    config.attention describes both attentions: the self-attention is causal if it says so, the
    cross-attention never is. rng_site: see ResidualLayer. Raises ValueError for norm_order post,
    and for features that cross-attention does not have.
    """

    RNG_SITES = ("attention", "cross", "mlp", "attention.probabilities", "cross.probabilities")

    def __init__(self, config: LayerConfig, shard_context: ShardContext, rng_site: str) -> None:
        super().__init__(config, shard_context, rng_site)
        if config.norm_order != "pre":
            raise ValueError("norm_order post: a decoder layer is pre-norm (set norm_order to pre)")
        if not isinstance(config.attention, AttentionConfig):
            raise ValueError(
                f"{type(config.attention).__name__}: a layer with cross-attention has multi-head "
                "attention (use AttentionConfig)"
            )
        recompute = config.recompute == "selective"
        self.attention_norm = self._norm()
        self.attention = config.attention.build(shard_context, "attention.probabilities", recompute=recompute)
        self.cross_norm = self._norm()
        self.cross = ParallelCrossAttention(config.attention, shard_context, "cross.probabilities", recompute=recompute)
        self.mlp_norm = self._norm()
        self.mlp = config.mlp.build(shard_context, f"{rng_site}.mlp")

    def forward(
        self,
        hidden: Tensor,
        context: Tensor,
        rng: CounterRNG | None = None,
        *,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
        caches: DecoderCaches = NO_CACHES,
    ) -> Tensor:
        """rng: makes dropout masks; None is no dropout. bias [1 or b, a/t, q/c, q] and mask
        [b or 1, 1, q/c, q] are the self-attention's; context_mask [b or 1, 1, q/c, s]: the
        encoder's tokens that are seen. caches: for incremental decoding."""
        return self._checkpointed(
            hidden, context, rng=rng, bias=bias, mask=mask, context_mask=context_mask, caches=caches
        )

    def _compute(
        self,
        hidden: Tensor,
        context: Tensor,
        rng: CounterRNG | None,
        *,
        bias: Tensor | None,
        mask: Tensor | None,
        context_mask: Tensor | None,
        caches: DecoderCaches,
        first: list[Any] | None = None,
    ) -> Tensor:
        def attend(x: Tensor) -> Tensor:
            return self.attention(x, rng, bias=bias, mask=mask, cache=caches.own)

        def attend_to_context(x: Tensor) -> Tensor:
            return self.cross(x, context, rng, mask=context_mask, cache=caches.cross)

        return self._branches(
            hidden,
            rng,
            Branch("attention", self.attention_norm, attend),
            Branch("cross", self.cross_norm, attend_to_context),
            Branch("mlp", self.mlp_norm, self._feed_forward(first)),
        )
