"""Memory that the ranks of one host have mapped, for their collectives (exchange.py).

The first rank makes the memory with memfd_create, a file outside of any directory. The others open
it through that rank's /proc/PID/fd/N, and it closes the file once all have mapped it. So no file is
left behind, no matter which rank is killed when, and the size of /dev/shm (64 MiB in many
containers) does not limit it. Pages are allocated at once: touching a page that cannot be allocated
would be a SIGBUS in the middle of a step. The outcome is summed over the group, so that all ranks
use the memory or none does.

Layout, t ranks, K slots of S bytes: two lines of 128 bytes a rank, so that no two ranks write to
the same cache line or to a pair that is prefetched together; from the next page on t x K x S bytes
of data. By hand, t=2, K=4, S=1 MiB: 512 bytes of flags, data from byte 4096 on, 8 MiB and a page in
all.
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
    """The ranks of this group cannot share memory; raised on all of them."""


@dataclass(frozen=True)
class Segment:
    """The memory that rank `rank` of a group has mapped; `ranks` are the group's global ranks.

    flags: 64-bit; a rank writes those from `line(rank)` on, two lines of them, and no others.
    data: [t, K, S] bytes. processes: the group rank of each peer, by a handle on its process.
    ended: polls those handles, which become readable when the process has ended.
    """

    rank: int
    ranks: tuple[int, ...]
    flags: memoryview
    data: Tensor
    processes: dict[int, int]
    ended: select.poll

    def line(self, rank: int, second: bool = False) -> int:
        """Index in `flags` of the first, or second, line of a rank."""
        return (2 * rank + second) * LINE

    def lost(self) -> set[int]:
        """Group ranks whose process has ended: the kernel says so, before any timeout is over."""
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
    """Map memory that the ranks of a group share; every rank of the group calls this.

    rank: in the group; ranks: the group's global ranks; process_group: torch's group, over which
    they agree, None for the default one. slots, slot_bytes: K and S. reserve: allocates the bytes
    of a file, or raises OSError (posix_fallocate by default). Raises NoSegment on all ranks when
    one of them cannot map it.
    """
    assert slots < LINE and slot_bytes % 16 == 0, "a flag a slot; whole elements of any dtype"
    shape = (len(ranks), slots, slot_bytes)
    message = torch.zeros(len(ranks) + 2, dtype=torch.int64)  # process ids, file, its name
    message[rank] = os.getpid()
    file, why = -1, ""
    if rank == 0:
        try:
            file, message[-1] = _make(_start(shape) + _bytes(shape), reserve or _reserve)
            message[-2] = file
        except OSError as error:
            why = str(error)
    try:
        dist.all_reduce(message, group=process_group)
        segment, failed = _attempt(rank, tuple(ranks), message.tolist(), shape)
        good = torch.tensor(int(segment is not None))
        dist.all_reduce(good, group=process_group)
    finally:
        if file >= 0:
            os.close(file)
    if segment is None or int(good) < len(ranks):
        raise NoSegment(why or failed or "another rank of the group could not map it")
    return segment


def _start(shape: tuple[int, int, int]) -> int:
    """Byte at which data begin: that of the page after the flags."""
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
    """A flag written after the data must be seen after them. x86 keeps the order of stores and of
    loads (TSO); other machines need fences, which Python does not have."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise OSError(f"needs Linux on x86-64, this is {sys.platform} on {platform.machine()}")


def _attempt(
    rank: int, ranks: tuple[int, ...], message: list[int], shape: tuple[int, int, int]
) -> tuple[Segment | None, str]:
    *pids, file, number = message
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
    """Map the file at `path`. On another host or in another container the path may lead to
    anything, so its name is checked before it is opened."""
    _check_machine()
    target = str(Path(path).readlink())
    if target != f"/memfd:{name} (deleted)":
        raise OSError(f"{path} is {target}, not {name}: not the same host?")
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(file, size)
    finally:
        os.close(file)


def _watch(pids: list[int], rank: int) -> tuple[dict[int, int], select.poll]:
    """A handle on each peer's process, readable once it has ended, even if not yet reaped."""
    peers = [peer for peer in range(len(pids)) if peer != rank]
    processes = {os.pidfd_open(pids[peer]): peer for peer in peers}
    ended = select.poll()
    for handle in processes:
        ended.register(handle, select.POLLIN)
    return processes, ended
