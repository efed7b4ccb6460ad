"""A layer as one list of operations in execution order, and a model's stacks of such layers.

An operation names what it reads and writes by dimensions, and holds its parameters. All figures of
a layer are folds over the list: FLOP (flops.py), messages (tensor_messages.py), gradients that are
needed (grad_flow.py), and in estimate/ the tensors saved for backward, peak memory and the seconds
of memory-bound kernels. The costs of an operation under a runtime are data: the columns of
kernel_sets.py and the passes of a runtime's profile.

A tensor has the name of the operation that made it; `input` is the layer's own input. Two
operations that read one tensor, as the two branches of a parallel residual do, save it once.

By hand, a pre-norm layer: attention_norm(input), attention.qkv(attention_norm), the core,
attention.output(context), the residual sum "attention", mlp_norm(attention), mlp.up(mlp_norm), the
activation, mlp.down(activation), the residual sum "mlp".

A layer with experts has in place of the MLP: mlp.router(mlp_norm), the dispatch, mlp.experts.up,
the activation, mlp.experts.down, the combination, and the shared experts' MLP.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias, Union

from mpctl.model.operators.matmul import Dims, MatMul, ParameterSpec

INPUT = "input"
SOURCE = "source"  # the result of the stack before, which cross attention reads
CONTEXT = "context"  # the result of an attention core, which the next product reads


class Norm(NamedTuple):
    """A norm over the last dimension of `reads`: `hidden`, or heads of queries and keys.

    part: the branch or end that it belongs to. kind: layernorm, rmsnorm or nonparametric. value:
    the tensor that it reads.
    """

    name: str
    part: str
    reads: Dims
    kind: str
    value: str
    weights: tuple[ParameterSpec, ...] = ()


class Activation(NamedTuple):
    """The activation between the two products of an MLP. is_gated: whether it multiplies the
    activation of one half of its input with the other half."""

    part: str
    reads: Dims
    kind: str
    is_gated: bool
    value: str


class Residual(NamedTuple):
    """Dropout of a branch's result, and its sum with the hidden states."""

    part: str
    reads: Dims


class Dropout(NamedTuple):
    """Dropout of embeddings."""

    part: str
    reads: Dims


class Table(NamedTuple):
    """Rows of tables that are added to the embeddings: of positions, of segments."""

    part: str
    weights: tuple[ParameterSpec, ...]


class Loss(NamedTuple):
    """Cross entropy of logits."""

    part: str
    reads: Dims


class Dispatch(NamedTuple):
    """Sends each token's hidden states to the ranks of its experts: `reads` are the positions of
    this rank, `writes` the rows that its experts compute."""

    part: str
    reads: Dims
    writes: Dims


class Combine(NamedTuple):
    """Sends the experts' results back, and sums those of a token by the router's weights."""

    part: str
    reads: Dims
    writes: Dims


class AttentionOp(NamedTuple):
    """softmax(Q K^T + bias) V of one attention of a layer.

    part: name of the attention, as its matrix products have it. queries, keys: the sequence
    dimensions of the two sides, equal for self-attention. query_product, key_product: names of the
    matrix products that write queries, and keys with values. is_causal: a query sees no later key.
    has_bias: a learned bias per head is added to the scores (T5's relative positions).
    has_slopes: a bias per head that follows from the distance is added to them (ALiBi).
    has_sample_mask: each sample has a different mask [s, s] (GLM), so that masks have a batch
    dimension. window: the number of keys that a query of a causal attention sees, itself included;
    0 for all. is_rotary: rotary positions are applied to queries and keys. has_norms: queries and
    keys are normalized; norms_width: over all heads together. latent: multi-head
    latent attention: width of what keys and values are computed from, positions included, which cp
    exchanges in their place; 0 for others.
    """

    part: str
    queries: str = "seq"
    keys: str = "seq"
    query_product: str = "attention.qkv"
    key_product: str = "attention.qkv"
    is_causal: bool = False
    has_bias: bool = False
    has_slopes: bool = False
    has_sample_mask: bool = False
    window: int = 0
    is_rotary: bool = False
    has_norms: bool = False
    norms_width: bool = False
    latent: int = 0

    @property
    def is_cross(self) -> bool:
        """Whether the keys come from another stack than the queries."""
        return self.queries != self.keys

    @property
    def is_plain(self) -> bool:
        """Whether it has no variant other than being causal or not."""
        return not (self.has_bias or self.has_slopes or self.window or self.has_sample_mask)

    def counted_pairs(self, queries: int, keys: int) -> int:
        """Pairs of a query and a key that FLOP are counted for. Those of a causal attention count
        in full; those of a window twice the ones it sees, 2 s w - w^2, which for w = s is s^2 as
        well. queries: of this rank; keys: of the full sequence.

        >>> AttentionOp("attention", is_causal=True, window=2).counted_pairs(8, 8)
        28
        """
        if not self.window or not keys:  # cp may be larger than the sequence, which a rule refuses
            return queries * keys
        return queries * (2 * keys - self.window) * self.window // keys

    def seen_pairs(self, queries: int, keys: int) -> float:
        """Pairs of a query and a key that it may see, without the half of the diagonal."""
        return self.counted_pairs(queries, keys) * (0.5 if self.is_causal else 1.0)


