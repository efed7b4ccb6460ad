"""Find where a step makes the host wait for its device, without a device.

The host queues work for a GPU in advance. If it needs a number from the device, it waits until all
queued work is done, and the device is then idle until the host has queued more: at tp 8 a wait in
each micro batch costs 3 to 8 % of a step. So a step waits once, where it reports.

`HostSyncCheck` is entered around operations on tensors of `device`, of a rehearsal torch's `meta`,
and notes which of them would make the host wait on CUDA:

- a number read out of a tensor (`item`, `tolist`, `if tensor`);
- an operation whose result's size depends on values: `nonzero`, `masked_select`, an index of
  booleans, `unique`, `repeat_interleave` by a tensor;
- a tensor made of Python's numbers on the device, and a copy from the host that is blocking or out
  of memory that is not pinned: the host waits until it is done;
- a blocking copy to the host.

Pinned memory, which CUDA has and `meta` has not, is simulated: `pin_memory=True` makes ordinary
memory that is remembered as pinned.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpctl.train.runtime import memory
from mpctl.train.runtime.memory import device_of

aten = torch.ops.aten
_READS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
_SIZED_BY_VALUES = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.bincount.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
    aten.repeat_interleave.Tensor,
}
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
_MAY_WAIT = _READS | _SIZED_BY_VALUES | _INDEXED
_COPY, _TO_COPY = aten.copy_.default, aten._to_copy.default
_IS_PINNED, _PIN = aten.is_pinned.default, aten._pin_memory.default
_FROM_NUMBERS: set[Any] = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}
_PACKAGE = Path(__file__).parents[2]
_TORCH = str(Path(torch.__file__).parent)
_UNSEEN = (_TORCH, str(Path(__file__).parent), str(memory.__file__), "<")


@dataclass(frozen=True)
class HostSync:
    """One wait of the host. what: the operation and why it waits; source: `train/layers/norm.py:38`;
    module: the name of the module whose forward it is in, empty outside of modules and in
    backward."""

    what: str
    source: str
    module: str = ""

    def __str__(self) -> str:
        return f"{self.source}: {self.what}" + (f" (in {self.module})" if self.module else "")


class HostSyncCheck(TorchDispatchMode):
    """Notes what would make the host wait for `device`, while it is entered and `watching`.

    found: each place once, in the order in which they were met. reads: how often the host waited
    where it may (`read`).
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.found, self.reads = device, dict[HostSync, None](), 0
        self.modules: Mapping[nn.Module, str] = {}
        self._is_on, self._pinned = False, dict[int, weakref.ref[Any]]()

    @contextmanager
    def watching(self, model: nn.Module | None = None) -> Iterator[None]:
        """Note the waits inside; none on a CPU, which is its own host. model: gives the names of
        modules."""
        self.modules = {} if model is None else {m: name for name, m in model.named_modules()}
        with ExitStack() as stack:
            stack.enter_context(_Numbers(self))
            stack.callback(setattr, self, "_is_on", self._is_on)
            self._is_on = self.device.type != "cpu"
            yield

    def read(self, figures: Tensor) -> list[float]:
        """The numbers of a tensor [n], for which the host may wait: a step's report."""
        was_on, self._is_on = self._is_on, False
        try:
            return [float(number) for number in figures.to("cpu")]
        finally:
            self._is_on = was_on
            self.reads += was_on

    def places(self) -> list[str]:
        """List the avoidable waits of the host, a line each; one reading (`read`) is due."""
        often = [f"the figures are read {self.reads} times"] * (self.reads > 1)
        return [str(sync) for sync in self.found] + often

    def note(self, what: str) -> None:
        """Note that the operation under way waits, unless the host may wait now."""
        if self._is_on:
            source, module = _place(sys._getframe(2), self.modules)
            self.found[HostSync(what, source, module)] = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is _IS_PINNED:
            return self._is_pinned(args[0])
        if func is _PIN:
            return self._pin(args[0].clone())
        pins = bool(kwargs.get("pin_memory"))
        if pins:
            kwargs = {**kwargs, "pin_memory": False}
        if self._is_on and (what := self._waits(func, args, kwargs)):
            self.note(f"{func}: {what}")
        result = func(*args, **kwargs)
        return self._pin(result) if pins else result

    def _waits(self, func: Any, args: Any, kwargs: dict[str, Any]) -> str:
        """Return the reason why an operation would wait; empty if it would not."""
        if func in (_COPY, _TO_COPY):
            return self._copy_waits(func, args, kwargs)
        if func not in _MAY_WAIT:
            return ""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(self._is_there(tensor) for tensor in tensors):
            return ""
        if func in _READS:
            return "reads a number from the device"
        if func in _SIZED_BY_VALUES:
            return "the size of its result depends on values"
        indices = [index for index in args[1] if index is not None]
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            return "an index of booleans, whose size depends on values"
        is_on_host = any(not self._is_there(index) for index in indices)
        return "an index that lies on the host" if is_on_host else ""

    def _copy_waits(self, func: Any, args: Any, kwargs: dict[str, Any]) -> str:
        if func is _COPY:
            target, source, *rest = args
            to_device, is_blocking = self._is_there(target), not (rest and rest[0])
        else:
            (source,), device = args, kwargs.get("device")
            goal = device_of(source) if device is None else torch.device(device)
            to_device, is_blocking = goal.type == self.device.type, not kwargs.get("non_blocking")
        if to_device == self._is_there(source):
            return ""
        if is_blocking:
            return "a blocking copy " + ("from the host" if to_device else "to the host")
        if to_device and not self._is_pinned(source):
            return "a copy out of memory that is not pinned"
        return ""

    def _is_there(self, tensor: Tensor) -> bool:
        return device_of(tensor).type == self.device.type

    def _pin(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._pinned[key] = weakref.ref(storage, lambda _: self._pinned.pop(key, None))
        return tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned


class _Numbers(TorchFunctionMode):
    """Notes tensors that are made of Python's numbers on the device: torch makes those of `meta`
    without an operation that a dispatch mode would see."""

    def __init__(self, check: HostSyncCheck) -> None:
        super().__init__()
        self.check = check

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _FROM_NUMBERS and not isinstance(args[-1] if args else None, Tensor):
            is_there = device_of(result).type == self.check.device.type
            if is_there:
                self.check.note(f"{func.__name__}: numbers of the host, copied to the device")
        return result


def _place(frame: FrameType | None, modules: Mapping[nn.Module, str]) -> tuple[str, str]:
    """The innermost line that is neither torch's nor the rehearsal's, and the innermost module
    whose method is under way."""
    source = ""
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_UNSEEN):
            source = source or f"{_short(path)}:{frame.f_lineno}"
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and owner in modules:
                return source, modules[owner] or type(owner).__name__
        frame = frame.f_back
    return source or "torch", ""


def _short(path: str) -> str:
    """A path relative to this package, or its last two parts."""
    file = Path(path)
    if file.is_relative_to(_PACKAGE):
        return str(file.relative_to(_PACKAGE))
    return "/".join(file.parts[-2:])
