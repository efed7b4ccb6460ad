"""A model's matrix products and parameters by named dimensions, without torch.

What is split follows from the sharding law (sharding.py alone maps a dimension to an axis, so a
tensor axis that factors into several is a change there); which collectives a product needs follows
from the contraction law, applied three times:

    forward  Y = X W      contracts what X and W share and Y lacks
    dX = dY W^T           contracts what Y and W share and X lacks
    dW = X^T dY           contracts what X and Y share and W lacks (batch: once a step, over dp)

A reduced product is a row-parallel one and sends its result; a column-parallel one sends its input.
What backward does not compute (dX or dW of what is frozen) it does not send: grad_flow.py.

>>> qkv = MatMul("qkv", "attention", ("batch", "seq", "hidden"), ("hidden", "heads"),
...              ("batch", "seq", "heads"))
>>> qkv.forward_axes, qkv.backward_axes          # column-parallel: f, all-reduced backward
((), ('tp',))
>>> qkv.message
('batch', 'seq', 'hidden')
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from mpctl.collectives import Kind
from mpctl.operators.saved import SavedTensor
from mpctl.sharding import reduced_axes
from mpctl.tensor_grid import FEATURES, TensorGrid

Dims = tuple[str, ...]
_SUM: tuple[Kind, ...] = ("all_reduce",)
_GATHER: tuple[Kind, ...] = ("all_gather",)
_SCATTER: tuple[Kind, ...] = ("reduce_scatter",)


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter: its name inside the model, full shape and the name of each dimension. decays:
    whether weight decay applies to it, as to all but norms and biases."""

    name: str
    shape: tuple[int, ...]
    dims: Dims
    decays: bool = True

    @cached_property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return prod(self.shape)

    @cached_property
    def is_split(self) -> bool:
        """Whether it has a dimension of features, which every tensor mode cuts."""
        return any(dim in FEATURES for dim in self.dims)

    def local_numel(self, grid: TensorGrid) -> int:
        """Elements of it on each tensor-parallel rank."""
        return self.numel // grid.weight_parts(self.dims)


@dataclass(frozen=True, slots=True)
class CollectivePhases:
    """Kinds of collectives of a product, such as `all_reduce`, in the order of their happening."""

    forward: tuple[Kind, ...]
    backward: tuple[Kind, ...]


@dataclass(frozen=True, slots=True)
class GradNeeds:
    """Which gradients backward computes at Y = X W + b.

    x: dX. w: dW. y: any gradient at all, of this product or of what lies before it.
    """

    x: bool = True
    w: bool = True
    y: bool = True


@dataclass(frozen=True, slots=True)
class MatMul:
    """A matrix product Y = X W by the names of its dimensions.

    part: the heading under which reports count it. reads, weight, writes: the dimensions of X, W
    and Y. input_gradient: whether X can have a gradient. is_lookup: whether it is the lookup of
    rows in a table, which counts as the product of one-hot rows with it and computes nothing.
    table: the module whose weight it multiplies by, where that is another's (a tied head). is_head:
    whether it belongs to an output head, which low-precision training leaves in its wider dtype.
    is_gathered: whether every rank needs the whole of Y, of which a column product writes a part.
    """

    name: str
    part: str
    reads: Dims
    weight: Dims
    writes: Dims
    input_gradient: bool = True
    is_lookup: bool = False
    table: str = ""
    is_head: bool = False
    is_gathered: bool = False

    @property
    def parameter(self) -> str:
        """Name of W."""
        return f"{self.table or self.name}.weight"

    @property
    def bias(self) -> str:
        """Name of b, which is there where the model has biases."""
        return f"{self.name}.bias"

    @property
    def rows(self) -> Dims:
        """The dimensions of X that W does not contract; a row of X for each of their elements."""
        return tuple(dim for dim in self.reads if dim in self.writes)

    @property
    def is_column(self) -> bool:
        """Whether it writes features (column-parallel), as the head does; else it reads them."""
        return any(dim in FEATURES for dim in self.writes)

    @property
    def forward_axes(self) -> tuple[str, ...]:
        """Axes over which forward leaves partial sums: those of contracted dimensions."""
        return reduced_axes((set(self.reads) & set(self.weight)) - set(self.writes))

    @property
    def backward_axes(self) -> tuple[str, ...]:
        """Axes over which dX = dY W^T leaves partial sums."""
        if not self.input_gradient:
            return ()
        return reduced_axes((set(self.writes) & set(self.weight)) - set(self.reads))

    @property
    def message(self) -> Dims:
        """Dimensions of the tensor that it sends over tp, forward or backward: its unsplit side."""
        return self.writes if "tp" in self.forward_axes else self.reads

    def collectives(self, *, sequence_parallel: bool, needs: GradNeeds) -> CollectivePhases:
        """The collectives over tp that forward and backward need, each of one `message`.

        Sequence parallelism splits an all-reduce into its two phases and moves one to the other
        side; a column product gathers its input again for dW (arXiv 2205.05198, section 4.2.2).
        """
        is_row, is_column = "tp" in self.forward_axes, "tp" in self.backward_axes
        if not sequence_parallel:
            return CollectivePhases(_SUM * is_row, _SUM * (is_column and needs.x))
        row = CollectivePhases(_SCATTER, _GATHER * (needs.x or needs.w))
        column = CollectivePhases(_GATHER, _GATHER * needs.w + _SCATTER * needs.x)
        return row if is_row else column if is_column else CollectivePhases((), ())


