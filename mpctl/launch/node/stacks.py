"""Asks the ranks of this host for their Python stacks (rundir/stacks.py)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import psutil

from mpctl.launch.attempt import STOPPED
from mpctl.launch.node.processes import UNREADABLE
from mpctl.rundir.breadcrumb import HostBreadcrumbs
from mpctl.rundir.directory import RunDir
from mpctl.rundir.stacks import STACK_SIGNAL, StackReader, read_stacks

UNANSWERING = (*STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def rank_stacks(
    run: RunDir, ranks: Mapping[int, psutil.Process], breadcrumbs: HostBreadcrumbs
) -> dict[int, str]:
    """Where the main thread of each rank is, by rank; without those that do not answer."""
    readers = {}
    for rank, process in ranks.items():
        with suppress(*UNREADABLE):
            # A rank that has written its breadcrumb takes the signal; before, it would end it.
            if breadcrumbs.state(rank).start and process.status() not in UNANSWERING:
                readers[rank] = StackReader(run.log(rank))
                process.send_signal(STACK_SIGNAL)
    return read_stacks(readers)
