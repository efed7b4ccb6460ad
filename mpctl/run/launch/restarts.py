"""Whether a run that failed is started again, and on which batches.

`launch.max_restarts` counts failures since the newest checkpoint: a run that has saved since its
last failure has all its restarts again, so that a long run on imperfect hosts continues, and one
without progress ends. (torchrun's --max-restarts counts over the whole job; NVIDIA's resiliency
extension ends jobs that restart without progress, as here.) A failure that would repeat is retried
only once: the same error at the same step twice in a row ends the run, whatever restarts are left.
Errors are the same when they differ in numbers alone (addresses, process ids, times). A kill, a
stopped process, a hang or a lost host says nothing about the next attempt and is not counted as a
repetition. A port that another process took is no failure at all (supervise.py).

A rollback (training.on_nonfinite, training.on_spike) is not a restart: it has a separate limit,
`training.max_rollbacks`, and leaves out the batches up to the one at fault.

Of a program (`launch.program`) no checkpoint is known: its progress is the highest step that it has
reported, and one that reports none makes none.

By hand, max_restarts 2, failures of hosts at steps 5, 7, 12, checkpoint 10 saved before the last:
restarts 1 and 2 used, then 1 again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from mpctl.core.units import plural
from mpctl.records.rundir.summary import Failure
from mpctl.run.launch.launch_plan import LaunchPlan
from mpctl.spec.base import rising_ranges
from mpctl.spec.job import JobSpec

NUMBERS = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?(e[+-]?\d+)?", re.IGNORECASE)


@dataclass(frozen=True)
class Decision:
    """Decision after a failure. goes_on: the run is started again; words: why, or why not, to be added to the failure's
    error; skip_batches: the new value of the setting, None for no change."""

    goes_on: bool
    words: str = ""
    skip_batches: str | None = None


@dataclass
class RestartPolicy:
    """The restarts of one launch. used: since the newest checkpoint was saved."""

    job: JobSpec
    used: int = 0
    rollbacks: int = 0
    checkpoint: int = 0
    last: tuple[int, str] | None = field(default=None)

    def decide(self, failure: Failure, *, step: int, checkpoint: int) -> Decision:
        """Decide on a restart after a failure. step: the last that was trained; checkpoint: the newest, 0 for none. For
        a program both are the last step that it has reported."""
        if checkpoint > self.checkpoint:
            self.checkpoint, self.used = checkpoint, 0
        if failure.rollback is not None:
            return self._roll_back(failure.rollback, checkpoint)
        most = self.job.launch.max_restarts
        if self.used >= most:
            return Decision(False)
        sign = (step, NUMBERS.sub("#", failure.error)) if failure.would_repeat else None
        if sign is not None and sign == self.last:
            return Decision(
                False,
                f"the same error came twice in a row after step {step}, so it would come again: "
                f"not started again, though {plural(most - self.used, 'restart')} of "
                f"launch.max_restarts {'is' if most - self.used == 1 else 'are'} left",
            )
        self.last = sign
        self.used += 1
        if self.job.launch.program:
            return Decision(True, "starting the program again")
        return Decision(True, f"starting again from step {checkpoint}")

    def _roll_back(self, step: int, checkpoint: int) -> Decision:
        training = self.job.training
        if self.rollbacks >= training.max_rollbacks:
            times = plural(self.rollbacks, "rollback")
            return Decision(False, f"not started again after {times} (training.max_rollbacks)")
        self.rollbacks += 1
        last = training.batch_of_step(step)
        before = training.batch_of_step(checkpoint) if checkpoint else 0
        first = max(before + 1, last - training.rollback_batches + 1)
        skipped = _added(training.skip_batches, first, last)
        words = (
            f"rolling back to step {checkpoint}, without {f'batches {first} to' if first < last else 'batch'} {last}"
        )
        self.job = _skipping(self.job, skipped)
        return Decision(True, words, skipped)


def skip_batches(plan: LaunchPlan, batches: str | None) -> LaunchPlan:
    """The launch with another training.skip_batches; the same one for None."""
    if batches is None:
        return plan
    job = _skipping(plan.job, batches)
    files = {**plan.files, "job.json": job.model_dump_json(indent=1) + "\n"}
    return replace(plan, job=job, files=files)


def _skipping(job: JobSpec, batches: str) -> JobSpec:
    training = job.training.model_copy(update={"skip_batches": batches})
    return job.model_copy(update={"training": training})


def _added(text: str, first: int, last: int) -> str:
    """Ranges of batches with one more, in rising order, those that touch or overlap as one.

    By hand: 3-4, 9 with 5 to 7 is 3-7, 9.
    """
    merged: list[tuple[int, int]] = []
    for begin, end in sorted([*rising_ranges(text), (first, last)]):
        if merged and begin <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in merged)
