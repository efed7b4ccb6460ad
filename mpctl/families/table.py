"""The operator table: a model as named-dimension matrix products and parameters, without torch.

The planner counts it and tests hold the built module against it: same parameter names, same local
shapes, same collectives, byte by byte. What is split follows from the sharding law; which
collectives a product needs follows from the contraction law, applied three times:

    forward  Y = X W      contracts what X and W share and Y lacks
    dX = dY W^T           contracts what Y and W share and X lacks
    dW = X^T dY           contracts what X and Y share and W lacks (batch: once a step, over dp)

A reduced product is a row-parallel one and sends its result; a column-parallel one sends its input.

>>> qkv = Product("qkv", "attention", ("batch", "seq", "hidden"), ("hidden", "heads"),
...               ("batch", "seq", "heads"))
>>> qkv.forward_axes, qkv.backward_axes          # column-parallel: f, all-reduced backward
((), ('tp',))
>>> qkv.message
('batch', 'seq', 'hidden')
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from mpctl.sharding import AXIS_OF_DIM, reduced_axes

Dims = tuple[str, ...]
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter: its name inside the model, full shape and the name of each dimension."""

    name: str
    shape: tuple[int, ...]
    dims: Dims

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_split(self) -> bool:
        """Whether each tp rank holds a part of it."""
        return any(AXIS_OF_DIM.get(dim) == "tp" for dim in self.dims)

    def local_numel(self, tp: int) -> int:
        return self.numel // tp if self.is_split else self.numel


@dataclass(frozen=True, slots=True)
class Phases:
    """Kinds of collectives in the order in which they happen."""

    forward: tuple[str, ...]
    backward: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product Y = X W by the names of its dimensions.

    A table lookup is the product of one-hot rows with the table; it has no input gradient. table:
    the module whose weight it multiplies by, where that is another's (a tied head).
    """

    name: str
    part: str
    reads: Dims
    weight: Dims
    writes: Dims
    input_gradient: bool = True
    is_lookup: bool = False
    table: str = ""

    @property
    def parameter(self) -> str:
        return f"{self.table or self.name}.weight"

    @property
    def rows(self) -> Dims:
        """Dimensions of X that W does not meet: one row of X each."""
        return tuple(dim for dim in self.reads if dim in self.writes)

    @property
    def forward_axes(self) -> tuple[str, ...]:
        return reduced_axes((set(self.reads) & set(self.weight)) - set(self.writes))

    @property
    def backward_axes(self) -> tuple[str, ...]:
        if not self.input_gradient:
            return ()
        return reduced_axes((set(self.writes) & set(self.weight)) - set(self.reads))

    @property
    def message(self) -> Dims:
        """Of what it sends over tp, forward or backward: the unsplit side."""
        return self.writes if "tp" in self.forward_axes else self.reads

    def collectives(self, *, sequence_parallel: bool) -> Phases:
        """Over tp, of one message each.

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
class Core:
    """softmax(Q K^T) V of one attention: the sequences of its queries and of its keys."""

    part: str
    queries: str = "seq"
    keys: str = "seq"


@dataclass(frozen=True, slots=True)
class Part:
    """Products and parameters that lie on one rank together, in the order of the data."""

    products: tuple[Product, ...] = ()
    weights: tuple[Weight, ...] = ()


@dataclass(frozen=True, slots=True)
class Stack:
    """Equal layers in a row, with what stands before the first and after the last of them.

    Names in `block` are relative to `{prefix}.N.`, where layers count from 0 in each stack. shared:
    parameters that every stage with a layer of the stack holds (a bias that all layers add).
    """

    prefix: str
    layers: int
    block: Part
    cores: tuple[Core, ...]
    entry: Part = Part()
    exit: Part = Part()
    shared: tuple[Weight, ...] = ()

    @property
    def title(self) -> str:
        """`encoder.layers` -> `encoder blocks`."""
        return self.prefix.replace("layers", "blocks").replace(".", " ")

    @property
    def seq(self) -> str:
        """The dimension that its hidden states have for the sequence."""
        return self.cores[0].queries


@dataclass(frozen=True, slots=True)
class Held:
    """What a stage has of one stack."""

    stack: Stack
    layers: range
    has_entry: bool
    has_exit: bool

    @property
    def ends(self) -> tuple[Part, ...]:
        """Entry and exit, where they are here."""
        stack = self.stack
        return (stack.entry,) * self.has_entry + (stack.exit,) * self.has_exit

    def end_weights(self) -> tuple[Weight, ...]:
        shared = self.stack.shared if self.layers else ()
        return (*(w for part in self.ends for w in part.weights), *shared)


@dataclass(frozen=True)
class OperatorTable:
    """One model: its stacks in the order of the data. Layers are numbered through all of them.

    A parameter named in two places (a word table and the head tied to it, an encoder's table that
    the decoder reads too) is one; a stage that needs it holds one copy.
    """

    stacks: tuple[Stack, ...]

    @property
    def layers(self) -> int:
        return sum(stack.layers for stack in self.stacks)

    def held(
        self, spans: Sequence[Span], *, is_first: bool = True, is_last: bool = True
    ) -> list[Held]:
        """What a stage of these layers has, a Held for each stack and span that meet.

        is_first, is_last: pipeline ends have the model's ends even where they have no layer.
        """
        return [
            found for start, stop in spans
            for found in self._in_span(start, stop, is_first=is_first, is_last=is_last)
        ]  # fmt: skip

    def _in_span(self, start: int, stop: int, *, is_first: bool, is_last: bool) -> Iterator[Held]:
        offset = 0
        for stack in self.stacks:
            own = range(max(start - offset, 0), min(stop - offset, stack.layers))
            has_entry = is_first and start == 0 if stack is self.stacks[0] else 0 in own
            is_end = stack is self.stacks[-1]
            has_exit = is_last and stop == self.layers if is_end else stack.layers - 1 in own
            if own or has_entry or has_exit:
                yield Held(stack, own, has_entry, has_exit)
            offset += stack.layers

    def stage_weights(
        self, spans: Sequence[Span], *, is_first: bool = True, is_last: bool = True
    ) -> Iterator[Weight]:
        """Every parameter of a stage by its full name, once."""
        seen: set[str] = set()
        for held in self.held(spans, is_first=is_first, is_last=is_last):
            for weight in _named(held):
                if weight.name not in seen:
                    seen.add(weight.name)
                    yield weight

    def weights(self) -> Iterator[Weight]:
        """Every parameter of the model, once."""
        return self.stage_weights([(0, self.layers)])

    @cached_property
    def numel(self) -> int:
        """Parameters of the whole model, padding included, each once."""
        held = self.held([(0, self.layers)])
        ends = {w.name: w.numel for part in held for w in part.end_weights()}
        blocks = (s.layers * sum(w.numel for w in s.block.weights) for s in self.stacks)
        return sum(ends.values()) + sum(blocks)


def _named(held: Held) -> Iterator[Weight]:
    stack = held.stack
    if held.has_entry:
        yield from stack.entry.weights
    if held.layers:
        yield from stack.shared
    for layer in held.layers:
        for weight in stack.block.weights:
            yield Weight(f"{stack.prefix}.{layer}.{weight.name}", weight.shape, weight.dims)
    if held.has_exit:
        yield from stack.exit.weights
