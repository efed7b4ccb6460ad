"""The memory of a rank, storage by storage, and of one real step, to compare with the plan.

Every operation passes through a TorchDispatchMode (in a rehearsal above the fake tensors). A
storage is added when a tensor that uses it is first seen, updated when it grows or shrinks, and
removed when it is freed (by a weak reference). Views share a storage, and tensors saved for
backward stay. Only tensors on the device count, so a copy in host memory costs nothing. The bytes
are exact: an allocator's rounding (512 on CUDA), its fragmentation and the libraries' workspaces
are not in them.

Kinds: parameters, gradients and optimizer are named by the owner. Of the others, `activations` are
those that an earlier forward, or the backward of inputs, has left alive, `temporaries` those that
the current action has made, and those that are alive only to be sent, received or reduced: messages
between stages, and under ZeRO 2 and 3 the full-size gradients of a micro batch. The plan has both
in what it calls temporary.

`MemoryWatch` measures one step of a run, on CUDA through the allocator: the first step that begins
with the optimizer's moments, which is the second of a fresh run; every later step takes as much. It
changes no value and costs the measured step some microseconds per operation. In a run of a single
step that step is measured, although its moments are only made at its end.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpctl.model.pipeline.schedule.program import Step
from mpctl.spec.job import JobSpec
from mpctl.train.runtime.activity import Activity, nobody_follows
from mpctl.train.runtime.environment import RuntimeEnvironment
from mpctl.train.runtime.optimizer import Optimizer

Kind = Literal["parameters", "gradients", "optimizer", "activations", "temporaries"]
KINDS: tuple[Kind, ...] = ("parameters", "gradients", "optimizer", "activations", "temporaries")
States = Callable[[], Mapping[Kind, list[Tensor]]]
Passing = Callable[[], Iterable[Tensor]]
"""Tensors that are alive to be sent, received or reduced, now."""
SAVING_KINDS = ("forward", "backward_input")  # actions that leave tensors for a later one
_DEVICE, _ITEM = torch.ops.prim.device.default, torch.ops.aten._local_scalar_dense.default
_RESIZE = torch.ops.inductor.resize_storage_bytes_.default


@dataclass(slots=True)
class _Entry:
    """A storage in memory, of no size once it is freed; reference: removes the entry then."""

    size: int
    kind: Kind
    reference: weakref.ref[Any] | None = None


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of storages on a device while it is entered.

    activity: says which action is running and, by `on_move`, when another begins; passing: lists what
    is left alive without being saved for backward. bytes_by_kind, total: current bytes; peak: the maximum
    since `restart`; at_peak: bytes by kind at the peak; peak_activations: the maximum of
    activations. own_only: leaves out mapped memory (through which the ranks of a host exchange
    messages) and memory of other libraries (numpy arrays). A number read from a fake tensor is 1.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        activity: Activity | None = None,
        passing: Passing = tuple,
        own_only: bool = False,
    ) -> None:
        super().__init__()
        self.device, self.own_only, self.activity = device, own_only, activity or Activity()
        self.passing, self.activity.on_move = passing, self.close_action
        self.entries: dict[int, _Entry] = {}
        self.bytes_by_kind: Counter[Kind] = Counter()
        self.total = 0
        self.action: Step | None = None
        self.is_saving = False
        self.created: list[_Entry] = []  # storages that the current action has made
        self.passed: list[_Entry] = []  # of earlier ones that save: passing as they ended
        self.restart()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch reads this when the class is created. The default keeps the compiler out of the
        mode, for which it imports torch._dynamo at the first operation: a second of processor time
        per rank. No compiled layer runs below this mode."""
        return False

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak, self.at_peak = self.total, dict(self.bytes_by_kind)
        self.peak_activations = self.bytes_by_kind["activations"]

    def name(self, kind: Kind, tensors: Iterable[Tensor]) -> None:
        """Count the storages of these tensors, seen before, as `kind`."""
        for tensor in tensors:
            entry = self.entries.get(tensor.untyped_storage()._cdata)
            if entry is not None:
                self._move(entry, kind)

    def add(self, kind: Kind, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were made before this tracker was entered, as `kind`."""
        tensors = list(tensors)
        for tensor in tensors:
            self._see(tensor)
        self.name(kind, tensors)

    def close_action(self) -> None:
        """Another action begins: what the last one made and left alive becomes activations. At once, not
        at its first tensor: what it has received is no message any more by then."""
        action = self.activity.current
        if self.is_saving or self.passed:
            self._sort_left([*self.passed, *(self.created if self.is_saving else ())])
        self.action, self.created = action, []
        self.is_saving = action is not None and action.action.kind in SAVING_KINDS

    def _sort_left(self, left: list[_Entry]) -> None:
        """Count what actions that save have left alive as activations, unless it is passing; that
        is asked again after the next action, for a message may be saved as well."""
        storages = (tensor.untyped_storage()._cdata for tensor in self.passing())
        passing = {id(self.entries[key]) for key in storages if key in self.entries}
        self.passed = [entry for entry in left if id(entry) in passing]
        for entry in left:
            if entry.kind == "temporaries" and id(entry) not in passing:
                self._move(entry, "activations")
        self.peak_activations = max(self.peak_activations, self.bytes_by_kind["activations"])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is _DEVICE:  # a frequent call
            return func(*args)
        if func is _ITEM:
            return _number(args[0])
        result = func(*args, **(kwargs or {}))
        touched = args[0] if func is _RESIZE else result
        for leaf in (touched,) if isinstance(touched, Tensor) else tree_leaves(touched):
            if isinstance(leaf, Tensor) and device_of(leaf).type == self.device.type:
                self._see(leaf)
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.entries:
            if self.own_only and not storage.resizable():
                return
            entry = self.entries[key] = _Entry(0, "temporaries")
            entry.reference = weakref.ref(storage, lambda _: self._remove(key))
            self.created.append(entry)
        entry, size = self.entries[key], storage.nbytes()
        if entry.size == size:
            return
        self.bytes_by_kind[entry.kind] += size - entry.size
        self.total += size - entry.size
        entry.size = size
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, dict(self.bytes_by_kind)

    def _remove(self, key: int) -> None:
        entry = self.entries.pop(key)
        self.bytes_by_kind[entry.kind] -= entry.size
        self.total -= entry.size
        entry.size = 0

    def _move(self, entry: _Entry, kind: Kind) -> None:
        self.bytes_by_kind[entry.kind] -= entry.size
        self.bytes_by_kind[kind] += entry.size
        entry.kind = kind


def device_of(tensor: Tensor) -> torch.device:
    """The tensor's device, without the operation that reading a fake tensor's `device` is: it would
    be every second operation."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def _number(tensor: Tensor) -> Any:
    try:
        return _ITEM(tensor)
    except DataDependentOutputException:
        return 1.0 if tensor.dtype.is_floating_point else 1


def storage_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the storages of these tensors, each storage once."""
    storages = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


class MemoryWatch:
    """Measures one step, where `launch.track_memory` asks for it. On a CPU storages are counted
    operation by operation, which does not see inside compiled layers. measured: bytes by the plan's
    names, once that step is over; None for activations if no MemoryTracker counted them."""

    def __init__(self, job: JobSpec, environment: RuntimeEnvironment) -> None:
        self.device, self.activity = environment.device, environment.activity
        is_countable = not (job.launch.compile and self.device.type == "cpu")
        self.is_on = job.launch.track_memory and is_countable
        self.keep_peak = environment.peak_memory
        self.measured: dict[str, int | None] = {}

    @contextmanager
    def step(self, optimizer: Optimizer, states: States, passing: Passing, *, is_last: bool) -> Iterator[None]:
        """Enter it around a step's gradients and update. states: the tensors that persist from step
        to step, by kind; passing: see MemoryTracker; is_last: whether it is the last step of the
        run."""
        if not self.is_on or self.measured or not (optimizer.rule.state or is_last):
            yield
        elif self.device.type == "cuda":
            self.keep_peak()  # of the steps before
            torch.cuda.reset_peak_memory_stats(self.device)
            yield
            peak = torch.cuda.max_memory_allocated(self.device)
            reserved = torch.cuda.max_memory_reserved(self.device)
            self._note(optimizer, states, {"activations": None, "peak": peak, "reserved": reserved})
        else:
            tracker = MemoryTracker(self.device, activity=self.activity, passing=passing, own_only=True)
            for kind, tensors in states().items():
                tracker.add(kind, tensors)
            tracker.restart()
            with tracker:
                yield
            self.activity.on_move = nobody_follows
            found = {"activations": tracker.peak_activations, "peak": tracker.peak}
            self._note(optimizer, states, found)

    def _note(self, optimizer: Optimizer, states: States, found: Mapping[str, int | None]) -> None:
        if not optimizer.rule.state:  # fp16 overflowed, or nothing is trained here
            return
        self.measured = {**found}
        for kind, tensors in states().items():
            self.measured[kind] = storage_bytes(tensors)
