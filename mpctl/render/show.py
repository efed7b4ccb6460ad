"""One run in words: what was asked, what was reached, what it left and why it ended."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from rich.text import Text

from mpctl.render.console import NamedRows, get_console
from mpctl.render.run import summary_rows
from mpctl.render.runs import STYLES, moment_text
from mpctl.runs.saved import CheckpointRow, SavedRun
from mpctl.runs.show import ShownRun
from mpctl.spec.job import JobSpec
from mpctl.units import bytes_text, plural, seconds_text

Row = tuple[str, str]


def print_run(run: SavedRun, document: ShownRun) -> None:
    """Print one run on stdout: what was asked of it, what it reached, how it ended."""
    console = get_console()
    title = Text.assemble((run.name, "bold"), "  ", (run.status, STYLES[run.status]))
    console.print(title.append(f" after {_steps(run)}"), soft_wrap=True)
    console.print(NamedRows(rows(run, document)))


def _steps(run: SavedRun) -> str:
    """`1 step`, or where it is known how many were wanted `12 of 20 steps`."""
    if run.steps is None:
        return plural(run.step, "step")
    return f"{run.step:,} of {plural(run.steps, 'step')}"


def rows(run: SavedRun, document: ShownRun) -> Iterator[Row]:
    """Everything that is known of the run, as name and text."""
    if run.job is not None:
        yield from _job_rows(run.job, document)
    if document["steps"]:
        yield from _time_rows(document)
        yield from summary_rows(document)
    if not document["plan_beside_run"]:
        why = "not yet: ranks tell at the end" if run.status == "running" else "not compared: the "
        yield "plan = run", why if run.status == "running" else f"{why}run did not end in order"
    yield "checkpoints", _checkpoints(document["checkpoints"])
    yield from _ending(document)
    yield "run directory", document["path"]
    if run.status in ("stopped", "failed", "interrupted") and document["checkpoints"]:
        yield "go on with", shlex.join(["mpctl", "launch", "--resume", "--run-dir", str(run.path)])


def _job_rows(job: JobSpec, document: ShownRun) -> Iterator[Row]:
    training, model = job.training, job.model
    if model is not None:
        name = f"{model.name}: " if model.name else ""
        yield "model", (f"{name}{model.family}, {model.all_layers} layers, hidden {model.hidden}, "
                        f"{model.heads} heads, vocabulary {model.vocab:,}, sequence of "
                        f"{model.seq_length}")  # fmt: skip
    ranks = "1 rank" if job.world_size == 1 else f"{job.world_size} ranks"
    yield "layout", f"{document['layout']}; {ranks}, device {job.launch.device}"
    yield "batch", f"{training.global_batch_size or '?'} samples, {training.dtype}"
    low = "" if training.lr_schedule == "constant" else f" to {training.lowest_rate:g}"
    yield "learning rate", f"{training.learning_rate:g}{low}, {training.lr_schedule}"
    source = job.data.path or ", ".join(job.data.corpus or ())
    yield "data", f"{source or 'none'}; seed {training.seed}"
    if training.init_from:
        yield "started from", training.init_from


def _time_rows(document: ShownRun) -> Iterator[Row]:
    began, ended = moment_text(document["started"]), moment_text(document["ended"])
    day = began.split()[0]
    until = "" if document["ended"] is None else f" to {ended.removeprefix(day).strip()}"
    spent = f"{seconds_text(document['training_seconds'])} in training steps"
    yield "time", f"{began}{until}; {spent}"
    if (document["attempts"] or 1) > 1:
        yield "attempts", f"{document['attempts']}: it failed and started again"


def _checkpoints(saved: list[CheckpointRow]) -> str:
    if not saved:
        return "none"
    whole = sum(one["bytes"] for one in saved)
    told = saved if len(saved) <= 4 else [saved[0], None, *saved[-2:]]
    words = ", ".join("..." if one is None else _checkpoint(one) for one in told)
    return words if len(saved) == 1 else f"{words}; {len(saved)} of {bytes_text(whole)} in all"


def _checkpoint(saved: CheckpointRow) -> str:
    trouble = f", damaged: {saved['problem']}" if saved["problem"] else ""
    return f"step {saved['step']} ({bytes_text(saved['bytes'])}{trouble})"


def _ending(document: ShownRun) -> Iterator[Row]:
    failure = document["failure"]
    if failure is not None:
        yield "failure", failure_text(failure)
    for problem in document["problems"]:
        yield "damaged", problem


def failure_text(failure: Mapping[str, Any]) -> str:
    """The rank that failed first, its host and coordinates where they are known, and why."""
    coords = ", ".join(f"{axis} {index}" for axis, index in failure["coords"].items())
    where = "; ".join(filter(None, (failure.get("host"), coords)))
    who = "the run" if failure["rank"] is None else f"rank {failure['rank']}"
    doing = f" at {failure['doing']}" if failure["doing"] else ""
    log = f"; log: {failure['log']}" if failure["log"] else ""
    return f"{who}{f' ({where})' if where else ''} failed{doing}: {failure['error']}{log}"
