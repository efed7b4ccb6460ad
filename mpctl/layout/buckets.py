"""Which gradients of a stage are reduced together, in which order, and what ZeRO cuts into slices.

A bucket is one message over the replicas (dp x cp). Backward completes gradients from the last
layer to the first, so buckets are filled in that order, chunk by chunk, up to
`parallel.bucket_bytes`, and each is sent when backward leaves the first of its units: entry, each
layer, exit. ZeRO (arXiv 1910.02054, section 5) cuts a bucket into one slice a replica, padded to
equal length: 1 shares the optimizer's state, 2 the gradients too, 3 the parameters too. At 3 a
bucket is what a unit has of one kind, because it is gathered as one.

Three kinds have buckets of their own: gradients of which each tp rank has a part (sequence
parallelism), so that the sum over tp is one message; parameters that several stages or chunks use,
so that they are cut alike wherever they are; at ZeRO 3 frozen parameters, which have no gradient.

By hand, 10 elements in buckets of at most 6, in forward order a 4, b 3, c 3: (c, b), (a). Over 4
replicas their slices are 2 and 1 elements, of 8 and 4 with padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from mpctl.operators.grad_flow import frozen_by
from mpctl.operators.matmul import ParameterSpec
from mpctl.operators.table import OperatorTable, Span, StageSlice
from mpctl.spec.job import JobSpec
from mpctl.units import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that lie and travel together.

    sizes: elements of each on this rank; chunks: which of the stage's use it; unit: the first of a
    chunk's, in forward order, that does. layer: the module around whose passes ZeRO 3 gathers it,
    "" for those of the whole chunk; goes_back: whether that module computes any gradient.
    is_shared: with other stages.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    chunks: tuple[int, ...]
    unit: int
    layer: str
    goes_back: bool
    is_trained: bool
    is_partial: bool
    is_shared: bool

    @property
    def numel(self) -> int:
        return sum(self.sizes)

    def part(self, parts: int) -> int:
        """Elements of one of so many equal slices, padding included."""
        return -(-self.numel // parts)

    def padded(self, parts: int) -> int:
        return self.part(parts) * parts

    def pieces(self, parts: int, index: int) -> Iterator[tuple[int, int, int, int]]:
        """What slice `index` has of each parameter: (its number, first element of it, offset in the
        slice, elements)."""
        first = index * self.part(parts)
        stop, at = first + self.part(parts), 0
        for number, size in enumerate(self.sizes):
            start, end = max(at, first), min(at + size, stop)
            if start < end:
                yield number, start - at, start - first, end - start
            at += size


class _BucketItem(NamedTuple):
    """A parameter where a chunk meets it."""

    name: str
    size: int
    chunk: int
    unit: int
    layer: str
    goes_back: bool
    is_trained: bool
    is_partial: bool


def replicas(job: JobSpec) -> int:
    """Ranks that hold the same parameters, for other samples or for other parts of these."""
    return job.sizes["dp"] * job.sizes["cp"]


def zero_stage(job: JobSpec) -> int:
    """What of ZeRO is done: a single replica shares nothing."""
    return job.parallel.zero if replicas(job) > 1 else 0


def kept_elements(job: JobSpec, buckets: Sequence[Bucket], count: int) -> tuple[int, int, int]:
    """Of parameters, of gradients and of what the optimizer steps, on a rank of a stage of `count`
    parameters, padding included; what is whole for a moment at ZeRO 2 and 3 is not among them."""
    zero, parts = zero_stage(job), replicas(job)
    trained = [bucket for bucket in buckets if bucket.is_trained]
    whole = sum(bucket.numel for bucket in trained)
    if not zero:
        return count, whole, whole
    own = sum(bucket.part(parts) for bucket in trained)
    if zero == 3:
        return sum(bucket.part(parts) for bucket in buckets), own, own
    return count - whole + own * parts, own if zero == 2 else own * parts, own


def shared_names(table: OperatorTable, stages: Sequence[Sequence[Span]]) -> frozenset[str]:
    """Parameters that several stages hold; layers' own are never among them."""
    last, count = len(stages) - 1, Counter[str]()
    for stage, spans in enumerate(stages):
        held = table.held(spans, is_first=stage == 0, is_last=stage == last)
        count.update({weight.name for part in held for weight in part.end_weights()})
    return frozenset(name for name, times in count.items() if times > 1)


