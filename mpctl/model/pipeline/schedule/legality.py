"""Conflicts of a schedule with the numbers of stages, chunks and micro batches.

Planning checks this as a rule (plan/rules/layout.py), the search before it estimates a layout, and
orders.py before it makes a schedule:

    chunks         several chunks a stage need several stages
    micro batches  with several chunks they run in groups of p, the number of stages: p divides m;
                   in a V any number does, for dualpipev from 2p on
    schedules      run one chunk a stage, several, both or two as a V, as their row says
                   (spec/schedules.py)

>>> [conflict.rule for conflict in schedule_conflicts("1f1b", stages=4, microbatches=6, chunks=2)]
['microbatches-fill-pipeline']
>>> is_schedule("zero-bubble", stages=4, microbatches=6, chunks=1)
True
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mpctl.core.errors import Offer
from mpctl.core.units import plural
from mpctl.spec.parallel import ScheduleName
from mpctl.spec.schedules import SCHEDULES


class ScheduleConflict(NamedTuple):
    """A reason why a schedule is not possible, as `mpctl plan` reports it.

    rule: its stable id; setting: the job key that it concerns; offers: values of settings that may
    resolve it; hint: other ways out, in words.
    """

    rule: str
    setting: str
    message: str
    offers: tuple[Offer, ...] = ()
    hint: str = ""


def is_schedule(name: ScheduleName, *, stages: int, microbatches: int, chunks: int) -> bool:
    """Whether the schedule is possible with these numbers."""
    conflicts = schedule_conflicts(name, stages=stages, microbatches=microbatches, chunks=chunks)
    return next(conflicts, None) is None


def schedule_conflicts(
    name: ScheduleName, *, stages: int, microbatches: int, chunks: int
) -> Iterator[ScheduleConflict]:
    """Every reason why the schedule is not possible with these numbers; none if it is."""
    if chunks > 1 and stages == 1:
        yield ScheduleConflict(
            "vpp-needs-pp",
            "parallel.vpp",
            f"vpp is {chunks}, {chunks} chunks a stage, but pp is 1: there is no pipeline",
            (Offer("parallel.vpp", (1,), "vpp"), Offer("parallel.pp", tuple(range(2, 17)), "pp", near=2)),
        )
    elif chunks > 1 and microbatches % stages and not SCHEDULES[name].is_v:
        yield ScheduleConflict(
            "microbatches-fill-pipeline",
            "training.global_batch_size",
            f"{plural(microbatches, 'micro batch', 'micro batches')} cannot be split evenly into "
            f"{stages} interleaved stages",
            hint=f"use a global batch of a multiple of {stages} micro batches",
        )
    if not SCHEDULES[name].runs(chunks):
        message = f"{name} cannot run with {plural(chunks, 'chunk')} a stage"
        if SCHEDULES[name].is_v:
            offer = Offer("parallel.vpp", (2,), "vpp")
            yield ScheduleConflict("schedule-vpp", "parallel.schedule", message, (offer,) * (stages > 1), "or use 1f1b")
        else:
            hint = "use interleaved or 1f1b with vpp 2 or more, any other schedule with vpp 1"
            yield ScheduleConflict("schedule-vpp", "parallel.schedule", message, hint=hint)
    least = SCHEDULES[name].microbatches_a_stage * stages
    if stages > 1 and microbatches < least:
        yield ScheduleConflict(
            "microbatches-fill-pipeline",
            "training.global_batch_size",
            f"{plural(microbatches, 'micro batch', 'micro batches')} on {stages} stages: {name} needs {least} at least",
            (Offer("parallel.schedule", ("zbv",), "schedule"),),
            hint=f"or use a global batch of {least} micro batches or more",
        )
