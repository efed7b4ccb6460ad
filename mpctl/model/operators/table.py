"""The operator table: a model as stacks of layers and their ends, without torch.

The planner counts from it and tests compare the built module with it: same parameter names, same
local shapes, same collectives, byte by byte (matmul.py). With patterns of frozen parameters it also
knows which gradients each layer and end still computes (grad_flow.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from mpctl.core.sharding import EXPERTS
from mpctl.model.operators.adapters import is_of_adapter, saved_patterns
from mpctl.model.operators.grad_flow import GradFlow, IsFrozen, StackGradFlow, find_flows, frozen_by
from mpctl.model.operators.layer import LayerStack, OperatorGroup
from mpctl.model.operators.matmul import Dims
from mpctl.model.operators.matmul import ParameterSpec as ParameterSpec  # re-exported
from mpctl.spec.adapter import AdapterSpec

Span = tuple[int, int]
ROUTER = ".router.weight"
Value = TypeVar("Value")


class StackPart(NamedTuple):
    """The operations of a slice that determine its memory: equal for slices of other layers of the
    same kinds.

    layers: kinds of layers that have a backward, with their numbers. entry, exit: None where the
    slice does not have them. first: the stack's first layer.
    """

    seq: str
    first: OperatorGroup | None
    layers: tuple[tuple[OperatorGroup, int], ...]
    entry: OperatorGroup | None
    exit: OperatorGroup | None

    @property
    def has_cross_attention(self) -> bool:
        """Whether its layers read the result of the stack before."""
        return self.first is not None and any(core.is_cross for core in self.first.cores)


@dataclass(frozen=True, eq=False)
class StageSlice:
    """The part of one stack that a pipeline stage holds. Stages of equal layers share one
    (OperatorTable).

    layers: numbers within the stack. has_entry, has_exit: whether the stack's ends are here.
    """

    stack: LayerStack
    flow: StackGradFlow
    layers: range
    has_entry: bool
    has_exit: bool

    @cached_property
    def ends(self) -> tuple[GradFlow, ...]:
        """The gradient flow of the entry and of the exit, where they are here."""
        return (self.flow.entry,) * self.has_entry + (self.flow.exit,) * self.has_exit

    @cached_property
    def blocks(self) -> list[tuple[int, GradFlow]]:
        """(number of layers here, their gradient flow) for each kind of layer."""
        return self.flow.blocks(self.layers)

    @cached_property
    def part(self) -> StackPart:
        """The operations of this slice, without the numbers of its layers."""
        stack, counts = self.stack, dict[OperatorGroup, int]()
        for count, flow in self.blocks:
            if flow.after:
                counts[flow.kept] = counts.get(flow.kept, 0) + count
        return StackPart(
            stack.seq,
            stack.blocks[0] if stack.blocks else None,
            tuple(counts.items()),
            self.flow.entry.kept if self.has_entry else None,
            self.flow.exit.kept if self.has_exit else None,
        )

    def end_weights(self, *, trained_only: bool = False) -> tuple[ParameterSpec, ...]:
        """Parameters of the ends and, where layers are here, those that all layers share."""
        shared = self.flow.shared if trained_only else self.stack.shared
        ends = [end.trained if trained_only else end.part.weights for end in self.ends]
        return (*chain.from_iterable(ends), *(shared if self.layers else ()))


@dataclass(frozen=True)
class OperatorTable:
    """One model: its stacks in execution order. Layers are numbered through all of them.

    A parameter named in two places (a word table and the head tied to it, an encoder's table that
    the decoder reads too) is one; a stage that needs it holds one copy. freeze: patterns of the
    parameters that are not trained. adapter: by which the model is trained; its products are among
    those of the stacks (adapters.py).
    """

    stacks: tuple[LayerStack, ...]
    freeze: tuple[str, ...] = ()
    adapter: AdapterSpec | None = field(default=None, hash=False)

    @cached_property
    def is_frozen(self) -> IsFrozen:
        """Whether the parameter of a name is not trained: it matches `freeze`, or belongs neither to
        the adapter nor to its modules_to_save."""
        by_pattern = frozen_by(self.freeze)
        if self.adapter is None:
            return by_pattern
        saved = tuple(saved_patterns(self.adapter))
        return lambda name: by_pattern(name) or not (is_of_adapter(name) or name.startswith(saved))

    @property
    def has_frozen(self) -> bool:
        """Whether some parameters may be frozen."""
        return bool(self.freeze) or self.adapter is not None

    @cached_property
    def quantized_names(self) -> frozenset[str]:
        """The names within a layer of weights that are stored in 8 or 4 bits."""
        if self.adapter is None or not self.adapter.is_quantized:
            return frozenset()
        blocks = (block for stack in self.stacks for block in stack.kinds)
        return frozenset(p.matrix.name for block in blocks for p in block.products if p.is_stored)

    @cached_property
    def flows(self) -> tuple[StackGradFlow, ...]:
        """Gradients that each stack computes."""
        return find_flows(self.stacks, self.is_frozen if self.has_frozen else None)

    @cached_property
    def layer_kinds(self) -> tuple[int, ...]:
        """The kind of each layer, from 0 in the order in which the layers meet them. Layers of one
        kind have the same operations and train the same parameters."""
        numbers: dict[int, int] = {}
        runs = ((run, kind) for flow in self.flows for run, kind in flow.runs)
        return tuple([numbers.setdefault(id(kind), len(numbers)) for run, kind in runs for _ in run])

    @property
    def layers(self) -> int:
        """Layers of all stacks together."""
        return sum(stack.layers for stack in self.stacks)

    @property
    def predictions(self) -> int:
        """Layers of multi-token prediction that run apart from the loss."""
        return self.stacks[-1].predictions

    def boundary(self, layer: int, *, predicted: bool = False) -> tuple[Dims, ...]:
        """Dimensions of the tensors between layer - 1 and `layer`, which a stage that ends there
        sends on: the hidden states and, inside a stack that is not the first, the result of the
        stack before. predicted: behind layers of multi-token prediction, whose results come first.

        By hand, T5 of 2 and 2 layers: one tensor of the encoder's at 1 and 2, two at 3.
        """
        return self._boundaries[layer] * (1 + self.predictions * predicted)

    @cached_property
    def _boundaries(self) -> list[tuple[Dims, ...]]:
        return [self._boundary(layer) for layer in range(self.layers + 1)]

    def _boundary(self, layer: int) -> tuple[Dims, ...]:
        at, before = self._at(layer)
        met = self.stacks[at : at + 1] if before or not at else ()
        return tuple(("batch", stack.seq, "hidden") for stack in (*met, *self.stacks[max(at - 1, 0) : at]))

    def boundary_needs(self, layer: int, *, predicted: bool = False) -> tuple[bool, ...]:
        """Whether the gradient of each tensor of `boundary` is sent back: if anything before it is
        trained, whatever the gradient's value."""
        further = (self.flows[-1].entry.after,) * (self.predictions * predicted)
        return (*further, *self._boundary_needs[layer])

    @cached_property
    def _boundary_needs(self) -> list[tuple[bool, ...]]:
        return [self._needs_at(layer) for layer in range(self.layers + 1)]

    def _needs_at(self, layer: int) -> tuple[bool, ...]:
        at, before = self._at(layer)
        met = (_after(self.flows[at], before),) if before or not at else ()
        return (*met, *(flow.exit.after for flow in self.flows[max(at - 1, 0) : at]))

    def _at(self, layer: int) -> tuple[int, int]:
        """(number of the stack that contains `layer`, layers of that stack before it); for the
        number after the last layer, the last stack."""
        for at, stack in enumerate(self.stacks[:-1]):
            if layer < stack.layers:
                return at, layer
            layer -= stack.layers
        return len(self.stacks) - 1, layer

    def stage_slices(
        self, spans: Sequence[Span], *, is_first: bool = True, is_last: bool = True, predicts: bool = True
    ) -> tuple[StageSlice, ...]:
        """The contents of a stage of these layers: a slice for each stack and span that overlap.

        spans: [start, stop) in the numbering through all stacks. is_first, is_last: whether it is
        the first or last stage of the pipeline, which has the model's ends even without a layer.
        predicts: whether it has the layers of multi-token prediction that run apart from the loss.
        """
        ends = is_first, is_last, predicts and self.predictions > 0
        return self.once(
            ("slices", tuple(spans), *ends),
            lambda: tuple(part for span in spans for part in self._in_span(*span, *ends)),
        )

    def once(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The cached result of `make`, called once for each key: the layouts of a search share
        their table, and ask for the same stages thousands of times."""
        if key not in self._found:
            self._found[key] = make()
        found: Value = self._found[key]
        return found

    @cached_property
    def _found(self) -> dict[Hashable, Any]:
        return {}

    def _in_span(self, start: int, stop: int, is_first: bool, is_last: bool, predicts: bool) -> Iterator[StageSlice]:
        offset = 0
        for stack, flow in zip(self.stacks, self.flows, strict=True):
            layers = range(max(start - offset, 0), min(stop - offset, stack.layers))
            has_entry = is_first and start == 0 if stack is self.stacks[0] else 0 in layers
            has_entry = has_entry or (predicts and stack.predictions > 0)
            is_end = stack is self.stacks[-1]
            has_exit = is_last and stop == self.layers if is_end else stack.layers - 1 in layers
            if layers or has_entry or has_exit:
                yield StageSlice(stack, flow, layers, has_entry, has_exit)
            offset += stack.layers

    def stage_weights(
        self, spans: Sequence[Span], *, is_first: bool = True, is_last: bool = True
    ) -> Iterator[ParameterSpec]:
        """Every parameter of a stage by its full name, once; arguments as for stage_slices."""
        return named_weights(self.stage_slices(spans, is_first=is_first, is_last=is_last))

    def weights(self) -> Iterator[ParameterSpec]:
        """Every parameter of the model, once."""
        return self.stage_weights([(0, self.layers)])

    @cached_property
    def linear_layers(self) -> tuple[str, ...]:
        """The linear layers of all transformer layers by full name, `layers.0.attention.qkv`, in
        execution order."""
        return tuple(
            f"{stack.prefix}.{layer}.{product.name}"
            for stack in self.stacks
            for layer in range(stack.layers)
            for product in stack.block_of(layer).products
            if not (product.is_lookup or product.is_wide)
        )

    @cached_property
    def narrowed_layers(self) -> tuple[str, ...]:
        """Those whose products low-precision training narrows: all but adapters'."""
        return tuple(name for name in self.linear_layers if not is_of_adapter(name))

    @cached_property
    def routed_layers(self) -> tuple[str, ...]:
        """The layers' branches with experts by full name, `layers.3.mlp`, in execution order; layers of
        multi-token prediction are among them."""
        return tuple(name for stack in self.stacks for name in _routed(stack))

    @cached_property
    def numel(self) -> int:
        """Parameters of the model, padding included, each once."""
        return sum(count * weight.numel for count, weight in self._each())

    def active_numel(self, chosen: int) -> int:
        """Return the number of parameters that one token uses, which passes `chosen` experts of a layer.

        By hand, 8 experts of 100 parameters, 2 chosen: 200 of 800.
        """
        experts = ((layers, weight) for layers, weight in self._each() if weight.view == EXPERTS)
        each = ((layers * weight.numel // weight.shape[0], weight.shape[0]) for layers, weight in experts)
        return self.numel - sum(numel * (count - chosen) for numel, count in each)

    def _each(self) -> Iterator[tuple[int, ParameterSpec]]:
        """Every parameter of the model, those of equal layers once, with the number of layers."""
        slices = self.stage_slices([(0, self.layers)])
        yield from ((1, w) for w in {w.name: w for part in slices for w in part.end_weights()}.values())
        for stack in self.stacks:
            layers = Counter(map(id, stack.blocks))
            yield from ((layers[id(block)], weight) for block in stack.kinds for weight in block.weights)


def _routed(stack: LayerStack) -> Iterator[str]:
    """Names of the branches with experts of a stack."""
    groups = [(f"{stack.prefix}.{layer}.", block) for layer, block in enumerate(stack.blocks)]
    for prefix, group in (*groups, ("", stack.entry), ("", stack.exit)):
        for weight in group.weights if group.has_experts else ():
            if weight.name.endswith(ROUTER):
                yield prefix + weight.name.removesuffix(ROUTER)


def _after(flow: StackGradFlow, layers: int) -> bool:
    """Whether hidden states need a gradient after `layers` layers of a stack."""
    runs = (run_flow for run, run_flow in flow.runs if layers - 1 in run)
    return next(runs).after if layers else flow.entry.after


def named_weights(slices: Iterable[StageSlice]) -> Iterator[ParameterSpec]:
    """Every parameter of these slices by its full name, once."""
    seen: set[str] = set()
    for stage_slice in slices:
        for weight in _named(stage_slice):
            if weight.name not in seen:
                seen.add(weight.name)
                yield weight


def _named(stage_slice: StageSlice) -> Iterator[ParameterSpec]:
    stack = stage_slice.stack
    if stage_slice.has_entry:
        yield from stack.entry.weights
    if stage_slice.layers:
        yield from stack.shared
    for layer in stage_slice.layers:
        for weight in stack.block_of(layer).weights:
            yield replace(weight, name=f"{stack.prefix}.{layer}.{weight.name}")
    if stage_slice.has_exit:
        yield from stack.exit.weights