@dataclass(frozen=True, slots=True)
class AttentionOp:
    """softmax(Q K^T + bias) V of one attention of a layer.

    part: name of the attention, as its matrix products have it. queries, keys: the sequence
    dimensions of the two sides, equal for self-attention. query_product, key_product: names of the
    matrix products that write queries, and keys with values. is_causal: a query sees no later key.
    has_bias: a learned bias per head is added to the scores (T5's relative positions).
    has_slopes: a bias per head that follows from the distance is added to them (ALiBi).
    has_sample_mask: each sample has a mask [s, s] of its own (GLM), so that masks have a batch
    dimension. window: of a causal one, how many keys a query sees, itself among them; 0 for all.
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

    @property
    def is_cross(self) -> bool:
        """Whether the keys come from another stack than the queries."""
        return self.queries != self.keys

    def counted_pairs(self, queries: int, keys: int) -> int:
        """Pairs of a query and a key that FLOP are counted for. A causal attention's count whole;
        of a window twice those that it sees, 2 s w - w^2, which for w = s is s^2 as well. queries:
        of this rank; keys: of the whole sequence.

        By hand, 8 queries and keys and a window of 2: 2 x 8 x 2 - 4 = 28 of 64.
        """
        if not self.window:
            return queries * keys
        return queries * (2 * keys - self.window) * self.window // keys

    def seen_pairs(self, queries: int, keys: int) -> float:
        """Pairs of a query and a key that it may see, without the half of the diagonal."""
        return self.counted_pairs(queries, keys) * (0.5 if self.is_causal else 1.0)


@dataclass(frozen=True, slots=True)
class OperatorGroup:
    """Matrix products and parameters of a layer or of an end of a stack, in the order of the data.

    saved: of an end, the tensors that its forward saves for its backward, but for those that every
    embedding and every head has (estimate/saved_activations.py adds them). cores: of an end, the
    attentions of layers that are part of it (multi-token prediction), one a layer.
    """

    products: tuple[MatMul, ...] = ()
    weights: tuple[ParameterSpec, ...] = ()
    saved: tuple[SavedTensor, ...] = ()
    cores: tuple[AttentionOp, ...] = ()

    @property
    def norms(self) -> tuple[str, ...]:
        """The names of its norms of hidden states: `attention_norm`, `mlp_norm`."""
        ending, hidden = ".weight", [w for w in self.weights if w.dims == ("hidden",)]
        names = (w.name.removesuffix(ending) for w in hidden if w.name.endswith(ending))
        return tuple(name for name in names if name.endswith("norm"))


@dataclass(frozen=True, slots=True)
class LayerStack:
    """Equal layers in a row, with what stands before the first and after the last of them.

    prefix: of parameter names; those in `block` are relative to `{prefix}.N.`, where layers count
    from 0 in each stack. block: one layer. cores: its attentions, the first over its own hidden
    states. entry, exit: embedding and head, or nothing. shared: parameters that every stage with a
    layer of the stack holds (a bias that all layers add). period: where layers differ in their
    attentions (windows), those of layers 0, 1, .., which repeat; `cores` is then the first.

    Layers of two kinds of products, such as a mixture of experts in every k-th layer, would make
    `block` a function of the layer's number as well: the runs of alike layers in grad_flow.py
    already carry their own group and count, and everything that counts asks them.
    """

    prefix: str
    layers: int
    block: OperatorGroup
    cores: tuple[AttentionOp, ...]
    entry: OperatorGroup = OperatorGroup()
    exit: OperatorGroup = OperatorGroup()
    shared: tuple[ParameterSpec, ...] = ()
    period: tuple[tuple[AttentionOp, ...], ...] = ()

    def cores_of(self, layer: int) -> tuple[AttentionOp, ...]:
        """The attentions of a layer, by its number in the stack."""
        return self.period[layer % len(self.period)] if self.period else self.cores

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

    @property
    def seq(self) -> str:
        """The dimension that its hidden states have for the sequence."""
        return self.cores[0].queries

    @property
    def has_logits(self) -> bool:
        """Whether its exit gives logits, as that of a model's last stack does."""
        return any("vocab" in product.writes for product in self.exit.products)
