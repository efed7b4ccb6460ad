"""Which gradients of a stage are reduced together, in which order, and what ZeRO cuts into slices.

A bucket is one message over the replicas (dp x cp). Backward completes gradients from the last
layer to the first, so buckets are filled in that order, chunk by chunk, up to
`parallel.bucket_bytes`, and each is sent when backward leaves the first of its units: entry, each
layer, exit. ZeRO (arXiv 1910.02054, section 5) cuts a bucket into one slice a replica, padded to
equal length, a multiple of 128 bytes: 1 shares the optimizer's state, 2 the gradients too, 3 the
parameters too. At 3 a bucket is what a unit has of one kind, because it is gathered as one. In a
bucket parameters of odd sizes come last, so that they do not shift the others off their words.

Three kinds have buckets of their own: gradients of which each tensor-parallel rank has a part
(norms under sequence parallelism, vectors of a grid), so that their sum is one message a group;
parameters that several stages or chunks use, so that they are cut alike wherever they are; at ZeRO
3 frozen parameters, which have no gradient.

By hand, buckets of at most 600 elements, in forward order a 400, b 300, c 300: (c, b), (a). Over 4
replicas their slices are 192 and 128 elements, all together 768 and 512 with padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from mpctl.layout.limits import SLICE_ALIGNMENT
from mpctl.operators.grad_flow import IsFrozen
from mpctl.operators.matmul import ParameterSpec
from mpctl.operators.table import StageSlice
from mpctl.tensor_grid import TensorGrid


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters whose gradients are reduced in one message, and whose slices ZeRO deals out.

    names, sizes: of each parameter, elements on this rank. chunks: the stage's chunks that use
    them. unit: number of the first unit (entry, layers, exit in forward order) that uses them.
    layer: the module around whose passes ZeRO 3 gathers them, "" for the whole chunk. goes_back:
    whether backward computes any gradient in that module. is_trained: False for frozen parameters.
    partial: the tensor-parallel group over which each rank holds only a part of the gradient's sum
    (TensorGrid.partial_kind), empty where it is whole. is_shared: whether other stages hold them
    too. undecayed: the names of those that weight decay leaves alone.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    chunks: tuple[int, ...]
    unit: int
    layer: str
    goes_back: bool
    is_trained: bool
    partial: str
    is_shared: bool
    undecayed: frozenset[str] = frozenset()

    @property
    def numel(self) -> int:
        """Elements on this rank, without padding."""
        return sum(self.sizes)

    def part(self, parts: int) -> int:
        """Elements of one of `parts` equal slices, padding included."""
        return slice_numel(self.numel, parts)

    def padded(self, parts: int) -> int:
        """Elements of all `parts` slices together, padding included."""
        return self.part(parts) * parts

    def pieces(self, parts: int, index: int) -> Iterator[tuple[int, int, int, int]]:
        """What slice `index` of `parts` holds of each parameter, as (number of the parameter, its
        first element in the slice, offset in the slice, elements)."""
        first = index * self.part(parts)
        stop, at = first + self.part(parts), 0
        for number, size in enumerate(self.sizes):
            start, end = max(at, first), min(at + size, stop)
            if start < end:
                yield number, start - at, start - first, end - start
            at += size


def slice_numel(numel: int, parts: int, alignment: int = SLICE_ALIGNMENT) -> int:
    """Elements of one of `parts` equal slices that hold `numel`, a multiple of `alignment`.

    >>> slice_numel(600, 4), slice_numel(5, 2)
    (192, 64)
    """
    return -(-numel // (parts * alignment)) * alignment


class BucketShape(NamedTuple):
    """What the bytes of a bucket's messages follow from; equal buckets share one.

    numel: elements on this rank. chunks: the stage's chunks that use it. stages: the stages that
    hold it where there are several, else none. The rest as a Bucket's.
    """

    numel: int
    chunks: tuple[int, ...]
    goes_back: bool
    is_trained: bool
    partial: str
    stages: tuple[int, ...] = ()


class _BucketItem(NamedTuple):
    """A parameter at the first unit of a chunk that uses it."""

    name: str
    size: int
    chunk: int
    unit: int
    layer: str
    goes_back: bool
    is_trained: bool
    partial: str
    decays: bool


@dataclass(frozen=True, slots=True)
class BucketRules:
    """What decides how a stage's gradients are grouped.

    grid: of the tensor-parallel ranks. max_elements: of a bucket below ZeRO 3. is_frozen: whether
    the parameter of a name is frozen.
    """

    grid: TensorGrid
    zero_stage: int
    max_elements: int
    is_frozen: IsFrozen


def chunk_buckets(
    chunks: Sequence[Sequence[StageSlice]], rules: BucketRules, shared: Collection[str]
) -> tuple[Bucket, ...]:
    """The buckets of a stage, in the order in which they are reduced.

    chunks: what each chunk of the stage holds. shared: names of parameters that other stages hold
    as well.
    """
    chunk_items = [list(_chunk_items(rules, chunk, slices)) for chunk, slices in enumerate(chunks)]
    uses = Counter(item.name for items in chunk_items for item in items)
    apart = {name for name, count in uses.items() if count > 1 or name in shared}
    buckets: list[Bucket] = []
    for items in reversed(chunk_items):
        ordinary = [item for item in reversed(items) if item.name not in apart]
        groups = _by_unit(ordinary) if rules.zero_stage == 3 else _by_size(rules, ordinary)
        buckets += (_bucket(group, shared) for group in groups)
    repeated = [item for items in chunk_items for item in items if item.name in apart]
    for name in sorted(apart):
        buckets.append(_bucket([item for item in repeated if item.name == name], shared))
    return tuple(bucket for bucket in buckets if bucket.is_trained or rules.zero_stage == 3)


def _chunk_items(
    rules: BucketRules, chunk: int, slices: Sequence[StageSlice]
) -> Iterator[_BucketItem]:
    """Parameters of a chunk, each once, in forward order."""
    seen, sizes = set[str](), dict[int, list[tuple[str, int, str, bool]]]()
    units = [unit for part in slices for unit in _units(part)]  # kept alive: their ids are keys
    for number, (layer, prefix, weights, goes_back) in enumerate(units):
        if id(weights) not in sizes:  # all layers of a stack have the same
            sizes[id(weights)] = [
                (w.name, w.local_numel(rules.grid), rules.grid.partial_kind(w.dims), w.decays)
                for w in weights
            ]
        for own, size, partial, decays in sizes[id(weights)]:
            name = prefix + own
            if name not in seen:
                seen.add(name)
                is_trained = not rules.is_frozen(name)
                yield _BucketItem(
                    name, size, chunk, number, layer, goes_back, is_trained, partial, decays
                )


def _units(part: StageSlice) -> Iterator[tuple[str, str, tuple[ParameterSpec, ...], bool]]:
    """(module, prefix of names, parameters, whether a gradient passes) of entry, layers, exit."""
    stack, block = part.stack, part.stack.block_of(0).weights
    entry = (stack.entry.weights if part.has_entry else ()) + (stack.shared if part.layers else ())
    yield "", "", entry, True
    for run, flow in part.flow.runs:
        for n in range(max(run.start, part.layers.start), min(run.stop, part.layers.stop)):
            layer = f"{stack.prefix}.{n}"
            yield layer, f"{layer}.", block, flow.after
    if part.has_exit:
        yield "", "", stack.exit.weights, True


def layer_units(slices: Iterable[StageSlice]) -> dict[str, int]:
    """The number of each layer module of a chunk among its units, by module name, in forward
    order."""
    units = (unit for part in slices for unit in _units(part))
    return {layer: number for number, (layer, *_) in enumerate(units) if layer}


def _by_unit(items: Iterable[_BucketItem]) -> Iterator[list[_BucketItem]]:
    for _, unit in groupby(items, key=lambda item: item.unit):
        kinds: dict[tuple[bool, str], list[_BucketItem]] = {}
        for item in unit:
            kinds.setdefault((item.is_trained, item.partial), []).append(item)
        yield from kinds.values()


def _by_size(rules: BucketRules, items: Sequence[_BucketItem]) -> Iterator[list[_BucketItem]]:
    """Trained parameters in groups of at most `max_elements`, those with whole gradients first."""
    for partial in sorted({item.partial for item in items}):
        kind = [item for item in items if item.is_trained and item.partial == partial]
        start = 0
        for count, _ in filled((item.size for item in kind), rules.max_elements):
            yield kind[start : start + count]
            start += count


def filled(sizes: Iterable[int], max_elements: int) -> Iterator[tuple[int, int]]:
    """(parameters, elements) of each bucket that parameters of these sizes fill, in order: one more
    than `max_elements` opens the next bucket.

    >>> list(filled([3, 3, 4], 6))
    [(2, 6), (1, 4)]
    """
    count = elements = 0
    for size in sizes:
        if count and elements + size > max_elements:
            yield count, elements
            count = elements = 0
        count += 1
        elements += size
    if count:
        yield count, elements


def _bucket(items: Sequence[_BucketItem], shared: Collection[str]) -> Bucket:
    """One parameter that several chunks use, or several parameters of one chunk."""
    items = sorted(items, key=lambda item: item.size % SLICE_ALIGNMENT > 0)
    sizes, first = {item.name: item.size for item in items}, items[0]
    chunks = tuple(sorted({item.chunk for item in items}))
    return Bucket(
        names=tuple(sizes),
        sizes=tuple(sizes.values()),
        chunks=chunks,
        unit=min(item.unit for item in items) if len(chunks) == 1 else 0,
        layer=first.layer,
        goes_back=first.goes_back,
        is_trained=first.is_trained,
        partial=first.partial,
        is_shared=first.name in shared,
        undecayed=frozenset(item.name for item in items if not item.decays),
    )
