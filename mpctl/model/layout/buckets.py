"""Group the gradients of a stage into buckets, order them, and cut them into slices for ZeRO.

A bucket is one message over the replicas of its parameters: dp x cp for those of the dense view,
another group for those of another view (sharding.View). Backward completes gradients from the last
layer to the first, so buckets are filled in that order, chunk by chunk, up to
`parallel.bucket_bytes`, and each is sent when backward leaves the first of its units: entry, each
layer, exit. ZeRO (arXiv 1910.02054, section 5) cuts a bucket into one slice a replica, padded to
equal length, a multiple of 128 bytes: 1 shares the optimizer's state, 2 the gradients too, 3 the
parameters too. At 3 a bucket holds all parameters of a unit of one kind, because they are gathered
together. In a bucket parameters of odd sizes come last, so that they do not shift the others off
their words.

A kind is a view, whether the parameters are trained, and the group in which their gradients are
partial sums. Each kind has separate buckets: replicas are those of a view; partial sums (norms
under sequence parallelism, vectors of a grid) are completed by one message a group; at ZeRO 3
frozen parameters, which have no gradient, are gathered alone. Each parameter that several stages or
chunks use also has a separate bucket, so that all of them cut it alike.

Bytes and seconds of messages need how many buckets of which size a stage has, not which parameters
they hold. Layers whose gradients are alike are one run of units, and both answers are read from the
same cuts of these runs: `stage_buckets` names the parameters, `bucket_shapes` counts, of a hundred
equal layers in a tenth of the time.

Buckets of at most 7 elements over a layer of 4 and one of 3, and slices of 600 over 4 replicas:

>>> list(filled([3, 4], 7)), list(filled([3, 3, 4], 6)), slice_numel(600, 4)
([(2, 7)], [(2, 6), (1, 4)], 192)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from mpctl.core.sharding import DENSE, View, Views
from mpctl.model.operators.grad_flow import IsFrozen
from mpctl.model.operators.matmul import ParameterSpec
from mpctl.model.operators.table import StageSlice

SLICE_ALIGNMENT = 64
"""Elements that a slice of a bucket is padded to a multiple of: 128 bytes of the narrowest dtype,
of 16 bit. NCCL and AdamW then read and write whole lines of memory in the widest words, which they
cannot where a slice begins at any element."""

LAYERS_GATHERED_AHEAD = 1
"""At ZeRO 3, layers whose parameters are being gathered while another is computed. One is enough
where a layer is computed for longer than the next is gathered; where it is not, more would only
move the wait, since messages follow each other, and each costs the memory of a full layer."""

MAX_REDUCTIONS_IN_FLIGHT = 1
"""At ZeRO 2 and 3, buckets of unsharded gradients that are being reduced, in addition to the one
that backward fills."""


def slice_numel(numel: int, parts: int, alignment: int = SLICE_ALIGNMENT) -> int:
    """Elements of one of `parts` equal slices that hold `numel`, a multiple of `alignment`."""
    return -(-numel // (parts * alignment)) * alignment


def part_numel(numel: int, view: View) -> int:
    """Elements of a replica's slice of a bucket of `numel`, padding included; all of them below
    ZeRO 1."""
    return slice_numel(numel, view.zero_size) if view.zero else numel


def padded_numel(numel: int, view: View) -> int:
    """Elements of all slices of a bucket together, padding included."""
    return part_numel(numel, view) * view.zero_size if view.zero else numel


class Bucket(NamedTuple):
    """Parameters whose gradients are reduced in one message, and whose slices ZeRO distributes.

    names, sizes: of each parameter, elements on this rank. view: theirs; its replicas reduce the
    bucket. chunks: the stage's chunks that use them. unit, last_unit: numbers of the first and of
    the last unit (entry, layers, exit in forward order) that uses one of them, a word table the
    head as well; of the last one backward computes gradients first. layer: the module around whose
    passes ZeRO 3 gathers them, "" for the full chunk. goes_back: whether backward computes any
    gradient in that module. is_trained: False for frozen parameters. partial: the group over which
    each rank holds only a part of the gradient's sum (ParameterSpec.partial_kind), empty where it
    is complete. is_shared: whether other stages hold them too. undecayed: the names of those
    without weight decay.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    view: View
    chunks: tuple[int, ...] = (0,)
    unit: int = 0
    layer: str = ""
    goes_back: bool = True
    is_trained: bool = True
    partial: str = ""
    is_shared: bool = False
    undecayed: frozenset[str] = frozenset()
    last_unit: int = 0

    @property
    def numel(self) -> int:
        """Elements on this rank, without padding."""
        return sum(self.sizes)

    @property
    def part(self) -> int:
        """Elements of a replica's slice, padding included; all of them below ZeRO 1."""
        return part_numel(self.numel, self.view)

    @property
    def padded(self) -> int:
        """Elements of all slices together, padding included."""
        return padded_numel(self.numel, self.view)

    def pieces(self, index: int) -> Iterator[tuple[int, int, int, int]]:
        """The part of each parameter in slice `index`, as (number of the parameter, its first
        element in the slice, offset in the slice, elements)."""
        first = index * self.part
        stop, at = first + self.part, 0
        for number, size in enumerate(self.sizes):
            start, end = max(at, first), min(at + size, stop)
            if start < end:
                yield number, start - at, start - first, end - start
            at += size


