"""Runs in words: the runs of a folder, one run, its present state, how it was stopped."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.text import Text

from mpctl.core.units import MFU_CONVENTION, bytes_text, count_text, plural, ranks_text, seconds_text
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.goodput import TimeSpent, time_spent
from mpctl.records.rundir.launches import read_times_away
from mpctl.records.rundir.metrics import ordered, points
from mpctl.render.console import get_console, marked
from mpctl.render.parts import Bar, Bars, Column, DataTable, Facts, Figures, Part, Section, Sentence, table_of
from mpctl.render.progress import clock
from mpctl.render.run import STYLE, expert_rows, summary_rows
from mpctl.render.terminal import print_parts
from mpctl.run.history.listing import RunRow, RunsDocument
from mpctl.run.history.saved import CheckpointRow, SavedRun
from mpctl.run.history.show import ShownRun, X, find_series, show_run
from mpctl.run.history.status import LauncherRow, StatusDocument
from mpctl.run.history.stop import Stopped
from mpctl.spec.job import JobSpec

STYLES = {
    "submitted": "cyan",
    "running": "bold cyan",
    "finished": "green",
    "stopped": "yellow",
    "failed": "bold red",
    "interrupted": "yellow",
    "unreadable": "red",
}
GAP = 2
WORD_COLUMNS = ("name", "status", "model", "layout")


def print_runs(listing: RunsDocument) -> None:
    """Print the runs of a folder on stdout; below the table, the errors of runs and why runs failed
    before their first step."""
    console, rows = get_console(), listing["runs"]
    titles = shown_columns(rows, console.width) if console.is_terminal else list(COLUMNS)
    if rows and not console.is_terminal:  # a file or a pipe is as wide as the table
        console.width = _width(rows, titles)
    print_parts(runs_parts(listing, titles), console=console)


def runs_parts(listing: RunsDocument, titles: Sequence[str]) -> Iterator[Part]:
    """titles: of the columns that are shown."""
    rows = listing["runs"]
    if rows:
        yield DataTable("", [Column(title, COLUMNS[title], left=title in WORD_COLUMNS) for title in titles], rows)
    else:
        yield Sentence(f"no runs in {listing['folder']}")
    problems = [(r["name"], text) for r in rows for text in r["problems"]]
    problems += [(r["name"], r["failure"]) for r in rows if r["failure"] and not r["step"]]
    for name, text in problems:
        yield Sentence(f"{name}: {text}", "warning")
    if listing["others"]:
        yield Sentence(f"not runs of mpctl: {', '.join(listing['others'])}", "note")


def shown_columns(rows: Sequence[RunRow], width: int) -> list[str]:
    """The columns for a terminal of this width: the first five, and those that fit."""
    titles = list(COLUMNS)
    while len(titles) > 5 and _width(rows, titles) > width:
        titles.pop()
    return titles


def _width(rows: Sequence[RunRow], titles: Iterable[str]) -> int:
    """Characters that the columns take, gaps included."""
    return sum(GAP + max(len(title), *(len(COLUMNS[title](row)) for row in rows)) for title in titles)


def moment_text(iso: str | None) -> str:
    """`2026-11-21T20:13:05+00:00` as `2026-11-21 20:13` in the time zone of the machine."""
    if iso is None:
        return "-"
    return datetime.fromisoformat(iso).astimezone().strftime("%Y-%m-%d %H:%M")


def _speed(row: RunRow) -> str:
    speed = row["tokens_per_second"]
    return "-" if speed is None else count_text(speed) if speed >= 1e6 else f"{speed:,.0f}"


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


# The most important first: from the right they are left out of a narrow terminal.
COLUMNS: dict[str, Callable[[RunRow], str]] = {
    "name": lambda row: row["name"] or "-",
    "status": lambda row: row["status"],
    "step": lambda row: f"{row['step']}/{row['steps'] or '?'}",
    "loss": lambda row: _loss(row["loss"]),
    "validation": lambda row: _loss(row["validation_loss"]),
    "tokens/s": _speed,
    "model": lambda row: row["model"] or "-",
    "layout": lambda row: row["layout"] or "-",
    "started": lambda row: moment_text(row["started"]),
    "ended": lambda row: moment_text(row["ended"]),
    "checkpoints": lambda row: bytes_text(row["checkpoint_bytes"]) if row["checkpoints"] else "-",
}


Row = tuple[str, str]
MOST_WORDS = 200  # characters of a program
RESUMABLE = ("stopped", "failed", "interrupted")


def _resume(path: object) -> str:
    return shlex.join(["mpctl", "launch", "--resume", "--run-dir", str(path)])


def print_run(run: SavedRun, document: ShownRun) -> None:
    """Print one run on stdout: its job, its results, how it ended."""
    print_parts(run_parts(run, document))


def run_page(run: SavedRun, command: str, x: X = "step") -> str:
    """The page as HTML. run: with its records (`open_runs`); command: the line that makes it again;
    x: the horizontal axis of the curves."""
    from mpctl.render.page import page_text

    return page_text(run_parts(run, show_run(run), x), command=command)


CURVES = {
    "Loss": ("loss", "validation_loss"),
    "Speed": ("step_seconds",),
    "Communication": ("communication_seconds",),
    "Memory": ("memory_bytes", "reserved_memory_bytes"),
}
"""Pictures by name, with their metrics, those of further corpora and of single axes included."""
LISTED, LEAST_PAUSE = 8, 1.0
"""The longest pauses are listed: how many at most, and of how many seconds at least."""


def run_parts(run: SavedRun, document: ShownRun, x: X | None = None) -> Iterator[Part]:
    """The parts of a run. x: the horizontal axis of the curves of a page, None for a terminal."""
    yield Sentence(f"run: {run.name}", "title", "page")
    yield Sentence(f"{run.name}  {run.status} after {reached_text(run)}", STYLE.get(run.status, "head"))
    if x is not None:
        away = read_times_away(RunDir(run.path).launcher_log, run.records)
        spent = time_spent(run.records, away)
        if document["failure"]:
            yield Sentence(failure_text(document["failure"]))
        yield Figures(list(_headline(document, spent)))
        yield from _curves(run, x)
        if spent is not None:
            yield from _time_parts(spent)
    yield Section("facts", "Facts")
    yield Facts(list(run_rows(run, document)))


def _curves(run: SavedRun, x: X) -> Iterator[Part]:
    """The curves of the metrics that the run has numbers of."""
    from mpctl.render.curves import curves_chart

    present = ordered(name for record in run.records for point in points(record) for name in point.values)
    for title, bases in CURVES.items():
        names = [name for name in present if name.partition("/")[0] in bases]
        if names:
            yield Section(title.lower(), title)
            yield curves_chart(find_series([run], names, x), x)


def _headline(document: ShownRun, spent: TimeSpent | None) -> Iterator[tuple[str, str]]:
    if document["final_loss"] is not None:
        yield "loss", f"{document['final_loss']:.4f}"
    if document["validation_loss"] is not None:
        yield "validation loss", f"{document['validation_loss']:.4f}"
    if document["step_seconds"] is not None:
        yield "a step", seconds_text(document["step_seconds"])
    if document["tokens_per_second"] is not None:
        yield "tokens/s", count_text(document["tokens_per_second"])
    if document["mfu"] is not None:
        yield "MFU", f"{document['mfu']:.1%}, {MFU_CONVENTION}"
    if spent is not None:
        yield "goodput", f"{spent.steps / spent.wall:.1%}"
    if document["attempts"]:
        yield "attempts", str(document["attempts"])


def _time_parts(spent: TimeSpent) -> Iterator[Part]:
    """Yield the shares of time by activity, and the longest pauses."""
    shares = {
        "steps that count": spent.steps,
        "saves that training waited for": spent.saves,
        "restarts, steps done again, validations": spent.paused,
    }
    longest = sorted(spent.pauses, key=lambda pause: pause.seconds, reverse=True)[:LISTED]
    pauses = [
        (f"before step {pause.step:,}", seconds_text(pause.seconds))
        for pause in sorted(longest)
        if pause.seconds >= LEAST_PAUSE
    ]
    yield Section("time", "Where the time went")
    yield Bars("", list(shares), [Bar("", list(shares.values()))], seconds_text, spent.wall)
    rows = [(name, f"{seconds_text(seconds)} ({seconds / spent.wall:.1%})") for name, seconds in shares.items()]
    yield table_of("From the begin of the first step to the end of the last", ("", "took"), rows, left=("",))
    if spent.away:
        yield Sentence(f"Nobody ran it for another {seconds_text(spent.away)} between two launches.")
    if pauses:
        yield table_of("The longest pauses between two steps", ("", "lasted"), pauses, left=("",))


def program_text(argv: Sequence[str]) -> str:
    """A program as a shell would take it, a long one cut."""
    text = shlex.join(argv)
    return text if len(text) <= MOST_WORDS else f"{text[:MOST_WORDS]} ..."


def reached_text(run: SavedRun) -> str:
    """How far a run is: `40 of 400 steps`, or `40 steps` where its job cannot be read."""
    if run.steps is None:
        return plural(run.step, "step")
    return f"{run.step:,} of {plural(run.steps, 'step')}"


def run_rows(run: SavedRun, document: ShownRun) -> Iterator[Row]:
    """Everything that is known of the run, as name and text."""
    if run.program is not None:
        yield "program", program_text(run.program)
    if run.job is not None:
        yield from _job_rows(run.job, document)
    if document["steps"]:
        yield from _time_rows(document)
        yield from summary_rows(document)
    if not document["plan_beside_run"] and run.program is None:
        yield (
            "plan = run",
            (
                "not yet: ranks tell at the end"
                if run.status == "running"
                else "not compared: the run did not end in order"
            ),
        )
    if run.program is None:
        yield "checkpoints", _saved_texts(document["checkpoints"])
    if document["failure"] is not None:
        yield "failure", failure_text(document["failure"])
    for problem in document["problems"]:
        yield "damaged", problem
    yield "run directory", document["path"]
    if run.status in RESUMABLE and document["checkpoints"]:
        yield "go on with", _resume(run.path)


def _job_rows(job: JobSpec, document: ShownRun) -> Iterator[Row]:
    training, model = job.training, job.model
    if model is not None:
        name = f"{model.name}: " if model.name else ""
        yield (
            "model",
            (
                f"{name}{model.family}, {model.all_layers} layers, hidden {model.hidden}, "
                f"{model.heads} heads, vocabulary {model.vocab:,}, sequence of "
                f"{model.seq_length}"
            ),
        )
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
    if text := _attempts_text(document["attempts"]):
        yield "attempts", text


def _attempts_text(attempts: int | None, launches: int = 1) -> str:
    """`2: it failed and started again; launched 3 times`; empty for a run that started once."""
    again = f"{attempts}: it failed and started again" if (attempts or 1) > 1 else ""
    of_run = f"launched {launches} times" if launches > 1 else ""
    return "; ".join(filter(None, (again, of_run)))


def _saved_texts(saved: list[CheckpointRow]) -> str:
    if not saved:
        return "none"
    shown = saved if len(saved) <= 4 else [saved[0], None, *saved[-2:]]
    words = ", ".join("..." if one is None else _saved_text(one) for one in shown)
    size = sum(one["bytes"] for one in saved)
    return words if len(saved) == 1 else f"{words}; {len(saved)} of {bytes_text(size)} in all"


def _saved_text(saved: CheckpointRow) -> str:
    trouble = f", damaged: {saved['problem']}" if saved["problem"] else ""
    return f"step {saved['step']} ({bytes_text(saved['bytes'])}{trouble})"


def _place(coords: Mapping[str, int]) -> str:
    """`tp 1, cp 0, dp 1, pp 0`."""
    return ", ".join(f"{axis} {index}" for axis, index in coords.items())


def failure_text(failure: Mapping[str, Any]) -> str:
    """The rank that failed first, its host and coordinates where they are known, and why."""
    where = "; ".join(filter(None, (failure.get("host"), _place(failure["coords"]))))
    who = "the run" if failure["rank"] is None else f"rank {failure['rank']}"
    doing = f" at {failure['doing']}" if failure["doing"] else ""
    log = f"; log: {failure['log']}" if failure["log"] else ""
    return f"{who}{f' ({where})' if where else ''} failed{doing}: {failure['error']}{log}"


SILENT_SECONDS = 5.0
"""Seconds without a heartbeat, of two each second, after which a rank is reported."""
MOST_GROUPS, MOST_NAMED = 8, 8
NOT_RUNNING = "not begun, or ended"


def print_status(status: StatusDocument, *, clears: bool = False) -> None:
    """Print the status of a run on stdout, with problems at its end. clears: in place of what a terminal shows."""
    console = get_console()
    if clears and console.is_terminal:
        console.clear()
    print_parts(status_parts(status))


def status_parts(status: StatusDocument) -> Iterator[Part]:
    stopping = " (stopping)" if status["is_stopping"] else ""
    title = f"{status['name']}  {status['status']}{stopping}{_progress(status)}"
    yield Sentence(title, STYLE.get(status["status"], "head"))
    yield Facts(list(_status_rows(status)))
    yield from (Sentence(text, "warning") for text in _troubles(status))


def _progress(status: StatusDocument) -> str:
    """`  step 12 of 80 (15 %), 0:00:58 left`."""
    step, steps = status["step"], status["steps"]
    if not steps:
        return f"  step {step:,}" if step else ""
    left = status["seconds_left"]
    until = "" if left is None else f", {clock(left)} left"
    return f"  step {step:,} of {steps:,} ({100 * step // steps} %){until}"


def _status_rows(status: StatusDocument) -> Iterator[Row]:
    if status["program"] is not None:
        yield "program", program_text(status["program"])
    if status["loss"] is not None:
        validation = status["validation_loss"]
        more = "" if validation is None else f", validation {validation:.4f}"
        yield "loss", f"{status['loss']:.4f}{more}"
    if status["step_seconds"] is not None:
        speed = status["tokens_per_second"] or 0
        rate = f", {speed:,.0f} tokens/s" if speed else ""
        yield "step time", f"{seconds_text(status['step_seconds'])}{rate}"
    if status["mfu"] is not None and status["hfu"] is not None:
        rates = f"{status['mfu']:.1%}, {status['hfu']:.1%} of the device's data sheet"
        yield "MFU, HFU", f"{rates}, {MFU_CONVENTION}"
    yield from expert_rows(status["experts"])
    if status["last_step_seconds"] is not None:
        yield "last step", f"{age_text(status['last_step_seconds'])} ago"
    if text := _attempts_text(status["attempts"], status["launches"]):
        yield "attempts", text
    if status["program"] is None:
        yield "checkpoint", _newest_text(status)
    if status["launcher"] is not None:
        yield "launcher", _launcher(status["launcher"], status)
        if status["job_state"] is not None:
            yield "job", f"{status['launcher']['job_id']}: {status['job_state']}"
        hosts = status["launcher"]["hosts"] or []
        if len(hosts) > 1:
            few = hosts if len(hosts) <= 8 else [*hosts[:4], f"... {hosts[-1]}"]
            yield "hosts", f"{len(hosts):,}: {', '.join(few)}"
    yield from _rank_rows(status)
    if status["failure"] is not None:
        yield "failure", failure_text(status["failure"])
    for number, row in enumerate(status["blamed"][:MOST_NAMED]):
        limit = ", not to be used again" if row["is_excluded"] else ""
        when = "" if row["last"] is None else f" at {moment_text(row['last'])}"
        text = f"{row['host']} for {plural(row['failures'], 'failure')}{limit}"
        yield "" if number else "blamed", f"{text}; the last{when}: {row['error']}"
    yield "run directory", status["path"]
    if status["status"] in RESUMABLE and status["checkpoint"]:
        yield "go on with", _resume(status["path"])


def _newest_text(status: StatusDocument) -> str:
    saved, seconds = status["checkpoint"], status["checkpoint_seconds"]
    if saved is None:
        return "none"
    when = "" if seconds is None else f", {age_text(seconds)} ago"
    damage = f"; damaged: {saved['problem']}" if saved["problem"] else ""
    return f"step {saved['step']:,} ({bytes_text(saved['bytes'])}){when}{damage}"


def _launcher(launcher: LauncherRow, status: StatusDocument) -> str:
    since = "" if launcher["started"] is None else f", since {moment_text(launcher['started'])}"
    job = "" if launcher["job_id"] is None else f" job {launcher['job_id']}"
    text = f"{launcher['backend']}{job} on {launcher['host']}, process {launcher['pid']}{since}"
    if status["status"] == "submitted":
        return f"submitted to {launcher['backend']} from {launcher['host']}{since}"
    if status["status"] == "running":
        return text if launcher["is_alive"] else f"{text}; as seen from this host"
    return f"{text}; it has ended"


def _rank_rows(status: StatusDocument) -> Iterator[Row]:
    """The ranks by activity; for a run that has ended only ranks that ended during one."""
    is_running, groups = status["status"] == "running", defaultdict[str, list[int]](list)
    for rank in status["ranks"]:
        if is_running or rank["doing"]:
            groups[rank["doing"] or NOT_RUNNING].append(rank["rank"])
    if not groups:
        return
    count = f"{status['world_size'] or len(status['ranks']):,}"
    yield "ranks", f"{count}{_heartbeats(status) if is_running else '; when they ended:'}"
    for doing, ranks in list(groups.items())[:MOST_GROUPS]:
        yield f"  {ranks_text(ranks, most=2)}", doing
    if rest := sum(map(len, list(groups.values())[MOST_GROUPS:])):
        yield "  others", f"{plural(rest, 'rank')} at other parts of their step"


def _heartbeats(status: StatusDocument) -> str:
    ages = [age for rank in status["ranks"] if (age := rank["heartbeat_seconds"]) is not None]
    if not ages:
        return ""
    if status["program"] is not None:
        return f", the oldest heartbeat {age_text(max(ages))} ago"
    beating = sum(age < SILENT_SECONDS for age in ages)
    who = "all" if beating == len(status["ranks"]) else f"{beating:,}"
    return f", {who} with a heartbeat in the last {SILENT_SECONDS:g} s"


def _troubles(status: StatusDocument) -> Iterator[str]:
    """Problems to report: ranks that do not answer, whom they wait for, damaged files."""
    if status["status"] == "running" and status["program"] is None:
        ages = [(rank, rank["heartbeat_seconds"] or 0.0) for rank in status["ranks"]]
        silent = [(rank, age) for rank, age in ages if age >= SILENT_SECONDS]
        for rank, age in silent[:MOST_NAMED]:
            where = "; ".join(filter(None, (rank["host"], _place(rank["coords"]))))
            process = f"; its process is {rank['process']}" if rank["process"] else ""
            yield f"rank {rank['rank']} ({where}): no heartbeat for {age_text(age)}{process}"
        if len(silent) > MOST_NAMED:
            yield f"and {plural(len(silent) - MOST_NAMED, 'other rank')} without a heartbeat"
    if status["waiting"]:
        yield status["waiting"]
    yield from (part["text"] for part in status["slow"])
    yield from status["problems"]


def age_text(seconds: float) -> str:
    """An age: `0.4 s`, `58 s`, `3.2 min`, `5.0 h`, `2.1 days`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 2 * 86400:
        return seconds_text(seconds)
    return f"{seconds / 86400:.1f} days"


