"""Ways out where nothing that was asked for fits: the least change first, each of them planned.

In turn: another method (QLoRA instead of LoRA), shorter sequences, more of the same GPUs, as many of another.
What offload saves is in the rows already.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from mpctl.plan.fit.choice import FitChoice, advised, choices
from mpctl.plan.fit.devices import COUNTS, KnownDevice, LeastBytes, best_on, known_devices
from mpctl.plan.fit.methods import METHODS, TITLES
from mpctl.plan.fit.request import FitRequest
from mpctl.plan.fit.rows import FitEvaluator
from mpctl.spec.gpus import CLUSTERS

MOST = 3
SHORTEST = 128  # tokens of a row


class WayOut(NamedTuple):
    """A change in words, and the row that fits with it."""

    change: str
    choice: FitChoice


def ways_out(request: FitRequest, count: int = MOST) -> list[WayOut]:
    """Return the nearest changes that make a request fit, at most `count`."""
    least = LeastBytes(request)
    kinds = (_other_method(request), _shorter(request), _more_gpus(request, least), _other_gpu(request, least))
    return list(islice((way for kind in kinds for way in kind), count))


def _other_method(request: FitRequest) -> Iterator[WayOut]:
    """The method that changes least: LoRA instead of full, QLoRA instead of LoRA."""
    last = max(map(METHODS.index, request.methods))
    for method in METHODS[last + 1 :]:
        found = advised(choices(request.with_methods(method)))
        if found is not None:
            asked = " or ".join(TITLES[name] for name in request.methods)
            yield WayOut(f"{TITLES[method]} instead of {asked}", found)
            return


def _shorter(request: FitRequest) -> Iterator[WayOut]:
    """The longest rows that fit, by halves."""
    assert request.gpus is not None
    usable, length = request.job.cluster.usable_bytes or 0, request.seq_length // 2
    while length >= SHORTEST:
        shorter = request.on(request.gpus, **{"model.seq_length": length})
        evaluator = FitEvaluator(shorter.job, shorter.given)
        sizes = (evaluator.least_bytes(method) for method in request.methods)
        if any(size is not None and size <= usable for size in sizes) and (found := advised(choices(shorter))):
            yield WayOut(f"rows of {length:,} tokens instead of {request.seq_length:,}", found)
            return
        length //= 2


def _more_gpus(request: FitRequest, least: LeastBytes) -> Iterator[WayOut]:
    """The next power of two of the same GPUs that fits."""
    gpus = request.gpus
    preset = gpus.settings.get("cluster") if gpus else None
    device = next((one for one in known_devices() if CLUSTERS[one.name] == preset), None)
    if gpus is None or device is None:
        return
    for count in COUNTS:
        if count > max(gpus.counts) and (found := _best(request, least, device, count)) is not None:
            yield WayOut(f"{count:,} GPUs instead of {max(gpus.counts):,}", found)
            return


def _other_gpu(request: FitRequest, least: LeastBytes) -> Iterator[WayOut]:
    """As many of the smallest GPU of the same kind (cuda, rocm) that fits."""
    own = request.job.cluster.device
    assert request.gpus is not None
    assert own is not None
    count = max(request.gpus.counts)
    larger = [one for one in known_devices() if one.memory > own.memory_bytes and one.kind == own.kind]
    for device in sorted(larger, key=lambda d: (d.memory, d.name)):
        if (found := _best(request, least, device, count)) is not None:
            yield WayOut(f"{found.device} as the GPU", found)
            return


def _best(request: FitRequest, least: LeastBytes, device: KnownDevice, count: int) -> FitChoice | None:
    methods = [method for method in request.methods if least.fits(method, device, count)]
    found = (best_on(request, method, device.name, count) for method in methods)
    return advised(one for one in found if one is not None)