Operation: TypeAlias = Union[
    MatMul, Norm, Activation, Dispatch, Combine, AttentionOp, Residual, Dropout, Table, Loss, "OperatorGroup"
]


@dataclass(frozen=True, eq=False)
class OperatorGroup:
    """The operations of a layer or of an end of a stack. A layer that belongs to an end
    (multi-token prediction) is one operation of its list. Layers of one kind are one object."""

    operations: tuple[Operation, ...] = ()

    @cached_property
    def flat(self) -> tuple[Operation, ...]:
        """The operations with those of layers inside it."""
        return tuple(self._flat())

    def _flat(self) -> Iterator[Operation]:
        for operation in self.operations:
            if isinstance(operation, OperatorGroup):
                yield from operation.flat
            else:
                yield operation

    @cached_property
    def validated(self) -> OperatorGroup:
        """Its operations in a validation, which ends with the first loss: layers of multi-token
        prediction come after it. All of a group without a loss."""
        losses = [n for n, one in enumerate(self.operations) if isinstance(one, Loss)]
        if not losses or losses[0] + 1 == len(self.operations):
            return self
        return OperatorGroup(self.operations[: losses[0] + 1])

    @cached_property
    def products(self) -> tuple[MatMul, ...]:
        """Its matrix products."""
        return tuple(one for one in self.flat if isinstance(one, MatMul))

    @cached_property
    def cores(self) -> tuple[AttentionOp, ...]:
        """Its attentions."""
        return tuple(one for one in self.flat if isinstance(one, AttentionOp))

    @cached_property
    def norms(self) -> tuple[Norm, ...]:
        """Its norms of hidden states."""
        return tuple(n for n in self.flat if isinstance(n, Norm) and n.reads[-1] == "hidden")

    @cached_property
    def width_norms(self) -> tuple[Norm, ...]:
        """Its norms of queries and keys over all heads together."""
        norms = (one for one in self.flat if isinstance(one, Norm) and one.reads[-1] == "heads")
        return tuple(norm for norm in norms if norm.weights and norm.weights[0].dims == ("heads",))

    @cached_property
    def has_experts(self) -> bool:
        """Whether tokens are sent to experts in it."""
        return any(isinstance(one, Dispatch) for one in self.flat)

    @cached_property
    def branches(self) -> tuple[Residual, ...]:
        """Its residual branches, of a layer its attentions and its MLP."""
        return tuple(one for one in self.flat if isinstance(one, Residual))

    @cached_property
    def layers(self) -> tuple[OperatorGroup, ...]:
        """The layers in it: in an end those of multi-token prediction, in a layer itself."""
        inside = tuple(one for one in self.operations if isinstance(one, OperatorGroup))
        return inside or (self,) * bool(self.branches)

    @cached_property
    def weights(self) -> tuple[ParameterSpec, ...]:
        """Its parameters in execution order, each once."""
        found = {w.name: w for one in self.flat for w in parameters_of(one)}
        return tuple(found.values())


def parameters_of(operation: Operation) -> tuple[ParameterSpec, ...]:
    """The parameters of one operation."""
    if isinstance(operation, (MatMul, Norm, Table, OperatorGroup)):
        return operation.weights
    return ()


@dataclass(frozen=True)
class LayerStack:
    """A sequence of layers, with the ends before the first and after the last of them.

    prefix: of parameter names; those of a layer are relative to `{prefix}.N.`, where layers count
    from 0 in each stack. blocks: the layers; layers of one kind share one object, and kinds may
    differ in anything (windows, experts). seq: the dimension that the hidden states have for the
    sequence. entry, exit: embedding and head, or nothing. shared: parameters that every stage with
    a layer of the stack holds (a bias that all layers add).
    """

    prefix: str
    blocks: tuple[OperatorGroup, ...]
    seq: str = "seq"
    entry: OperatorGroup = OperatorGroup()
    exit: OperatorGroup = OperatorGroup()
    shared: tuple[ParameterSpec, ...] = ()

    @property
    def layers(self) -> int:
        """The number of its layers."""
        return len(self.blocks)

    def block_of(self, layer: int) -> OperatorGroup:
        """The operations of a layer, by its number in the stack."""
        return self.blocks[layer]

    @cached_property
    def kinds(self) -> tuple[OperatorGroup, ...]:
        """Its kinds of layers, in the order of their first layers."""
        return tuple({id(block): block for block in self.blocks}.values())

    @property
    def name(self) -> str:
        """`encoder` for the prefix `encoder.layers`; empty where a model has one stack."""
        return self.prefix.removesuffix("layers").rstrip(".")

    @property
    def title(self) -> str:
        """`encoder blocks`; `blocks` where a model has one stack."""
        return f"{self.name} blocks".lstrip()

    @property
    def figure_name(self) -> str:
        """The stack in the name of a figure: `encoder-blocks`."""
        return self.title.replace(" ", "-")

    @cached_property
    def has_logits(self) -> bool:
        """Whether its exit computes logits, as that of a model's last stack does."""
        return any(isinstance(operation, Loss) for operation in self.exit.operations)