class StopView:
    """A moving line on stderr on a terminal; elsewhere a line for each new text."""

    def __init__(self, name: str) -> None:
        self.console = get_console(stderr=True)
        self.name, self.text = name, ""
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False))
        self.bar = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self.task = self.bar.add_task("", total=None)

    def __enter__(self) -> StopView:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.bar.stop()
        if kind is KeyboardInterrupt:
            self.console.print(f"the request stays: `mpctl status {self.name}` tells when it ended")

    def update(self, text: str) -> None:
        """Show what the run is doing."""
        if text == self.text:
            return
        if not self.text:
            self.bar.start()
        is_same_work = text.split(":")[0] == self.text.split(":")[0]
        self.text = text
        self.bar.update(self.task, description=f"stopping {self.name}: {text}")
        if not self.console.is_terminal and not is_same_work:
            self.console.print(f"stopping {self.name}: {text}", soft_wrap=True)


def print_stopped(stopped: Stopped) -> None:
    """Print on stdout how the run ended, what it saved and how to go on."""
    console, run = get_console(), stopped.run
    steps = f"{run.step:,}" if run.steps is None else f"{run.step:,} of {run.steps:,}"
    if stopped.cancelled:
        console.print(f"{run.name}  its job was cancelled before it began: {stopped.cancelled}")
        return
    before = "" if stopped.was_running else "was not running: "
    status = Text(run.status, STYLES[run.status])
    console.print(Text.assemble(f"{run.name}  {before}", status, f" after step {steps}"))
    if run.status == "failed" and run.failure is not None:
        console.print(Text(failure_text(run.failure.as_dict())), soft_wrap=True)
    if run.status == "running":
        console.print(Text("the request stays; the run ends when its step is done and saved"))
    elif run.program is not None:
        console.print(marked("→", f"start it again with: {_resume(run.path)}"), soft_wrap=True)
    elif not run.checkpoints:
        console.print(Text("no checkpoint was saved"))
    else:
        saved = run.checkpoints[-1]
        lost = run.step - saved["step"]
        more = f"; {lost:,} later steps are lost" if lost > 0 else ""
        console.print(Text(f"saved as step {saved['step']:,} ({bytes_text(saved['bytes'])}){more}"))
        if run.status != "finished":
            console.print(marked("→", f"go on with: {_resume(run.path)}"), soft_wrap=True)