class BucketShape(NamedTuple):
    """Sizes that determine the bytes of a bucket's messages; equal buckets share one.

    numel: elements on this rank. chunks: the stage's chunks that use it. stages: the stages that
    hold it if there are several, else none. view: its name. The rest as in Bucket.
    """

    numel: int
    chunks: tuple[int, ...]
    goes_back: bool
    is_trained: bool
    partial: str
    stages: tuple[int, ...] = ()
    view: str = DENSE


class BucketRules(NamedTuple):
    """The rules by which a stage's gradients are grouped.

    max_elements: of a bucket below ZeRO 3. is_frozen: whether the parameter of a name is frozen.
    whole: names within a layer of parameters that ZeRO never shares, so that they are in no bucket.
    """

    views: Views
    max_elements: int
    is_frozen: IsFrozen
    whole: frozenset[str] = frozenset()

    def is_gathered(self, view: str) -> bool:
        """Whether ZeRO 3 shares the parameters of a view."""
        return self.views[view].zero == 3


class _Kind(NamedTuple):
    view: str
    partial: str
    is_trained: bool


class _Item(NamedTuple):
    """A parameter; name: of a layer's, within the layer."""

    name: str
    size: int
    kind: _Kind
    decays: bool


class _UnitRun(NamedTuple):
    """Units in a row with the same parameters and gradients: an entry, an exit, or layers.

    first: number of the first one in its chunk; layers: the numbers of layers, whose modules are
    `{prefix}.N`; one 0 for an end, which is not a module.
    """

    items: tuple[_Item, ...]
    first: int
    goes_back: bool
    prefix: str = ""
    layers: range = range(1)

    def module(self, at: int) -> str:
        """The module of one of these units, counted from 0."""
        return f"{self.prefix}.{self.layers[at]}" if self.prefix else ""


class _Cut(NamedTuple):
    """A bucket as the next `members` parameters of a kind, in the order of backward."""

    kind: _Kind
    members: int
    numel: int
    goes_back: bool


class _Use(NamedTuple):
    """A use of a parameter that has a separate bucket: its chunk and unit."""

    chunk: int
    run: _UnitRun
    item: _Item


class _Stage(NamedTuple):
    """The units of a stage by chunk, without the parameters that have separate buckets, and the
    uses of those, by name."""

    chunks: tuple[tuple[_UnitRun, ...], ...]
    apart: Mapping[str, Sequence[_Use]]


def stage_buckets(
    chunks: Sequence[Sequence[StageSlice]], rules: BucketRules, shared: Mapping[str, tuple[int, ...]]
) -> tuple[Bucket, ...]:
    """The buckets of a stage, in the order in which they are reduced.

    chunks: the slices of each chunk of the stage. shared: the stages of each parameter that several
    stages hold, by name.
    """
    stage, buckets = _stage(chunks, rules, shared), list[Bucket]()
    last_uses = [_last_uses(slices) for slices in chunks]
    for chunk in reversed(range(len(chunks))):
        runs = stage.chunks[chunk]
        members = {kind: _members(runs, kind) for kind in _kinds(runs)}
        for cuts, times in _cuts(runs, rules):
            for cut in list(cuts) * times:
                held = list(islice(members[cut.kind], cut.members))
                buckets.append(
                    _bucket(held, rules.views, cut.kind, (chunk,), last_uses[chunk], goes_back=cut.goes_back)
                )
    for name, uses in stage.apart.items():
        run, item = uses[0].run, uses[0].item
        if item.kind.is_trained or rules.is_gathered(item.kind.view):
            using = tuple(sorted({use.chunk for use in uses}))
            unit = min(use.run.first for use in uses) if len(using) == 1 else 0
            held = [(unit, "", name, item)]
            buckets.append(
                _bucket(
                    held,
                    rules.views,
                    item.kind,
                    using,
                    last_uses[using[0]],
                    goes_back=run.goes_back,
                    is_shared=name in shared,
                )
            )
    return tuple(buckets)


