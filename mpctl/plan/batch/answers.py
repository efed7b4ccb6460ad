"""The answers of a batch, in the order of its lines; a million lines take no more memory than one.

A job's answer is the estimate of `mpctl plan`: `breakdown` sums to `step_seconds`. A line that
cannot be estimated is answered too, with its issues and null for every figure. The nearest layouts
that fit take a search, about thirty times as long: of the first `FIRST_LINES` lines the first
`SEARCHED_LINES` that do not fit get one, the others say how to ask for it.

Lines are answered independently, so that any free process takes the next block, a few ahead of the
one whose answers are being written: memory is that of a few blocks, however long the batch.
"""

from __future__ import annotations

import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from math import isfinite
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NotRequired, cast

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.core.cores import core_count
from mpctl.core.errors import InputError, Issue, Status
from mpctl.core.records import Json, json_value
from mpctl.plan.batch.rows import Raw, as_others_run, load_row, parse_line, require_countable
from mpctl.plan.estimate.job import Estimate
from mpctl.plan.planning.plan import Plan, make_plan
from mpctl.plan.planning.summary import PlanSummary, TrainingEntry, plan_summary, training_settings, verdict
from mpctl.plan.rules.validate import with_tried_hints
from mpctl.plan.search.nearest import with_hint, with_nearest
from mpctl.spec.figure_sources import FigureSource
from mpctl.spec.load import LoadedJob

Finding = tuple[Status, Issue]
RowId = str | int | None
REMEMBERED_IDS = 2**17  # so that memory stays bounded
FIRST_LINES, SEARCHED_LINES = 32, 16
NOT_SEARCHED = (
    "`mpctl plan` of this job finds the nearest layouts that fit; a batch does so for the first "
    f"{SEARCHED_LINES} that do not of its first {FIRST_LINES} lines"
)


class Answer(TypedDict):
    """The answer of one line, under its id.

    training: None where the job cannot be read. Figures are None where they are not known: verdict,
    whether it fits, and by how much, in words; peak_memory_bytes, of the fullest rank, `allocated`
    by tensors, with what the allocator `reserved`, and on the `device` as nvidia-smi shows it;
    stage_memory_bytes, allocated by torch, of one rank of each stage; breakdown, seconds of the
    step by part: `dp` is that of the group dp_cp, and keys and values over cp are in `other`.
    issues: errors of the line, and warnings about its answer. figures_from: the user's presets behind the
    figures.
    """

    id: RowId
    training: TrainingEntry | None
    fits: bool | None
    verdict: str | None
    step_seconds: float | None
    step_seconds_low: float | None
    step_seconds_high: float | None
    model_tflops_per_gpu: float | None
    mfu: float | None
    hfu: float | None
    tokens_per_second: float | None
    peak_memory_bytes: dict[str, int] | None
    stage_memory_bytes: list[int] | None
    breakdown: dict[str, float] | None
    issues: list[Json]
    figures_from: NotRequired[list[FigureSource]]
    nearest_that_fit: NotRequired[list[Json]]


REST = ("id", "training", "issues", "figures_from", "nearest_that_fit")
FIGURES = tuple(key for key in Answer.__annotations__ if key not in REST)
OF_SUMMARY = tuple(key for key in FIGURES if key in PlanSummary._fields)


def answers(lines: Iterable[bytes | None], folder: Path = Path()) -> Iterator[Answer]:
    """An answer for each line, in order; None stands for a line that was too long to be read.

    folder: where the lines' file is; the files of presets that they name are relative to it.
    """
    reader, seen = Reader(folder), SeenIds()
    return (seen.noted(reader.answer(line, number)) for number, line in enumerate(lines, start=1))


@dataclass
class SeenIds:
    """The ids of earlier answers, up to a bound."""

    ids: set[str] = field(default_factory=set)

    def noted(self, answer: Answer) -> Answer:
        """The answer, with a warning if its id is repeated."""
        row_id = answer["id"]
        if not isinstance(row_id, str):
            return answer
        if row_id in self.ids:
            issue = Issue("repeated-id", "id", f"{row_id[:60]!r} came before")
            answer["issues"].append({"status": "warning", **issue.as_dict()})
        elif len(self.ids) < REMEMBERED_IDS and len(row_id) <= 200:
            self.ids.add(row_id)
        return answer


@dataclass
class Reader:
    """Answers lines, each independently."""

    folder: Path = Path()
    searched: int = 0

    def answer(self, line: bytes | None, number: int) -> Answer:
        """The answer of line `number`, counted from 1; never raises for the content of a line."""
        row_id: RowId = None
        try:
            row = parse_line(line, number)
            raw, row_id, findings = _split(row)
            if any(status == "error" for status, _ in findings):
                return _answer(row_id, findings)
            return self._estimated(row_id, load_row(raw, self.folder), findings, number)
        except InputError as error:
            return _answer(row_id, [("error", issue) for issue in error.issues])
        except Exception as error:  # of this line alone: the others are still answered
            return _answer(row_id, [("error", _unexpected(error, number))])

    def _estimated(self, row_id: RowId, loaded: LoadedJob, findings: list[Finding], number: int) -> Answer:
        findings += [("warning", issue) for issue in loaded.warnings]
        if loaded.job is None or loaded.issues:
            return _answer(row_id, [*findings, *(("error", issue) for issue in loaded.issues)])
        job, assumed = as_others_run(loaded.job)
        require_countable(job)
        plan = self._with_nearest(replace(make_plan(job), presets=loaded.presets), number)
        findings += [("warning", check.issue) for check in assumed]
        checks = with_tried_hints(job, list(plan.checks), loaded.open_settings)
        findings += [(c.status, c.issue) for c in checks if c.status != "ok"]
        if job.model is None:
            findings.append(("error", Issue("no-model", "model", "an estimate needs a model")))
        findings += _notes(plan.estimate) if plan.estimate else ()
        return _answer(row_id, findings, plan)

    def _with_nearest(self, plan: Plan, number: int) -> Plan:
        """The plan of line `number`, with the nearest layouts that fit if few lines needed a search
        so far."""
        if plan.fits is not False:
            return plan
        self.searched += 1
        if number > FIRST_LINES or self.searched > SEARCHED_LINES:
            return with_hint(plan, NOT_SEARCHED)
        return with_nearest(plan)


