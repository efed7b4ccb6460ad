"""The steps that a program reports, as records of the run in RUN/metrics.jsonl.

A report is a line in the heartbeat file of a rank that records (records/rundir/heartbeat.py). The launcher
writes the records, so that lines that are no reports never get there. A program goes on where its
own checkpoint is: its first record of an attempt removes those from that step on.

The time of a step is the time between two reports over the steps between them. That of an attempt's
first report is not known, and taken from the second; it waits for that, or for the end of the
attempt. Tokens are the program's, 0 where it does not say.

Where the ranks report nothing and print the lines of a launcher that mpctl knows
(interop/log_launchers.py), steps are read from their logs. Megatron-LM prints on the last rank,
others on the first. Both are read with a bounded amount of work (foreign_lines.py): a program that
prints more than that is behind in its records, and once it has ended it is caught up with for
FINISH_SECONDS, then only the end of what is left is read.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from mpctl.core.durable import write_whole
from mpctl.core.units import bytes_text
from mpctl.interop.log_formats import LogStep, bar_step, read_step, read_trainer
from mpctl.interop.log_launchers import STEP_LINES
from mpctl.interop.log_lines import plain
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.heartbeat import StepReport, parse_report
from mpctl.records.rundir.program import recording_ranks
from mpctl.records.rundir.rank_files import StepRecord
from mpctl.run.launch.follow import OnRecord
from mpctl.run.launch.foreign_lines import ForeignLines, read_in_turn
from mpctl.spec.job import JobSpec

LOSS = re.compile(
    r"(?:\blm[ _])?\bloss[ :=]{1,4}(-?\d{1,9}(?:\.\d{1,12})?(?:[eE][-+]?\d{1,3})?)(?![\w.])"
    r"|\blm_loss[ :=]{1,4}(-?\d{1,9}(?:\.\d{1,12})?(?:[eE][-+]?\d{1,3})?)(?![\w.])"
)
FORMS = [form for _, _, form in STEP_LINES if "number" in form.figures]
MARKS = [b"'loss': ", *(form.mark.encode() for form in FORMS)]
BAR_LINES = 8
"""Lines within which a bar follows the figures of its step."""
LATE_SECONDS = 60.0
"""Largest lead of a report over the launcher's clock."""
POLL_BYTES, POLL_SECONDS, POLL_REPORTS = 1 << 21, 0.01, 200
"""Limits of one poll, for the heartbeat files and again for the logs."""
FINISH_SECONDS, END_BYTES = 5.0, 1 << 20
"""Time limit for reading on after the end of the ranks, and the bytes then read from the end of a file."""


@dataclass
class PrintedSteps:
    """The steps in the log of one rank. world_size: of the job; waiting: the figures of a step of
    transformers' Trainer, until the bar below them says which it was; patience: for how many lines
    they still wait."""

    world_size: int
    waiting: dict[str, float] = field(default_factory=dict)
    patience: int = 0

    def may_say(self, block: bytes) -> bool:
        """Whether lines may have a step: each form has a loss and a mark of its own."""
        if self.waiting and b"/" in block:
            return True
        return b"loss" in block and any(mark in block for mark in MARKS)

    def parse(self, line: bytes) -> StepReport | None:
        """The report in a line of a launcher's log."""
        text = plain(line.decode("utf-8", errors="replace"))
        if self.waiting and (number := bar_step(text)):
            figures, self.waiting = self.waiting, {}
            return StepReport(number, loss=figures.pop("loss"), figures=figures)
        self.patience -= 1
        if self.patience == 0:  # a Trainer without a bar
            self.waiting = {}
        if figures := read_trainer(text):
            self.waiting, self.patience = figures, BAR_LINES
            return None
        steps = (read_step(form, text) for form in FORMS)
        step, loss = next(filter(None, steps), None), LOSS.search(text)
        if step is None or loss is None or step.number < 1:
            return None
        figures = {"step_seconds": step.seconds} if step.seconds else {}
        if (rate := self._rate(step)) is not None:
            figures["tokens_per_second"] = rate
        return StepReport(step.number, loss=float(loss[1] or loss[2]), figures=figures)

    def _rate(self, step: LogStep) -> float | None:
        of_rank = step.tokens_per_rank
        return of_rank * self.world_size if of_rank else step.tokens_per_second


