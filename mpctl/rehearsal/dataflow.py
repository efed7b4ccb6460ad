"""The least that a part of a step must move: what comes in once, what goes out once.

A part (a module in a pass) is taken as one kernel would do it. It must read what others wrote and
it reads, and write what others read later, or what is still there when the step ends; what it makes
and uses up itself costs nothing. A copy of values as they are (`clone`) is the tensor that it
copies: nobody needed it. Regions of a storage are told apart, so that q, k and v of one product are
the product, read once.

By hand, y = exp(exp(x)) of 4 float32 in one part, y used later: 16 bytes read, 16 written; 64
moved by two kernels.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mpctl.rehearsal.kernel_counts import Touched, region

Regions = dict[Any, int]  # bytes of each region of a storage


@dataclass(eq=False)
class Part:
    """What one part of a step has read of others' and written, by storage. needed: storages that
    it wrote and others read later."""

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
        """A part has made a tensor without values."""
        if tensor.untyped_storage()._cdata not in self.living:
            self._storage(tensor).maker = part

    def finish(self) -> None:
        """The step is over: what lives was needed."""
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
    """Whether a part reads its own: of a storage that it made, or this region, or a whole."""
    regions = part.written.get(storage, {})
    return part in storage.writers and (
        storage.maker is part or region(tensor) in regions or sum(regions.values()) >= storage.size
    )


def _union(storage: Storage, regions: Regions) -> int:
    """Bytes of regions of a storage, which may overlap: no more than it has."""
    return min(storage.size, sum(regions.values()))