def _unexpected(error: Exception, number: int) -> Issue:
    """An unexpected exception is a fault of mpctl; the issue says so."""
    message = f"mpctl failed on this line: {type(error).__name__}: {str(error)[:200]}"
    return Issue("unexpected-error", f"line {number}", message, "please report it with the line")


def _split(row: Raw) -> tuple[Raw, RowId, list[Finding]]:
    """The job, the id, and the errors of either."""
    row_id, findings = row.get("id"), list[Finding]()
    if row_id is not None and (isinstance(row_id, bool) or not isinstance(row_id, str | int)):
        message = f"a JSON {type(row_id).__name__} is not allowed"
        findings.append(("error", Issue("bad-value", "id", message, "use a string or an integer")))
        row_id = None
    raw = row.get("job", {key: value for key, value in row.items() if key != "id"})
    if not isinstance(raw, dict):
        findings.append(("error", Issue("bad-value", "job", "is not an object")))
        raw = {}
    return raw, row_id, findings


def _notes(estimate: Estimate) -> Iterator[Finding]:
    """Why there is no time, or which figures are not based on measurements."""
    time = estimate.time
    if isinstance(time, str):
        yield "warning", Issue("no-step-time", "cluster", time)
    else:
        for reason in time.extrapolates:
            yield "warning", Issue("extrapolates", "time", reason)


def figures(plan: Plan) -> Json:
    """The figures of a plan; None for all of one without a model."""
    found: Json = dict.fromkeys(FIGURES)
    if plan.estimate is None:
        return found
    summary, memory, time = plan_summary(plan), plan.estimate.memory, plan.estimate.time
    found |= {key: getattr(summary, key) for key in OF_SUMMARY}
    found |= {
        "verdict": verdict(plan),
        "peak_memory_bytes": {
            "allocated": max(stage.allocated_bytes for stage in memory),
            "reserved": max(stage.reserved_bytes for stage in memory),
            "device": max(stage.device_bytes for stage in memory),
        },
        "stage_memory_bytes": [stage.allocated_bytes for stage in memory],
    }
    if not isinstance(time, str):
        found["model_tflops_per_gpu"] = (summary.model_flops_per_second or 0.0) / 1e12
        parts = time.parts()
        parts["other"] += parts.pop("cp") + parts.pop("ep", 0.0)
        found["breakdown"] = {("dp" if name == "dp_cp" else name): s for name, s in parts.items()}
    return found


def _answer(row_id: RowId, findings: Sequence[Finding], plan: Plan | None = None) -> Answer:
    """The answer with its keys in order; figures that JSON cannot hold become an issue."""
    found = figures(plan) if plan else dict.fromkeys(FIGURES)
    if not _is_finite(found):
        message = "the estimate is no finite number"
        findings = [*findings, ("error", Issue("not-estimated", "time", message))]
        found = dict.fromkeys(FIGURES)
    answer: Any = {
        "id": row_id,
        "training": training_settings(plan.job) if plan else None,
        **found,
        "issues": [{"status": status, **issue.as_dict()} for status, issue in findings],
    }
    if plan and (sources := plan.figures_from):
        answer["figures_from"] = sources
    if plan and plan.nearest:
        answer["nearest_that_fit"] = json_value(plan.nearest)
    return cast(Answer, answer)


def _is_finite(value: object) -> bool:
    """Whether every number in it, at any depth, is finite, as JSON requires."""
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or isfinite(value)


BLOCK = FIRST_LINES  # so that one process gets all lines that may be searched
MOST_PROCESSES = 4
AHEAD = 2  # blocks of each process that wait to be written or to be begun
Block = list[tuple[int, bytes | None]]


def process_count() -> int:
    """The number of processes: one per core, few enough to keep their memory small."""
    return min(MOST_PROCESSES, core_count())


def answers_by_processes(lines: Iterable[bytes | None], folder: Path, processes: int) -> Iterator[Answer]:
    """The same as `answers`, computed by several processes."""
    numbered, seen = enumerate(lines, start=1), SeenIds()
    under_way: deque[Future[list[Answer]]] = deque()
    context = get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_ignore_signals)
    try:
        while block := list(islice(numbered, BLOCK)):
            under_way.append(pool.submit(_answer_block, block, folder))
            if len(under_way) > AHEAD * processes:
                yield from map(seen.noted, under_way.popleft().result())
        while under_way:
            yield from map(seen.noted, under_way.popleft().result())
    finally:
        pool.shutdown(cancel_futures=True)


def _ignore_signals() -> None:
    """Ctrl-C ends the process that writes the answers; it ends these."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _answer_block(block: Block, folder: Path) -> list[Answer]:
    reader = Reader(folder)
    return [reader.answer(line, number) for number, line in block]
