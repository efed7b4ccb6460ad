"""An audit of a step: kernels and bytes of each module in each pass, beside the least possible.

A dispatch mode sees every operation of a rehearsed step below autograd (kernel_counts.py), says
whose it is (scopes.py) and what of its bytes a single kernel for that module would have to move
(dataflow.py). Seconds are those of the plan's own law of kernels on the job's device
(estimate/kernels.py): a product takes what it takes there, another kernel its launch and its bytes
at the bandwidth that kernels reach. The least is the module's products, or its least bytes where
they take longer, and one launch where it has no product.

Not seen are a host that launches too slowly, caches that hold what the kernel before wrote, and
kernels that reach less than others: an audit finds what is done needlessly, not what is done badly.

By hand, bandwidth 1 GB/s, launches of 1 us: y = x + 1 then z = 2 y of 1 MB each moves 4 MB in 2
launches, 4.002 ms; least 2 MB in 1, 2.001 ms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from mpctl.estimate.kernels import (
    MissingFigure,
    Speed,
    device_speed,
    flash_seconds,
    product_seconds,
)
from mpctl.pipeline.schedule.orders import Action
from mpctl.rehearsal.dataflow import Dataflow, Part
from mpctl.rehearsal.kernel_counts import (
    FREE,
    Attention,
    OpCost,
    Product,
    cost_of,
    is_known,
    tensors_in,
)
from mpctl.rehearsal.scopes import Scopes, part_of, pattern
from mpctl.rundir.rank_files import AuditRow, AuditTotal, Pass, StepAudit
from mpctl.runtime.memory_tracker import device_of
from mpctl.runtime.profile import StepProfile
from mpctl.runtime.train import Trainer
from mpctl.spec.job import JobSpec

Item = TypeVar("Item")
_DEVICE = torch.ops.prim.device.default
Place = tuple[str, Pass, int | None]  # module, pass, micro batch
NO_SPEED = "no seconds: the cluster names no GPU of known speed"


class AuditedSpans(StepProfile):
    """Tells an audit what a trainer does outside of its passes."""

    def __init__(self, scopes: Scopes) -> None:
        super().__init__()
        self.scopes = scopes

    def span(self, name: str) -> AbstractContextManager[None]:
        """To be entered around a piece of work."""
        return self.scopes.during(name)

    def each(self, name: str, items: Iterator[Item]) -> Iterator[Item]:
        """The items, each made during `name`."""
        while True:
            with self.scopes.during(name):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item


@dataclass
class _Tally:
    """What one module did in one pass of one micro batch."""

    launches: int = 0
    moved: int = 0
    flops: float = 0.0
    seconds: float = 0.0
    product_seconds: float = 0.0
    operations: Counter[str] = field(default_factory=Counter)
    part: Part = field(default_factory=Part)

    def least_seconds(self, speed: Speed) -> float:
        """One kernel for what is no product, or no more than the least bytes of the products."""
        moving = self.part.least_bytes / speed.bandwidth
        if not self.product_seconds:
            return moving + speed.other.launch if self.launches else 0.0
        return max(self.product_seconds, moving)


class StepAuditor(TorchDispatchMode):
    """Counts what a rank's step launches and moves on a device while it is entered.

    action: of the schedule under way, None outside of passes. scopes: whose each operation is.
    speed: of the device, None where it is not known.
    """

    def __init__(self, device: torch.device, speed: Speed | None) -> None:
        super().__init__()
        self.device, self.speed = device, speed
        self.scopes, self.flow, self.network = Scopes(), Dataflow(), Part()
        self.action: Callable[[], Action | None] = lambda: None
        self.tallies: dict[Place, _Tally] = {}
        self.unknown: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """As MemoryTracker's: torch's compiler is not imported for this mode."""
        return False

    @contextmanager
    def watching(self, trainer: Trainer) -> Iterator[None]:
        """Count all that the trainer does inside."""
        pipeline = trainer.pipeline
        self.action = lambda: pipeline.current.action if pipeline.current else None
        self.scopes.watch(trainer.model)
        with self:
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:  # often
            return func(*args)
        kwargs = kwargs or {}
        action = self.action()
        module, phase = self.scopes.place(action and action.kind)
        result = func(*args, **kwargs)
        if isinstance(func, OpOverload) and self._is_on_device((args, kwargs, result)):
            self._count(func, args, kwargs, result, module, phase)
        return result

    def _count(
        self, func: OpOverload, args: Any, kwargs: Any, result: Any, module: str, phase: Pass
    ) -> None:
        action = self.action() if phase != "step" else None
        place = (module, phase, action and action.microbatch)
        tally = self.tallies.setdefault(place, _Tally())
        cost = cost_of(func, args, kwargs, result)
        if cost is None:
            if func._schema.name.split("::")[1] in FREE:
                for tensor in tensors_in(result):
                    self.flow.made(tensor, tally.part)
            return
        if not is_known(func):
            self.unknown.add(str(func))
        self._follow(cost, tally.part)
        tally.launches += cost.launches
        tally.moved += cost.moved
        tally.operations[cost.name] += cost.launches
        if cost.work is not None:
            tally.flops += cost.work.flops
        if self.speed is not None:
            seconds = _seconds(cost, self.speed)
            tally.seconds += seconds
            tally.product_seconds += seconds if cost.work is not None else 0.0

    def _follow(self, cost: OpCost, part: Part) -> None:
        if cost.kind == "move":
            self.flow.copy(cost.reads[0][0], cost.writes[0][0], part)
            return
        part = self.network if cost.kind == "message" else part
        self.flow.read(part, cost.reads)
        self.flow.write(part, cost.writes)

    def _is_on_device(self, values: Any) -> bool:
        return any(device_of(t).type == self.device.type for t in tensors_in(values))

    def audit(self, job: JobSpec, run: int) -> StepAudit:
        """The account of the step, of whose micro batches the first `run` were run."""
        self.flow.finish()
        rows = list(self._rows(job.num_microbatches / run))
        rows.sort(key=_loss, reverse=True)
        return {
            "rows": rows,
            "totals": _totals(rows, job.num_microbatches),
            "unknown": sorted(self.unknown),
            "assumption": NO_SPEED if self.speed is None else _assumption(job, self.speed),
        }

    def _rows(self, share: float) -> Iterator[AuditRow]:
        merged: dict[tuple[str, Pass], list[_Tally]] = {}
        for (module, phase, _), tally in self.tallies.items():
            if tally.launches:
                merged.setdefault((pattern(module), phase), []).append(tally)
        for (module, phase), tallies in merged.items():
            times = len(tallies) * (1.0 if phase == "step" else share)
            yield _row(module, phase, tallies, times, self.speed)


def _row(
    module: str, phase: Pass, tallies: list[_Tally], times: float, speed: Speed | None
) -> AuditRow:
    count = len(tallies)
    operations: Counter[str] = Counter()
    for tally in tallies:
        operations.update(tally.operations)
    return {
        "module": module,
        "phase": phase,
        "times": times,
        "launches": sum(t.launches for t in tallies) / count,
        "bytes": sum(t.moved for t in tallies) / count,
        "least_bytes": sum(t.part.least_bytes for t in tallies) / count,
        "flops": sum(t.flops for t in tallies) / count,
        "seconds": None if speed is None else sum(t.seconds for t in tallies) / count,
        "least_seconds": None
        if speed is None
        else sum(t.least_seconds(speed) for t in tallies) / count,
        "operations": {name: n / count for name, n in operations.most_common()},
    }


def _loss(row: AuditRow) -> float:
    """What a step could save by this row: seconds, or bytes where those are not known."""
    if row["seconds"] is None or row["least_seconds"] is None:
        return (row["bytes"] - row["least_bytes"]) * row["times"]
    return (row["seconds"] - row["least_seconds"]) * row["times"]


def _totals(rows: list[AuditRow], num_microbatches: int) -> list[AuditTotal]:
    """A layer of one micro batch in each pass, and what all the rest of a step takes."""
    totals: dict[tuple[str, Pass], list[tuple[AuditRow, float]]] = {}
    layers: Counter[str] = Counter()
    for row in rows:
        part = part_of(row["module"])
        layers[part] = max(layers[part], round(row["times"] / num_microbatches))
        totals.setdefault((part, row["phase"]), []).append((row, row["times"]))
    return [
        _total(part, phase, pairs, num_microbatches * layers[part] if "*" in part else 1)
        for (part, phase), pairs in sorted(totals.items())
    ]


def _total(
    part: str, phase: Pass, pairs: list[tuple[AuditRow, float]], divisor: float
) -> AuditTotal:
    def summed(key: str) -> float | None:
        values = [(row[key], times) for row, times in pairs]  # type: ignore[literal-required]
        return None if values[0][0] is None else sum(v * t for v, t in values) / divisor

    keys = ("launches", "bytes", "least_bytes", "flops", "seconds", "least_seconds")
    figures: Any = {key: summed(key) for key in keys}
    return cast(AuditTotal, {"part": part, "phase": phase, **figures})


def job_speed(job: JobSpec) -> Speed | None:
    """The speed of the job's GPU at its training dtype; None where no preset has it."""
    if job.cluster.device is None or job.cluster.device.is_cpu:
        return None
    try:
        return device_speed(job.cluster, job.training.chosen_dtype)
    except MissingFigure:
        return None


def _seconds(cost: OpCost, speed: Speed) -> float:
    """What the kernels of one operation take on a device; a message takes none of its own."""
    if cost.kind == "message":
        return 0.0
    launch, work = speed.other.launch, cost.work
    if isinstance(work, Product):
        rates = speed.linear if work.width == 1 else speed.other  # of fp8 operands alone
        shape = (work.m, work.k, work.n, float(work.width), float(work.out))
        return product_seconds(rates, *shape, work.batch) + (cost.launches - 1) * launch
    if isinstance(work, Attention):
        seconds = flash_seconds(speed, work.pairs, work.columns, backward=work.backward)
        more = work.products / (5 if work.backward else 2)
        return (seconds - launch) * more + cost.launches * launch
    return cost.launches * launch + cost.moved / speed.bandwidth


def _assumption(job: JobSpec, speed: Speed) -> str:
    device = job.cluster.device
    name = "the device" if device is None else device.name
    return (
        f"{name}: {speed.bandwidth / 1e12:.2f} TB/s, {speed.other.launch * 1e6:.1f} us a launch, "
        f"products as the plan has them; messages take no time here"
    )
