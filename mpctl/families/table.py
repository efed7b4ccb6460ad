"""The operator table: a model as named-dimension matrix products and parameters, without torch.

The planner counts it and tests hold the built module against it: same parameter names, same local
shapes, same collectives, byte by byte. What is split follows from the sharding law; which
collectives a product needs follows from the contraction law, applied three times:

    forward  Y = X W      contracts what X and W share and Y lacks
    dX = dY W^T           contracts what Y and W share and X lacks
    dW = X^T dY           contracts what X and Y share and W lacks (batch: once a step, over dp)

>>> qkv = Product("qkv", "attention", ("batch", "seq", "hidden"), ("hidden", "heads"),
...               ("batch", "seq", "heads"))
>>> qkv.forward_axes, qkv.backward_axes          # column-parallel: f, all-reduced backward
((), ('tp',))
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from mpctl.sharding import AXIS_OF_DIM, reduced_axes

Dims = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter: its name inside the model, full shape and the name of each dimension."""

    name: str
    shape: tuple[int, ...]
    dims: Dims

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def axes(self) -> tuple[str, ...]:
        return tuple(AXIS_OF_DIM[dim] for dim in self.dims if dim in AXIS_OF_DIM)

    def local_numel(self, tp: int) -> int:
        return self.numel // tp if "tp" in self.axes() else self.numel


@dataclass(frozen=True, slots=True)
class Phases:
    """Kinds of collectives in the order in which they happen."""

    forward: tuple[str, ...]
    backward: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product Y = X W by the names of its dimensions.

    A table lookup is the product of one-hot rows with the table; it has no input gradient.
    """

    name: str
    part: str
    reads: Dims
    weight: Dims
    writes: Dims
    input_gradient: bool = True
    is_lookup: bool = False

    @property
    def forward_axes(self) -> tuple[str, ...]:
        return reduced_axes((set(self.reads) & set(self.weight)) - set(self.writes))

    @property
    def backward_axes(self) -> tuple[str, ...]:
        if not self.input_gradient:
            return ()
        return reduced_axes((set(self.writes) & set(self.weight)) - set(self.reads))

    def collectives(self, *, sequence_parallel: bool) -> Phases:
        """Over tp, of one message of hidden states each.

        Sequence parallelism splits an all-reduce into its two phases and moves one to the other
        side; a column product gathers its input again for dW (arXiv 2205.05198, section 4.2.2).
        """
        is_row, is_column = "tp" in self.forward_axes, "tp" in self.backward_axes
        if not sequence_parallel:
            return Phases(("all_reduce",) * is_row, ("all_reduce",) * is_column)
        row = Phases(("reduce_scatter",), ("all_gather",))
        column = Phases(("all_gather",), ("all_gather", "reduce_scatter"))
        return row if is_row else column if is_column else Phases((), ())


@dataclass(frozen=True, slots=True)
class OperatorTable:
    """One model. `block` is one layer's; `first`/`last` belong to the pipeline's end stages.

    block_weights are named relative to `layers.N.`; tied is the word table among `first_weights`
    when the output layer shares it, else None.
    """

    layers: int
    block: tuple[Product, ...]
    block_weights: tuple[Weight, ...]
    first: tuple[Product, ...]
    first_weights: tuple[Weight, ...]
    last: tuple[Product, ...]
    last_weights: tuple[Weight, ...]
    tied: Weight | None

    def stage_weights(
        self, spans: list[tuple[int, int]], *, is_first: bool, is_last: bool
    ) -> Iterator[Weight]:
        """Every parameter of a stage by its full name; a tied head is a copy unless it is here."""
        if is_first:
            yield from self.first_weights
        for layer in (layer for span in spans for layer in range(*span)):
            for weight in self.block_weights:
                yield Weight(f"layers.{layer}.{weight.name}", weight.shape, weight.dims)
        if is_last:
            yield from self.last_weights
            if self.tied and not is_first:
                yield self.tied

    def weights(self) -> Iterator[Weight]:
        """Every parameter of the model, once."""
        return self.stage_weights([(0, self.layers)], is_first=True, is_last=True)

    @property
    def numel(self) -> int:
        """Parameters of the whole model, padding included, each once."""
        ends = sum(w.numel for w in (*self.first_weights, *self.last_weights))
        return ends + self.layers * sum(w.numel for w in self.block_weights)
