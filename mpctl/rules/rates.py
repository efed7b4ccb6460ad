"""Rules about the learning rate's schedule (runtime/lr_schedule.py)."""

from __future__ import annotations

from collections.abc import Iterator

from mpctl.rules.check import Check
from mpctl.spec.job import JobSpec


def rate_rules(job: JobSpec) -> Iterator[Check]:
    """The schedule goes down from the peak rate, and warm-up and decay fit into the steps."""
    t = job.training
    if t.lr_schedule != "constant" and t.lowest_rate > t.learning_rate:
        yield Check("min-rate", "error", "training.min_learning_rate",
                    f"{t.lowest_rate:g} is above learning_rate {t.learning_rate:g}, from "
                    f"which {t.lr_schedule} goes down",
                    f"use at most {t.learning_rate:g}, or lr_schedule constant")  # fmt: skip
    if t.lr_decay_steps is not None:
        yield from _decay_steps(job, t.lr_decay_steps)
    yield from _wsd(job)


def _decay_steps(job: JobSpec, steps: int) -> Iterator[Check]:
    t, where = job.training, "training.lr_decay_steps"
    if t.lr_schedule == "constant":
        yield Check("lr-decay-steps", "error", where, f"{steps}, but lr_schedule constant has no "
                    "decay", "leave it out, or use lr_schedule linear, cosine or wsd")  # fmt: skip
    elif t.warmup_steps > steps:
        yield Check("lr-decay-steps", "error", where,
                    f"{steps} steps end before the warm-up of {t.warmup_steps}",
                    f"use at least {t.warmup_steps}, or fewer warmup_steps")  # fmt: skip


def _wsd(job: JobSpec) -> Iterator[Check]:
    t, rule, where = job.training, "lr-wsd-decay-steps", "training.lr_wsd_decay_steps"
    end = t.lr_decay_steps or t.steps
    room, given = max(1, end - t.warmup_steps), t.lr_wsd_decay_steps
    if t.lr_schedule != "wsd":
        if given is not None:
            yield Check(rule, "error", where, f"{given}, but lr_schedule is {t.lr_schedule}",
                        "leave it out, or use lr_schedule wsd")  # fmt: skip
    elif given is None:
        yield Check(rule, "error", where, "lr_schedule wsd needs the length of its decay",
                    f"use {max(1, room // 10)}, a tenth of what follows the warm-up")  # fmt: skip
    elif given > room:
        yield Check(rule, "error", where, f"{given} steps of decay are more than the {room} that "
                    f"follow the warm-up, until step {end}", f"use at most {room}")  # fmt: skip
