"""An audit of a step: kernels and bytes of each module in each pass, and the least possible.

A dispatch mode sees every operation of a rehearsed step below autograd (kernel_counts.py), says
whose it is (`Scopes`) and what of its bytes a single kernel for that module would have to move
(`Dataflow`). Seconds are those of the plan's own law of kernels on the job's device
(plan/estimate/kernels.py): a product takes what it takes there, another kernel its launch and its bytes
at the bandwidth that kernels reach. The least is the module's products, or its least bytes where
they take longer, and one launch where it has no product.

Not seen are a host that launches too slowly, caches that hold what the kernel before wrote, and
kernels that reach less than others: an audit finds what is done needlessly, not what is done badly.

In forward, an operation belongs to the innermost module that is being called; work of the model
outside of its modules is named by the method of its family (`embed`, `word_losses`). Autograd
numbers its nodes in the order in which they are made (the sequence numbers that torch's profiler
uses to join forward and backward). Nodes that have appeared since the operation before were made by
the module of this one; a node's backward belongs to the module that made it, and the sum into a
parameter's gradient to `PARAMETER.grad`. What runs with gradients enabled inside of a backward is
forward once more: `recompute`.

A part of a step (a module in a pass) is taken as one kernel would do it. It must read what others
wrote and it reads, and write what others read later, or what is still there when the step ends;
what it makes and uses up itself costs nothing. A copy of values as they are (`clone`) is the tensor
that it copies: nobody needed it. Regions of a storage are distinguished, so that q, k and v of one
product are the product, read once.
"""

from __future__ import annotations

import re
import sys
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr as next_node_number
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from mpctl.model.pipeline.schedule.orders import Action, Kind
from mpctl.plan.estimate.kernels import (
    AttentionWork,
    MissingFigure,
    Speed,
    attention_seconds,
    device_speed,
    product_seconds,
)
from mpctl.records.rundir.rank_files import AuditRow, AuditTotal, Pass, StepAudit
from mpctl.spec.job import JobSpec
from mpctl.train.rehearsal.kernel_counts import FREE, OpCost, Product, Touched, cost_of, is_known, region, tensors_in
from mpctl.train.runtime.activity import Activity
from mpctl.train.runtime.memory import device_of
from mpctl.train.runtime.profile import StepProfile
from mpctl.train.runtime.train import Trainer

NO_NUMBER = (1 << 64) - 1  # of the nodes that add up parameters' gradients
DEFERRED = "deferred weights"  # whose gradients a schedule computes apart (zero-bubble)
LAYER = re.compile(r"^(?:.*?\.)?layers\.\d+")


@dataclass
class Scopes:
    """The current position in a step. names: those of modules; outside: what is done outside of
    passes; makers: (first node, module) in the order of nodes; parameters: names by identity."""

    names: Mapping[nn.Module, str] = field(default_factory=dict)
    parameters: Mapping[int, str] = field(default_factory=dict)
    outside: str = ""
    stack: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    makers: list[str] = field(default_factory=list)
    seen: int = 0

    def watch(self, model: nn.Module) -> None:
        """Follow the calls of all modules of a model from now on."""
        chunks = list(getattr(model, "chunks", [model]))
        named = [(module, name) for chunk in chunks for name, module in chunk.named_modules()]
        self.names = {module: name for module, name in named if name}
        for module in self.names:
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave, always_call=True)
        self.parameters = {id(p): name for name, p in model.named_parameters()}

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Work outside of passes, by name."""
        before, self.outside = self.outside, what
        try:
            yield
        finally:
            self.outside = before

    def place(self, action: Kind | None) -> tuple[str, Pass]:
        """The module and the pass of the operation under way. action: of the schedule, None outside
        of a micro batch's."""
        node = torch._C._current_autograd_node()
        module, phase = self._place(node, action)
        made = next_node_number()
        if made > self.seen:
            self.starts.append(self.seen)
            self.makers.append(module)
            self.seen = made
        return module, phase

    def _place(self, node: Any, action: Kind | None) -> tuple[str, Pass]:
        if self.stack:
            return self.stack[-1], "forward" if node is None else "recompute"
        if node is None:
            if action is None or self.outside:
                return self.outside or "step", "step"
            if action == "backward_weight":
                return DEFERRED, "backward"
            return _method(), "forward" if action == "forward" else "backward"
        maker = self._maker(node)
        if not torch.is_grad_enabled():
            return maker, "backward"
        layer = LAYER.match(maker)
        return layer[0] if layer and _is_in_layer() else maker, "recompute"

    def _maker(self, node: Any) -> str:
        number = node._sequence_nr()
        if number == NO_NUMBER:
            return f"{self.parameters.get(id(node.variable), 'parameter')}.grad"
        place = bisect_right(self.starts, number) - 1
        return self.makers[place] if place >= 0 else _method()

    def _enter(self, module: nn.Module, *_: Any) -> None:
        self.stack.append(self.names[module])

    def _leave(self, *_: Any) -> None:
        self.stack.pop()


