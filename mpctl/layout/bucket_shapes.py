"""The shapes of a stage's buckets, counted without naming a parameter.

Bytes and seconds of messages need how many buckets of which size a stage has, not which parameters
they hold; of a hundred equal layers that is told in a tenth of the time that buckets.py takes, by
the same rules. tests/layout/test_buckets.py holds one against the other.

By hand, two layers of 4 and 3 elements in buckets of at most 7, no ends: two shapes of 7.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from mpctl.layout.buckets import BucketRules, BucketShape, filled
from mpctl.operators.matmul import ParameterSpec
from mpctl.operators.table import StageSlice


class _Item(NamedTuple):
    """A parameter; name: of an end's, "" in a layer, where no other has the same."""

    name: str
    size: int
    is_trained: bool
    partial: str


class _UnitRun(NamedTuple):
    """`times` equal units in a row: an entry, an exit, or layers whose gradients are alike."""

    items: tuple[_Item, ...]
    times: int
    goes_back: bool


def bucket_shapes(
    chunks: Sequence[Sequence[StageSlice]],
    rules: BucketRules,
    shared: Mapping[str, tuple[int, ...]],
) -> Counter[BucketShape]:
    """How many buckets of each shape a stage has, in the order of the first of each.

    chunks: what each chunk of the stage holds. shared: the stages of each parameter that several
    stages hold, by name.
    """
    runs = [list(_unit_runs(rules, slices)) for slices in chunks]
    users: dict[str, list[tuple[int, _Item, bool]]] = {}
    for chunk, units in enumerate(runs):
        for unit in units:
            for item in unit.items:
                if item.name:
                    users.setdefault(item.name, []).append((chunk, item, unit.goes_back))
    apart = {name for name, uses in users.items() if len(uses) > 1 or name in shared}
    shapes: Counter[BucketShape] = Counter()
    for chunk in reversed(range(len(chunks))):
        units = [_without(unit, apart) for unit in runs[chunk]]
        shapes.update(
            _by_unit(units, chunk) if rules.zero_stage == 3 else _by_size(units, chunk, rules)
        )
    for name in sorted(apart):
        uses = users[name]
        _, item, goes_back = uses[0]
        if item.is_trained or rules.zero_stage == 3:
            using = tuple(sorted({chunk for chunk, _, _ in uses}))
            holders = shared.get(name, ())
            shape = BucketShape(item.size, using, goes_back, item.is_trained, item.partial, holders)
            shapes[shape] += 1
    return shapes


def _unit_runs(rules: BucketRules, slices: Iterable[StageSlice]) -> Iterator[_UnitRun]:
    """The units of a chunk in forward order; an end's parameter where it is first used."""
    seen: set[str] = set()

    def end(weights: Sequence[ParameterSpec]) -> _UnitRun:
        new = [weight for weight in weights if weight.name not in seen]
        seen.update(weight.name for weight in new)
        return _UnitRun(
            tuple(_item(rules, w, w.name, not rules.is_frozen(w.name)) for w in new), 1, True
        )

    for part in slices:
        stack = part.stack
        yield end(
            (stack.entry.weights if part.has_entry else ()) + (stack.shared if part.layers else ())
        )
        for run, flow in part.flow.runs:
            count = min(run.stop, part.layers.stop) - max(run.start, part.layers.start)
            if count > 0:
                trained = {weight.name for weight in flow.trained}
                items = (_item(rules, w, "", w.name in trained) for w in stack.block_of(0).weights)
                yield _UnitRun(tuple(items), count, flow.after)
        if part.has_exit:
            yield end(stack.exit.weights)


def _item(rules: BucketRules, weight: ParameterSpec, name: str, is_trained: bool) -> _Item:
    partial = rules.grid.partial_kind(weight.dims)
    return _Item(name, weight.local_numel(rules.grid), is_trained, partial)


def _without(unit: _UnitRun, apart: set[str]) -> _UnitRun:
    items = tuple(item for item in unit.items if item.name not in apart)
    return unit._replace(items=items)


def _by_unit(units: Sequence[_UnitRun], chunk: int) -> Counter[BucketShape]:
    """ZeRO 3: what a unit has of one kind, units in the order of backward."""
    shapes: Counter[BucketShape] = Counter()
    for unit in reversed(units):
        kinds: Counter[tuple[bool, str]] = Counter()
        for item in reversed(unit.items):
            kinds[item.is_trained, item.partial] += item.size
        for (is_trained, partial), numel in kinds.items():
            shape = BucketShape(numel, (chunk,), unit.goes_back, is_trained, partial)
            shapes[shape] += unit.times
    return shapes


def _by_size(units: Sequence[_UnitRun], chunk: int, rules: BucketRules) -> Counter[BucketShape]:
    """Below ZeRO 3: trained parameters up to the rules' size, those with whole gradients first."""
    shapes: Counter[BucketShape] = Counter()
    for partial in sorted({item.partial for unit in units for item in unit.items}):
        for _, numel in filled(_sizes(units, partial), rules.max_elements):
            shapes[BucketShape(numel, (chunk,), True, True, partial)] += 1
    return shapes


def _sizes(units: Sequence[_UnitRun], partial: str) -> Iterator[int]:
    """Elements of trained parameters in the order in which backward completes their gradients."""
    for unit in reversed(units):
        own = [i.size for i in reversed(unit.items) if i.is_trained and i.partial == partial]
        for _ in range(unit.times if own else 0):
            yield from own