@dataclass
class ProgramRecords:
    """Writes and delivers the records of one attempt. began: when it began, in seconds since 1970;
    last: the report of the last record; waiting: the first report, until its time is known;
    delivered: records so far; timer: for how long it reads."""

    run: RunDir
    job: JobSpec
    clock: Callable[[], float] = time.time
    began: float = 0.0
    last: StepReport | None = None
    waiting: StepReport | None = None
    delivered: int = 0
    timer: Callable[[], float] = time.monotonic
    reports: list[ForeignLines[StepReport]] = field(default_factory=list)
    logs: list[ForeignLines[StepReport]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.began = self.clock()
        ranks = recording_ranks(self.job)
        self.reports = [ForeignLines(self.run.heartbeat(r), parse_report) for r in ranks]
        for rank in sorted({*ranks, self.job.world_size - 1}):
            steps = PrintedSteps(self.job.world_size)
            self.logs.append(ForeignLines(self.run.log(rank), steps.parse, steps.may_say))

    def deliver(self, on_record: OnRecord) -> bool:
        """Record new reports, as many as a poll may, and call on_record with the record of each;
        returns whether there may be more."""
        found: list[StepReport] = []
        is_behind = _read(self.reports, found)
        if any(file.delivered for file in self.reports):
            self.logs = []
        is_behind = _read(self.logs, found) or is_behind
        for report in self._dated(sorted(found, key=lambda report: report.step)):
            self._take(report, on_record)
        return is_behind

    def finish(self, on_record: OnRecord) -> str:
        """Record what is left once the attempt is over, for FINISH_SECONDS; returns what was left
        out, in words."""
        deadline, left_out = self.timer() + FINISH_SECONDS, 0
        while (is_behind := self.deliver(on_record)) and self.timer() < deadline:
            pass
        if is_behind:
            left_out = sum(file.skip(END_BYTES) for file in (*self.reports, *self.logs))
            deadline += FINISH_SECONDS
            while self.deliver(on_record) and self.timer() < deadline:
                pass
        if (report := self.waiting) is not None and report.time is not None:
            self._write(report, max(0.0, report.time - self.began), on_record)
        if not left_out:
            return ""
        return (
            f"{bytes_text(left_out)} of what the program printed was not searched for steps within "
            f"{FINISH_SECONDS:g} s after its end; RUN/logs has all of it"
        )

    def _dated(self, found: list[StepReport]) -> Iterator[StepReport]:
        """The reports with their times: their own where these can be, else spread evenly over the
        time since the last report."""
        now = self.clock()
        before = (self.waiting or self.last or StepReport(0, self.began)).time or self.began
        for number, report in enumerate(found, start=1):
            said = report.time
            if said is None or not before <= said <= now + LATE_SECONDS:
                said = before + max(0.0, now - before) * number / len(found)
            yield StepReport(report.step, said, report.loss, report.tokens, report.figures)

    def _take(self, report: StepReport, on_record: OnRecord) -> None:
        newest = self.waiting or self.last
        if newest is not None and report.step <= newest.step:
            return  # another rank's report of the step
        if report.loss is None:
            return
        if newest is None:
            self._cut(report.step)
            self.waiting = report
            return
        seconds = (report.time or 0.0) - (newest.time or 0.0)
        pace = max(0.0, seconds / (report.step - newest.step))
        if self.waiting is not None:
            self._write(self.waiting, pace, on_record)
        self._write(report, pace, on_record)

    def _cut(self, step: int) -> None:
        """Remove the records from this step on, which the program does again."""
        records = list(self.run.records())
        kept = [record for record in records if record["step"] < step]
        if len(kept) < len(records):
            write_whole(self.run.metrics, "".join(json.dumps(record) + "\n" for record in kept))

    def _write(self, report: StepReport, pace: float, on_record: OnRecord) -> None:
        before, self.last, self.waiting = self.last, report, None
        printed = dict(report.figures)
        seconds = printed.pop("step_seconds", pace)
        tokens, rate = report.tokens or 0, printed.pop("tokens_per_second", 0.0)
        if not rate and before is not None and before.tokens is not None and seconds > 0:
            steps = report.step - before.step
            rate = max(0.0, (tokens - before.tokens) / steps / seconds)
        record: StepRecord = {
            **printed,  # type: ignore[typeddict-item]  # numbers by the program's own names
            "step": report.step,
            "loss": report.loss,
            "tokens": tokens,
            "step_seconds": seconds,
            "tokens_per_second": rate,
            "time": report.time or self.clock(),
            "predicted_step_seconds": self.job.launch.predicted_step_seconds,
        }
        with self.run.metrics.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")
        self.delivered += 1
        on_record(record)


def _read(files: Sequence[ForeignLines[StepReport]], found: list[StepReport]) -> bool:
    """Add what the files say to `found`, as much as a poll may; returns whether there may be
    more."""
    return read_in_turn(files, found.append, most_bytes=POLL_BYTES, most_finds=POLL_REPORTS, seconds=POLL_SECONDS)