def bucket_shapes(
    chunks: Sequence[Sequence[StageSlice]], rules: BucketRules, shared: Mapping[str, tuple[int, ...]]
) -> Counter[BucketShape]:
    """Count the buckets of each shape in a stage, in the order of the first of each; arguments as for
    `stage_buckets`."""
    stage, shapes = _stage(chunks, rules, shared), Counter[BucketShape]()
    for chunk in reversed(range(len(chunks))):
        for cuts, times in _cuts(stage.chunks[chunk], rules):
            for (view, partial, is_trained), _, numel, goes_back in cuts:
                shape = BucketShape(numel, (chunk,), goes_back, is_trained, partial, view=view)
                shapes[shape] += times
    for name, uses in stage.apart.items():
        run, item = uses[0].run, uses[0].item
        view, partial, is_trained = item.kind
        if is_trained or rules.is_gathered(view):
            using = tuple(sorted({use.chunk for use in uses}))
            holders = shared.get(name, ())
            shapes[BucketShape(item.size, using, run.goes_back, is_trained, partial, holders, view)] += 1
    return shapes


def layer_units(slices: Iterable[StageSlice]) -> dict[str, int]:
    """The number of each layer module of a chunk among its units, by module name, in forward
    order."""
    everything = BucketRules({}, 0, lambda name: False)
    return {
        run.module(at): run.first + at
        for run in _unit_runs(slices, everything, with_items=False)
        if run.prefix
        for at in range(len(run.layers))
    }


def _stage(chunks: Sequence[Sequence[StageSlice]], rules: BucketRules, shared: Mapping[str, tuple[int, ...]]) -> _Stage:
    """The units of a stage. Parameters that other stages or several chunks use are listed
    separately; these are never a layer's."""
    runs = [tuple(_unit_runs(slices, rules)) for slices in chunks]
    uses: dict[str, list[_Use]] = {}
    for chunk, units in enumerate(runs):
        for run in units:
            for item in () if run.prefix else run.items:
                uses.setdefault(item.name, []).append(_Use(chunk, run, item))
    apart = sorted(name for name, own in uses.items() if len(own) > 1 or name in shared)
    if apart:
        runs = [tuple(_without(run, apart) for run in units) for units in runs]
    return _Stage(tuple(runs), {name: uses[name] for name in apart})


def _unit_runs(slices: Iterable[StageSlice], rules: BucketRules, *, with_items: bool = True) -> Iterator[_UnitRun]:
    """The units of a chunk in forward order; an end's parameter where it is first used."""
    seen, first = set[str](), 0

    def item(weight: ParameterSpec, is_trained: bool) -> _Item:
        kind = _Kind(weight.view, weight.partial_kind(rules.views), is_trained)
        return _Item(weight.name, weight.local_numel(rules.views), kind, weight.decays)

    def end(weights: Sequence[ParameterSpec]) -> _UnitRun:
        new = [w for w in weights if w.name not in seen] if with_items else []
        seen.update(weight.name for weight in new)
        items = {w.name: item(w, not rules.is_frozen(w.name)) for w in new}  # each once
        return _UnitRun(tuple(items.values()), first, True)

    for part in slices:
        stack = part.stack
        entry = stack.entry.weights if part.has_entry else ()
        yield end(entry + (stack.shared if part.layers else ()))
        first += 1
        for run, flow in part.flow.runs:
            layers = range(max(run.start, part.layers.start), min(run.stop, part.layers.stop))
            if layers:
                trained = {weight.name for weight in flow.trained}
                weights = flow.part.weights if with_items else ()
                items = tuple(item(w, w.name in trained) for w in weights if w.name not in rules.whole)
                yield _UnitRun(items, first, flow.after, stack.prefix, layers)
                first += len(layers)
        if part.has_exit:
            yield end(stack.exit.weights)
            first += 1