def stage_buckets(
    job: JobSpec, table: OperatorTable, spans: Sequence[Span], *, stage: int,
    shared: Collection[str],
) -> tuple[Bucket, ...]:  # fmt: skip
    """Of a stage, in the order in which they are reduced. shared: with other stages, by name."""
    zero, held = zero_stage(job), [
        list(_chunk_items(job, table, span, chunk=chunk, stage=stage))
        for chunk, span in enumerate(spans)
    ]  # fmt: skip
    uses = Counter(item.name for items in held for item in items)
    apart = {name for name, count in uses.items() if count > 1 or name in shared}
    found: list[Bucket] = []
    for items in reversed(held):
        own = [item for item in reversed(items) if item.name not in apart]
        groups = _by_unit(own) if zero == 3 else _by_size(job, own)
        found += (_bucket(group, shared) for group in groups)
    met = [item for items in held for item in items if item.name in apart]
    for name in sorted(apart):
        found.append(_bucket([item for item in met if item.name == name], shared))
    return tuple(bucket for bucket in found if bucket.is_trained or zero == 3)


def _chunk_items(
    job: JobSpec, table: OperatorTable, span: Span, *, chunk: int, stage: int
) -> Iterator[_BucketItem]:
    """Parameters of a chunk, each once, in forward order."""
    p, sizes = job.parallel, dict[int, list[tuple[str, int, bool]]]()
    is_frozen, seen = frozen_by(table.freeze), set[str]()
    held = table.held([span], is_first=stage == 0, is_last=stage == p.pp - 1)
    units = [unit for part in held for unit in _units(part)]  # all alive: an id is of one of them
    for number, (layer, prefix, weights, goes_back) in enumerate(units):
        if id(weights) not in sizes:  # all layers of a stack have the same
            sizes[id(weights)] = [(w.name, w.local_numel(p.tp), w.is_split) for w in weights]
        for own, size, is_split in sizes[id(weights)]:
            name = prefix + own
            if name not in seen:
                seen.add(name)
                is_partial = p.sequence_parallel and not is_split
                yield _BucketItem(
                    name, size, chunk, number, layer, goes_back, not is_frozen(name), is_partial
                )  # fmt: skip


def _units(held: StageSlice) -> Iterator[tuple[str, str, tuple[ParameterSpec, ...], bool]]:
    """(module, prefix of names, parameters, whether a gradient passes) of entry, layers, exit."""
    stack, block = held.stack, held.stack.block.weights
    entry = (stack.entry.weights if held.has_entry else ()) + (stack.shared if held.layers else ())
    yield "", "", entry, True
    for run, flow in held.flow.runs:
        for n in range(max(run.start, held.layers.start), min(run.stop, held.layers.stop)):
            layer = f"{stack.prefix}.{n}"
            yield layer, f"{layer}.", block, flow.after
    if held.has_exit:
        yield "", "", stack.exit.weights, True


def layer_units(
    table: OperatorTable, span: Span, *, is_first: bool, is_last: bool
) -> dict[str, int]:
    """Of the modules of a chunk's layers, in forward order, their numbers among its units."""
    held = table.held([span], is_first=is_first, is_last=is_last)
    units = (unit for part in held for unit in _units(part))
    return {layer: number for number, (layer, *_) in enumerate(units) if layer}


def _by_unit(items: Iterable[_BucketItem]) -> Iterator[list[_BucketItem]]:
    for _, unit in groupby(items, key=lambda item: item.unit):
        kinds: dict[tuple[bool, bool], list[_BucketItem]] = {}
        for item in unit:
            kinds.setdefault((item.is_trained, item.is_partial), []).append(item)
        yield from kinds.values()


def _by_size(job: JobSpec, items: Sequence[_BucketItem]) -> Iterator[list[_BucketItem]]:
    """Trained ones, first those whose gradients are whole."""
    most = job.parallel.bucket_bytes // DTYPE_BYTES[job.training.reduced_dtype]
    for is_partial in (False, True):
        group: list[_BucketItem] = []
        size = 0
        for item in items:
            if not item.is_trained or item.is_partial is not is_partial:
                continue
            if group and size + item.size > most:
                yield group
                group, size = [], 0
            group.append(item)
            size += item.size
        if group:
            yield group


def _bucket(items: Sequence[_BucketItem], shared: Collection[str]) -> Bucket:
    """Of one parameter met by several chunks, or of several met by one."""
    held, first = {item.name: item.size for item in items}, items[0]
    chunks = tuple(sorted({item.chunk for item in items}))
    return Bucket(
        names=tuple(held), sizes=tuple(held.values()), chunks=chunks,
        unit=min(item.unit for item in items) if len(chunks) == 1 else 0,
        layer=first.layer, goes_back=first.goes_back,
        is_trained=first.is_trained, is_partial=first.is_partial, is_shared=first.name in shared,
    )  # fmt: skip
