"""Every operation of torch in a thread, with the memory that it reads and writes.

What an operation writes, its schema says (alias_info); what it returns and does not share is new
memory. Views and operations that only look at shapes touch none.

By hand, `x.add_(y)`: x is written, y is read; `x.view(-1)`: nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.late.order import HOST

if TYPE_CHECKING:
    from tests.late.world import LateWorld

OF_SHAPES = (
    "empty",
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "zeros_like",
    "ones_like",
    "full_like",
    "new_zeros",
    "new_ones",
    "new_full",
    "rand_like",
    "randn_like",
    "is_same_size",
    "device",
)
RESIZES = (torch.ops.inductor.resize_storage_bytes_.default,)  # which no schema calls a write
READS_NUMBER = torch.ops.aten._local_scalar_dense.default
HOST_READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)


class TensorWatch(TorchDispatchMode):
    """Tells a world of every operation while it is entered. references: to the storages that were
    seen, by number."""

    def __init__(self, world: LateWorld) -> None:
        super().__init__()
        self.world = world
        self.references: dict[int, weakref.ref[Any]] = {}
        self.is_paused = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Read by torch when the class is made (mpctl/train/runtime/memory.py says why)."""
        return False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Operations inside are the world's own."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and (parts := _decomposed(func)):
            with self:
                return parts(*args, **kwargs)
        self.world.look_back()
        if not func.is_view and func._overloadpacket.__name__ not in OF_SHAPES:
            runs_beside = _runs_beside(func, args, kwargs)
            for tensor, is_write in uses_of(func, args, kwargs):
                if not runs_beside and self.world.is_host_s(tensor):
                    self.world.host_uses(tensor, str(func), writes=is_write)
                    continue
                self.world.use(tensor, str(func), writes=is_write)
                if func is READS_NUMBER:
                    self.world.host_waits()
        result = func(*args, **kwargs)
        if func in RESIZES:
            self.world.order.resize(self.see(args[0]), args[0].untyped_storage().nbytes())
        for leaf in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.see(leaf, str(func))
        return result

    def see(self, tensor: Tensor, words: str = "an earlier operation") -> int:
        """The number of a tensor's memory; new memory is taken on the current stream."""
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        if key not in self.references:
            self.references[key] = weakref.ref(storage, lambda _: self._forget(key))
            self.world.order.take(self.world.current, key, words, storage.nbytes())
        return key

    def _forget(self, key: int) -> None:
        del self.references[key]
        self.world.forget(key)


class HostCalls(TorchFunctionMode):
    """What the operations do not show: lists and arrays made of tensors, for which the host waits;
    memory of the host's own; copies of it to a device, which on a CPU would be the same tensor."""

    def __init__(self, world: LateWorld) -> None:
        super().__init__()
        self.world = world

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in HOST_READS:
            if self.world.is_host_s(args[0]):
                self.world.host_uses(args[0], func.__name__, writes=False)
            else:
                self.world.use(args[0], func.__name__, writes=False)
                self.world.host_waits()
        if "pin_memory" in kwargs:
            with self.world.on(HOST):
                return func(*args, **kwargs)
        if func is Tensor.to and kwargs.get("non_blocking") and self.world.is_host_s(args[0]):
            return torch.empty_like(args[0]).copy_(args[0], non_blocking=True)
        return func(*args, **kwargs)


def _runs_beside(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operation is a copy for which the host does not wait."""
    is_copy = func is torch.ops.aten.copy_.default
    return is_copy and bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))


def _decomposed(func: Any) -> Any:
    """In inference mode an operation made of others comes whole, and `flatten`, which may copy,
    looks like a view: what calls its parts, None where it has none."""
    key = "CompositeImplicitAutograd"
    return func.decompose if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) else None


def uses_of(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, bool]]:
    """The tensors that an operation is given, and whether it writes them."""
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        info = argument.alias_info
        for tensor in (value,) if isinstance(value, Tensor) else tree_leaves(value):
            if isinstance(tensor, Tensor):
                yield tensor, func in RESIZES or (info is not None and info.is_write)


def extent_of(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage between which a tensor's elements lie: first, end."""
    first = tensor.storage_offset()
    if not tensor.numel():
        return first * tensor.element_size(), first * tensor.element_size()
    spans = zip(tensor.shape, tensor.stride(), strict=True)
    last = first + sum((n - 1) * stride for n, stride in spans)
    return first * tensor.element_size(), (last + 1) * tensor.element_size()
