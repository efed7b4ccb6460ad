"""`--gpus any`: the fewest GPUs of each device preset on which a method fits, and the cheapest by given prices.

Memory hardly depends on the device, so that one evaluation of a method on a number of GPUs rules devices in
or out; the rows that are shown are evaluated on their own GPUs. States in host memory are left out here:
they fit almost anywhere, slowly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mpctl.core.errors import InputError
from mpctl.plan.estimate.kernels import MissingFigure
from mpctl.plan.fit.choice import FitChoice, fastest
from mpctl.plan.fit.methods import MethodName
from mpctl.plan.fit.request import FitRequest, named_gpus
from mpctl.plan.fit.rows import FitEvaluator
from mpctl.spec.gpus import CLUSTERS, device_names
from mpctl.spec.presets import find_preset
from mpctl.spec.runtime import get_profile

COUNTS = tuple(1 << power for power in range(11))
SHOWN = 4  # devices of a method
DOUBLINGS = 4  # of the fewest GPUs, to find the cheapest number
REFERENCE = "h100-sxm"


class KnownDevice(NamedTuple):
    """A device by its name for --gpus. memory: bytes; kind: cuda, rocm, ..."""

    name: str
    memory: int
    kind: str


class FoundGpus(NamedTuple):
    """rows: the fewest GPUs of each device that is shown, and where prices are known the cheapest; others:
    devices that fit as well and have no row."""

    rows: list[FitChoice]
    others: list[str]


def known_devices() -> Iterator[KnownDevice]:
    """Yield each device that has a cluster preset."""
    for name, preset in device_names().items():
        cluster = find_preset("clusters", preset) or {}
        table = find_preset("devices", cluster["device"]) or {}
        yield KnownDevice(name, table["memory_bytes"], table["kind"])


def any_gpus(request: FitRequest) -> FoundGpus:
    """Find GPUs for a request that names none."""
    runs = get_profile(request.job.training.runtime).runs
    devices = [one for one in known_devices() if runs.runs_on(one.kind)]
    if request.prices:
        devices = [one for one in devices if request.price(CLUSTERS[one.name]) is not None]
    rows, seen, known = list[FitChoice](), set[str](), set[str]()
    least = LeastBytes(request)
    for method in request.methods:
        fitting = [(count, one) for one in devices if (count := least.fewest(method, one)) is not None]
        fitting.sort(key=lambda found: (found[0], found[1].memory, found[1].name))
        shown = fitting if request.prices else fitting[:SHOWN]
        known |= {device.name for _, device in fitting}
        seen |= {device.name for _, device in shown}
        for count, device in shown:
            rows += _on_device(request, method, device, count)
    return FoundGpus(rows, sorted(known - seen))


class LeastBytes:
    """Least bytes of a method by number of GPUs."""

    def __init__(self, request: FitRequest) -> None:
        self.request = request
        self.evaluators: dict[int, FitEvaluator] = {}
        self.known: dict[tuple[MethodName, int], int | None] = {}

    def fewest(self, method: MethodName, device: KnownDevice) -> int | None:
        """The fewest GPUs of a device on which a method fits."""
        return next((count for count in COUNTS if self.fits(method, device, count)), None)

    def fits(self, method: MethodName, device: KnownDevice, count: int) -> bool:
        """Whether a method fits so many GPUs of a device."""
        size = self._bytes(method, count)
        return size is not None and size <= device.memory * (1 - self.request.job.cluster.headroom / 100)

    def _bytes(self, method: MethodName, count: int) -> int | None:
        key = method, count
        if key not in self.known:
            self.known[key] = self._evaluator(count).least_bytes(method)
        return self.known[key]

    def _evaluator(self, count: int) -> FitEvaluator:
        if count not in self.evaluators:
            gpus = named_gpus(REFERENCE, count)
            assert gpus is not None, "powers of two fill its nodes"
            self.evaluators[count] = FitEvaluator(self.request.on(gpus).job, self.request.given)
        return self.evaluators[count]


def _on_device(request: FitRequest, method: MethodName, device: KnownDevice, count: int) -> list[FitChoice]:
    """The fewest GPUs of a device, and the number at which the data is cheapest where that is another one."""
    found: list[FitChoice] = []
    for number in (count << doubling for doubling in range(DOUBLINGS + 1)):
        one = best_on(request, method, device.name, number)
        if one is not None:
            if found and (one.price or 0) >= (found[-1].price or 0):
                break
            found.append(one)
            if one.price is None:
                break
    return found if len(found) < 2 else [found[0], found[-1]]


def best_on(request: FitRequest, method: MethodName, device: str, count: int) -> FitChoice | None:
    """Return the fastest row of a method on so many GPUs of a device; None where none fits or can be timed."""
    gpus = named_gpus(device, count)
    if gpus is None:
        return None
    try:
        on = request.on(gpus)
        rows = FitEvaluator(on.job, on.given).rows([method], offload=False)
        fitting = [FitChoice(on, row) for row in rows if row.fits]
    except (MissingFigure, InputError):
        return None
    return fastest(fitting) if fitting else None
