"""A model's matrix products and parameters by named dimensions, without torch.

The sharding law determines what is split (sharding.py and tensor_grid.py: which axes split a
dimension); the contraction law, applied three times, determines the collectives of a product:

    forward  Y = X W      contracts what X and W share and Y lacks
    dX = dY W^T           contracts what Y and W share and X lacks
    dW = X^T dY           contracts what X and Y share and W lacks (batch: once a step, over dp)

A reduced product is a row-parallel one and sends its result; a column-parallel one sends its input.
Backward sends no gradient that it does not compute (dX or dW of frozen parts): grad_flow.py.

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
from typing import NamedTuple

from mpctl.core.collectives import Kind
from mpctl.core.sharding import DENSE, Views, reduced_axes
from mpctl.core.tensor_grid import FEATURES

Dims = tuple[str, ...]
ROUTED: Dims = ("routed",)
"""The rows of tokens that a rank's experts compute, one for each expert of a token."""
_SUM: tuple[Kind, ...] = ("all_reduce",)
_GATHER: tuple[Kind, ...] = ("all_gather",)
_SCATTER: tuple[Kind, ...] = ("reduce_scatter",)


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter: its name inside the model, full shape and the name of each dimension. decays:
    whether weight decay applies to it, as to all but norms and biases. view: the view of the ranks
    (sharding.View) whose axes cut its dimensions."""

    name: str
    shape: tuple[int, ...]
    dims: Dims
    decays: bool = True
    view: str = DENSE

    @cached_property
    def numel(self) -> int:
        """Elements of the unsharded parameter."""
        return prod(self.shape)

    @cached_property
    def is_split(self) -> bool:
        """Whether the ranks of its view cut it: a dimension of features, which every tensor mode
        cuts, or any parameter of another view than the dense one."""
        return self.view != DENSE or any(dim in FEATURES for dim in self.dims)

    def local_numel(self, views: Views) -> int:
        """Elements of it on each rank."""
        return self.numel // views[self.view].grid.weight_parts(self.dims)

    def partial_kind(self, views: Views) -> str:
        """The group over which its gradient is a partial sum after backward, empty where it is
        complete."""
        return views[self.view].grid.partial_kind(self.dims)


class CollectivePhases(NamedTuple):
    """Kinds of collectives of a product, such as `all_reduce`, in the order in which they run."""

    forward: tuple[Kind, ...]
    backward: tuple[Kind, ...]


class GradNeeds(NamedTuple):
    """Which gradients backward computes at Y = X W + b.

    x: dX. w: dW. y: any gradient, of this product or of operations before it.
    """

    x: bool = True
    w: bool = True
    y: bool = True


class MatMul(NamedTuple):
    """A matrix product Y = X W by the names of its dimensions.

    part: the heading under which reports count it. reads, weight, writes: the dimensions of X, W
    and Y. input_gradient: whether X can have a gradient. is_lookup: whether it is the lookup of
    rows in a table, which counts as the product of one-hot rows with it and computes nothing.
    table: the module whose weight it uses, if not its own (a tied head). is_head: whether it
    belongs to an output head, which low-precision training leaves in its wider dtype. is_gathered:
    whether every rank needs all of Y, of which a column product writes a part. value: the tensor
    that it reads (layer.py), which it saves for dW unless it is saved already; empty where that is
    negligible. weights: W and, where the model has biases, b. is_wide: whether it is multiplied in
    float32 at least, whatever the training dtype is (a router).
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
    value: str = ""
    weights: tuple[ParameterSpec, ...] = ()
    is_wide: bool = False

    @property
    def is_grouped(self) -> bool:
        """Whether its rows are those of tokens sent to experts, each multiplied by the matrix of
        its expert."""
        return bool(self.weights) and self.weights[0].dims[0] == "experts" and self.rows == ROUTED

    @property
    def matrix(self) -> ParameterSpec:
        """W as a parameter, of the model that the product was listed for."""
        return self.weights[0]

    @property
    def parameter(self) -> str:
        """Name of W."""
        return f"{self.table or self.name}.weight"

    @property
    def bias(self) -> str:
        """Name of b, which exists where the model has biases."""
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
