"""Memory that all ranks of a group on one host have mapped: flags for each rank, slots for data.

The first rank makes it with memfd_create, a file without a name, and the others open it where that
rank holds it, /proc/PID/fd/N; it closes it once all have. So whoever is killed, and when, no file
is left behind, and the size of /dev/shm (64 MiB in many containers) is no bound. Pages are taken at
once: touching one that cannot be had would be a SIGBUS in the middle of a step. Whether it worked
is summed over the group, so that all ranks use the memory or none does.

Layout, t ranks, K slots of S bytes: two lines of 128 bytes a rank, so that no two ranks write to
one cache line nor to a pair that is prefetched together; from the next page on t x K x S bytes.
By hand, t=2, K=4, S=1 MiB: 512 bytes of flags, data from byte 4096 on, 8 MiB and a page in all.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import select
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

SLOTS, SLOT_BYTES = 4, 2**20
LINE = 16  # flags of 8 bytes in a line
Reserve = Callable[[int, int], None]


class NoSegment(OSError):
    """The ranks of this group share no memory; raised on all of them alike."""


@dataclass(frozen=True)
class Segment:
    """What the place `rank` among `ranks` (numbers in the world) has mapped.

    flags: 64-bit; a rank writes those from `line(rank)` on, two lines of them, and no others.
    data: [t, K, S] bytes. ended: readable for each of `processes` that has ended.
    """

    rank: int
    ranks: tuple[int, ...]
    flags: memoryview
    data: Tensor
    processes: dict[int, int]
    ended: select.poll

    def line(self, rank: int, second: bool = False) -> int:
        return (2 * rank + second) * LINE

    def lost(self) -> set[int]:
        """Places whose process has ended: the kernel tells, so that nobody waits out a timeout."""
        return {self.processes[handle] for handle, _ in self.ended.poll(0)}


def open_segment(
    rank: int,
    ranks: Sequence[int],
    process_group: dist.ProcessGroup | None,
    *,
    slots: int = SLOTS,
    slot_bytes: int = SLOT_BYTES,
    reserve: Reserve | None = None,
) -> Segment:
    """Called by every rank of the group; raises NoSegment on all of them when one of them cannot.

    reserve: takes memory for a file of so many bytes, or raises OSError (posix_fallocate).
    """
    assert slots < LINE and slot_bytes % 16 == 0, "a flag a slot; whole elements of any dtype"
    shape = (len(ranks), slots, slot_bytes)
    told = torch.zeros(len(ranks) + 2, dtype=torch.int64)  # process ids, file, its name's number
    told[rank] = os.getpid()
    file, why = -1, ""
    if rank == 0:
        try:
            file, told[-1] = _make(_start(shape) + _bytes(shape), reserve or _reserve)
            told[-2] = file
        except OSError as error:
            why = str(error)
    try:
        dist.all_reduce(told, group=process_group)
        segment, failed = _attempt(rank, tuple(ranks), told.tolist(), shape)
        good = torch.tensor(int(segment is not None))
        dist.all_reduce(good, group=process_group)
    finally:
        if file >= 0:
            os.close(file)
    if segment is None or int(good) < len(ranks):
        raise NoSegment(why or failed or "another rank of the group could not map it")
    return segment


def _start(shape: tuple[int, int, int]) -> int:
    """Where data begin: the page after the flags."""
    return -(-shape[0] * 2 * LINE * 8 // mmap.PAGESIZE) * mmap.PAGESIZE


def _bytes(shape: tuple[int, int, int]) -> int:
    return shape[0] * shape[1] * shape[2]


def _name(number: int) -> str:
    return f"mpctl-{number:016x}"


def _make(size: int, reserve: Reserve) -> tuple[int, int]:
    """A file of `size` bytes in memory, and the random number in its name."""
    _check_machine()
    number = secrets.randbits(62) + 1
    file = os.memfd_create(_name(number))
    try:
        os.fchmod(file, 0o600)
        reserve(file, size)
    except OSError:
        os.close(file)
        raise
    return file, number


def _reserve(file: int, size: int) -> None:
    os.posix_fallocate(file, 0, size)


def _check_machine() -> None:
    """A flag written after the data must be seen after them: x86 keeps the order of stores and of
    loads (TSO); elsewhere that takes fences, which Python does not have."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise OSError(f"needs Linux on x86-64, this is {sys.platform} on {platform.machine()}")


def _attempt(
    rank: int, ranks: tuple[int, ...], told: list[int], shape: tuple[int, int, int]
) -> tuple[Segment | None, str]:
    *pids, file, number = told
    try:
        if not number:
            return None, "the first rank of the group could not make it"
        memory = _map(f"/proc/{pids[0]}/fd/{file}", _name(number), _start(shape) + _bytes(shape))
        processes, ended = _watch(pids, rank)
    except OSError as error:
        return None, str(error)
    flags = memoryview(memory)[: _start(shape)].cast("q")
    data = torch.frombuffer(memory, dtype=torch.uint8, offset=_start(shape)).view(shape)
    return Segment(rank, ranks, flags, data, processes, ended), ""


def _map(path: str, name: str, size: int) -> mmap.mmap:
    """On another host or in another container the path may lead to anything: look, then open."""
    _check_machine()
    found = str(Path(path).readlink())
    if found != f"/memfd:{name} (deleted)":
        raise OSError(f"{path} is {found}, not {name}: not the same host?")
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(file, size)
    finally:
        os.close(file)


def _watch(pids: list[int], rank: int) -> tuple[dict[int, int], select.poll]:
    """A handle on each peer's process, readable once it has ended, even if not yet reaped."""
    peers = [place for place in range(len(pids)) if place != rank]
    processes = {os.pidfd_open(pids[place]): place for place in peers}
    ended = select.poll()
    for handle in processes:
        ended.register(handle, select.POLLIN)
    return processes, ended
