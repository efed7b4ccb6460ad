"""The memory of a rank, storage by storage, and that of one real step to stand beside its plan.

Every operation passes through a TorchDispatchMode (in a rehearsal above the fake tensors). A
storage is added when a tensor of it is first seen, resized where it grows or shrinks, and removed
when it is freed, by a weak reference: views share one, and what autograd saves stays. Only tensors
on the device count, so a copy in host memory costs nothing. The bytes are exact: an allocator's
rounding (512 on CUDA), its fragmentation and the libraries' workspaces are not in them.

Kinds: parameters, gradients and optimizer are named by the owner. Of the others, `activations` are
what an earlier forward has left alive, `temporaries` what the action under way has made.

A run is watched for one step (`MemoryWatch`), on CUDA by the allocator: the first one that begins
with the optimizer's moments, the second of a fresh run: every later one takes the same. Watching
changes no value; it costs the watched step some microseconds an operation. Of a run of a single
step that one is watched, and its moments come only at its end.
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

from mpctl.pipeline.schedule.program import Step
from mpctl.runtime.activity import Activity
from mpctl.runtime.environment import RuntimeEnvironment
from mpctl.runtime.optimizer import Optimizer
from mpctl.spec.job import JobSpec

Kind = Literal["parameters", "gradients", "optimizer", "activations", "temporaries"]
KINDS: tuple[Kind, ...] = ("parameters", "gradients", "optimizer", "activations", "temporaries")
States = Callable[[], Mapping[Kind, list[Tensor]]]
SAVING_KINDS = ("forward", "backward_input")  # actions that leave tensors for a later one
_DEVICE, _ITEM = torch.ops.prim.device.default, torch.ops.aten._local_scalar_dense.default
_RESIZE = torch.ops.inductor.resize_storage_bytes_.default


@dataclass(slots=True)
class _Entry:
    """A storage in memory; reference: removes the entry when the storage is freed."""

    size: int
    kind: Kind
    reference: weakref.ref[Any] | None = None


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of storages on a device while it is entered.

    activity: says which action is under way. bytes_by_kind, total: bytes now; peak: the most since
    `restart`; at_peak: by kind then; peak_activations: the most activations at once. own_only:
    memory that is mapped, or another library's, is left out: what ranks of a host exchange through,
    numpy's arrays. A number read out of a tensor that has no values is 1.
    """

    def __init__(
        self, device: torch.device, *, activity: Activity | None = None, own_only: bool = False
    ) -> None:
        super().__init__()
        self.device, self.own_only, self.activity = device, own_only, activity or Activity()
        self.entries: dict[int, _Entry] = {}
        self.bytes_by_kind: Counter[Kind] = Counter()
        self.total = 0
        self.action: Step | None = None
        self.is_saving = False
        self.created: list[int] = []  # storages that the action under way has made
        self.restart()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Read by torch when the class is made. By default it keeps its compiler out of a mode,
        which imports torch._dynamo at the first operation: a second of processor time for each
        rank. No compiled layer runs below this mode."""
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
        """Where another action has begun: what the last one made and left alive is activations."""
        action = self.activity.current
        if action == self.action:
            return
        if self.is_saving:
            for key in self.created:
                entry = self.entries.get(key)
                if entry is not None and entry.kind == "temporaries":
                    self._move(entry, "activations")
            self.peak_activations = max(self.peak_activations, self.bytes_by_kind["activations"])
        self.action, self.created = action, []
        self.is_saving = action is not None and action.action.kind in SAVING_KINDS

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:  # often
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
            self.close_action()
            entry = self.entries[key] = _Entry(0, "temporaries")
            entry.reference = weakref.ref(storage, lambda _: self._remove(key))
            self.created.append(key)
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

    def _move(self, entry: _Entry, kind: Kind) -> None:
        self.bytes_by_kind[entry.kind] -= entry.size
        self.bytes_by_kind[kind] += entry.size
        entry.kind = kind


def device_of(tensor: Tensor) -> torch.device:
    """A fake tensor's `device` is an operation of its own, which every second call would be."""
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
    operation by operation, which compiled layers do not show. measured: bytes by what the plan
    calls them, once that step is over; None for activations where no MemoryTracker counted."""

    def __init__(self, job: JobSpec, environment: RuntimeEnvironment) -> None:
        self.device, self.activity = environment.device, environment.activity
        is_countable = not (job.launch.compile and self.device.type == "cpu")
        self.is_on = job.launch.track_memory and is_countable
        self.keep_peak = environment.peak_memory
        self.measured: dict[str, int | None] = {}

    @contextmanager
    def step(self, optimizer: Optimizer, states: States, *, is_last: bool) -> Iterator[None]:
        """To be entered around a step's gradients and update. states: what lasts from step to step,
        by kind; is_last: whether it is the last step of the run."""
        if not self.is_on or self.measured or not (optimizer.adam.state or is_last):
            yield
        elif self.device.type == "cuda":
            self.keep_peak()  # of the steps before
            torch.cuda.reset_peak_memory_stats(self.device)
            yield
            peak = torch.cuda.max_memory_allocated(self.device)
            reserved = torch.cuda.max_memory_reserved(self.device)
            self._note(optimizer, states, {"activations": None, "peak": peak, "reserved": reserved})
        else:
            tracker = MemoryTracker(self.device, activity=self.activity, own_only=True)
            for kind, tensors in states().items():
                tracker.add(kind, tensors)
            tracker.restart()
            with tracker:
                yield
            found = {"activations": tracker.peak_activations, "peak": tracker.peak}
            self._note(optimizer, states, found)

    def _note(self, optimizer: Optimizer, states: States, found: Mapping[str, int | None]) -> None:
        if not optimizer.adam.state:  # fp16 overflowed, or nothing is trained here
            return
        self.measured = {**found}
        for kind, tensors in states().items():
            self.measured[kind] = storage_bytes(tensors)