def pattern(name: str) -> str:
    """The name with its numbers merged: `layers.3.mlp.up` -> `layers.*.mlp.up`."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def part_of(module: str) -> str:
    """The kind of layer that a pattern lies in, `layers.*`; `outside of layers` for the rest."""
    found = re.match(r"^(?:.*?\.)?layers\.\*", module)
    return found[0] if found else "outside of layers"


def _method() -> str:
    """The innermost method of a family's module that is being called."""
    return _innermost("/mpctl/train/families/") or "pipeline"


def _is_in_layer() -> bool:
    return _innermost("/mpctl/train/layers/transformer_layer.py") is not None


def _innermost(*paths: str) -> str | None:
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename.replace("\\", "/")
        if any(path in file for path in paths):
            return str(frame.f_code.co_name)
        frame = frame.f_back
    return None


Regions = dict[Any, int]  # bytes of each region of a storage


@dataclass(eq=False)
class Part:
    """Reads of one part of a step from others, and its writes, by storage. needed: storages that it
    wrote and others read later."""

    read: dict[Storage, Regions] = field(default_factory=dict)
    written: dict[Storage, Regions] = field(default_factory=dict)
    needed: set[Storage] = field(default_factory=set)

    @property
    def least_bytes(self) -> int:
        """Bytes read of others' and written for others, each once."""
        out = (_union(storage, self.written[storage]) for storage in self.needed)
        return sum(out) + sum(_union(storage, regions) for storage, regions in self.read.items())


@dataclass(eq=False)
class Storage:
    """A storage while it lives. maker: the part that first wrote it, None for what was there;
    source: what it is a copy of; reference: forgets it when it is freed."""

    size: int
    maker: Part | None = None
    source: Storage | None = None
    writers: set[Part] = field(default_factory=set)
    reference: Any = None


class Dataflow:
    """Follows who reads and writes which storage, from a step's first operation to its last."""

    def __init__(self) -> None:
        self.living: dict[int, Storage] = {}

    def read(self, part: Part, touched: Touched) -> None:
        """A part reads so many bytes of these tensors."""
        for tensor, size in touched:
            storage = self._storage(tensor)
            origin = storage.source or storage
            if _has_written(part, origin, tensor):
                continue
            part.read.setdefault(storage, {})[region(tensor)] = size
            for writer in origin.writers:
                writer.needed.add(origin)

    def write(self, part: Part, touched: Touched) -> None:
        """A part writes tensors: new ones, or others' in place, which it changes for good."""
        for tensor, size in touched:
            is_new = tensor.untyped_storage()._cdata not in self.living
            storage = self._storage(tensor)
            if is_new:
                storage.maker = part
            storage.source = None
            storage.writers.add(part)
            part.written.setdefault(storage, {})[region(tensor)] = size
            if storage.maker is not part:
                part.needed.add(storage)

    def copy(self, source: Tensor, copy: Tensor, part: Part) -> None:
        """A part copies values as they are into a new tensor."""
        origin = self._storage(source)
        self.made(copy, part)
        self._storage(copy).source = origin.source or origin

    def made(self, tensor: Tensor, part: Part) -> None:
        if tensor.untyped_storage()._cdata not in self.living:
            self._storage(tensor).maker = part

    def finish(self) -> None:
        for storage in self.living.values():
            for writer in storage.writers:
                writer.needed.add(storage)

    def _storage(self, tensor: Tensor) -> Storage:
        untyped = tensor.untyped_storage()
        key, size = untyped._cdata, untyped.nbytes()
        found = self.living.get(key)
        if found is None:
            found = self.living[key] = Storage(size)
            found.reference = weakref.ref(untyped, lambda _: self.living.pop(key, None))
        found.size = max(found.size, size)
        return found