def _last_uses(slices: Iterable[StageSlice]) -> dict[str, int]:
    """The last unit of a chunk that uses each parameter of its ends."""
    uses, unit = dict[str, int](), 0
    for part in slices:
        entry = part.stack.entry.weights if part.has_entry else ()
        uses |= dict.fromkeys((weight.name for weight in entry), unit)
        unit += 1 + len(part.layers)
        if part.has_exit:
            uses |= dict.fromkeys((weight.name for weight in part.stack.exit.weights), unit)
            unit += 1
    return uses


def _without(run: _UnitRun, apart: Sequence[str]) -> _UnitRun:
    if run.prefix:
        return run
    return run._replace(items=tuple(item for item in run.items if item.name not in apart))


def _kinds(runs: Iterable[_UnitRun]) -> set[_Kind]:
    return {item.kind for run in runs for item in run.items}


def _cuts(runs: Sequence[_UnitRun], rules: BucketRules) -> Iterator[tuple[Sequence[_Cut], int]]:
    """The buckets of a chunk in the order of their reduction: a sequence of some, and how often it
    is repeated.

    ZeRO 3: the parameters of each kind in a unit, unit by unit. Below: trained parameters of a kind
    up to the size of a bucket, those with complete gradients first.
    """
    gathered = {name for name, view in rules.views.items() if view.zero == 3}
    for run in reversed(runs) if gathered else ():
        sums: dict[_Kind, tuple[int, int]] = {}
        for item in reversed(run.items):
            if item.kind.view in gathered:
                count, numel = sums.get(item.kind, (0, 0))
                sums[item.kind] = count + 1, numel + item.size
        cuts = [_Cut(kind, *sizes, run.goes_back) for kind, sizes in sums.items()]
        yield cuts, len(run.layers)
    for kind in sorted(_kinds(runs)):
        if kind.is_trained and kind.view not in gathered:
            for count, numel in filled(_sizes(runs, kind), rules.max_elements):
                yield (_Cut(kind, count, numel, True),), 1


def _sizes(runs: Sequence[_UnitRun], kind: _Kind) -> Iterator[int]:
    """Elements of a kind's parameters in the order in which backward completes their gradients."""
    for run in reversed(runs):
        own = [item.size for item in reversed(run.items) if item.kind == kind]
        for _ in range(len(run.layers) if own else 0):
            yield from own


def _members(runs: Sequence[_UnitRun], kind: _Kind) -> Iterator[tuple[int, str, str, _Item]]:
    """(unit, module, name of the parameter, the parameter) in the same order."""
    for run in reversed(runs):
        own = [item for item in reversed(run.items) if item.kind == kind]
        for at in reversed(range(len(run.layers))) if own else ():
            module = run.module(at)
            for item in own:
                yield run.first + at, module, f"{module}.{item.name}".lstrip("."), item


def filled(sizes: Iterable[int], max_elements: int) -> Iterator[tuple[int, int]]:
    """(parameters, elements) of each bucket that parameters of these sizes fill, in order: one more
    than `max_elements` opens the next bucket."""
    count = elements = 0
    for size in sizes:
        if count and elements + size > max_elements:
            yield count, elements
            count = elements = 0
        count += 1
        elements += size
    if count:
        yield count, elements


def _bucket(
    held: Sequence[tuple[int, str, str, _Item]],
    views: Views,
    kind: _Kind,
    chunks: tuple[int, ...],
    last_uses: Mapping[str, int],
    *,
    goes_back: bool,
    is_shared: bool = False,
) -> Bucket:
    held = sorted(held, key=lambda member: member[-1].size % SLICE_ALIGNMENT > 0)
    return Bucket(
        names=tuple(name for _, _, name, _ in held),
        sizes=tuple(item.size for *_, item in held),
        view=views[kind.view],
        chunks=chunks,
        unit=min(unit for unit, *_ in held),
        layer=held[0][1],
        goes_back=goes_back,
        is_trained=kind.is_trained,
        partial=kind.partial,
        is_shared=is_shared,
        undecayed=frozenset(name for _, _, name, item in held if not item.decays),
        last_unit=max(last_uses.get(name, unit) for unit, _, name, _ in held),
    )
