"""What the tests of exchange through shared memory run on ranks."""

from __future__ import annotations

import errno
from typing import Any

from mpctl.train.transport.exchange import Exchange
from mpctl.train.transport.group import Group
from mpctl.train.transport.shared import open_segment
from mpctl.train.transport.timing import Collective

SLOT = 4096  # so that 2,000 numbers are several chunks, and 9,000 more than all slots hold


def sharing(rank: int, size: int, log: list[Collective] | None = None, timeout: float = 20, **layout: Any) -> Group:
    made = open_segment(rank, range(size), None, **({"slot_bytes": SLOT} | layout))
    record = None if log is None else log.append
    return Group(rank, size, record=record, shared=Exchange(made, timeout=timeout))


def all_full(file: int, size: int) -> None:
    raise OSError(errno.ENOSPC, "no space left")