def _has_written(part: Part, storage: Storage, tensor: Tensor) -> bool:
    """Whether a part reads its own: of a storage that it made, or this region, or all of it."""
    regions = part.written.get(storage, {})
    return part in storage.writers and (
        storage.maker is part or region(tensor) in regions or sum(regions.values()) >= storage.size
    )


def _union(storage: Storage, regions: Regions) -> int:
    """Bytes of regions of a storage, which may overlap: no more than it has."""
    return min(storage.size, sum(regions.values()))


Item = TypeVar("Item")
_DEVICE = torch.ops.prim.device.default
Place = tuple[str, Pass, int | None]  # module, pass, micro batch
NO_SPEED = "no seconds: the cluster names no GPU of known speed"


class AuditedSpans(StepProfile):
    """Notifies an audit of a trainer's work outside of its passes."""

    def __init__(self, scopes: Scopes) -> None:
        super().__init__()
        self.scopes = scopes

    def span(self, name: str) -> AbstractContextManager[None]:
        """Enter it around a piece of work."""
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
    """Counts of one module in one pass of one micro batch."""

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

    activity: says which action of the schedule is under way. scopes: whose each operation is.
    speed: of the device, None where it is not known.
    """

    def __init__(self, device: torch.device, speed: Speed | None, activity: Activity) -> None:
        super().__init__()
        self.device, self.speed, self.activity = device, speed, activity
        self.scopes, self.flow, self.network = Scopes(), Dataflow(), Part()
        self.tallies: dict[Place, _Tally] = {}
        self.unknown: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch's compiler from being imported for this mode, as in MemoryTracker."""
        return False

    @contextmanager
    def watching(self, trainer: Trainer) -> Iterator[None]:
        """Count all that the trainer does inside."""
        self.scopes.watch(trainer.model)
        with self:
            yield

    def _action(self) -> Action | None:
        current = self.activity.current
        return current.action if current else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is _DEVICE:  # often
            return func(*args)
        kwargs = kwargs or {}
        action = self._action()
        module, phase = self.scopes.place(action and action.kind)
        result = func(*args, **kwargs)
        if isinstance(func, OpOverload) and self._is_on_device((args, kwargs, result)):
            self._count(func, args, kwargs, result, module, phase)
        return result

    def _count(self, func: OpOverload, args: Any, kwargs: Any, result: Any, module: str, phase: Pass) -> None:
        action = self._action() if phase != "step" else None
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
        """Return the account of the step, from its first `run` micro batches."""
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


def _row(module: str, phase: Pass, tallies: list[_Tally], times: float, speed: Speed | None) -> AuditRow:
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
        "least_seconds": None if speed is None else sum(t.least_seconds(speed) for t in tallies) / count,
        "operations": {name: n / count for name, n in operations.most_common()},
    }


def _loss(row: AuditRow) -> float:
    """Return the possible saving of a step in this row: seconds, or bytes if seconds are unknown."""
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


def _total(part: str, phase: Pass, pairs: list[tuple[AuditRow, float]], divisor: float) -> AuditTotal:
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
    """Return the seconds of the kernels of one operation on a device; 0 for a message."""
    if cost.kind == "message":
        return 0.0
    launch, work = speed.other.launch, cost.work
    if isinstance(work, Product):
        rates = speed.linear if work.width == 1 else speed.other  # of fp8 operands alone
        shape = (work.m, work.k, work.n, float(work.width), float(work.out))
        return product_seconds(rates, *shape, work.batch) + (cost.launches - 1) * launch
    if isinstance(work, AttentionWork):
        return attention_seconds(speed, work, launches=cost.launches)
    return cost.launches * launch + cost.moved / speed.bandwidth


def _assumption(job: JobSpec, speed: Speed) -> str:
    device = job.cluster.device
    name = "the device" if device is None else device.name
    return (
        f"{name}: {speed.bandwidth / 1e12:.2f} TB/s, {speed.other.launch * 1e6:.1f} us a launch, "
        f"products as the plan has them; messages take no time here"
    )
