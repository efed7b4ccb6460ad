"""A tuning on a terminal: its trials while they run, then what was found.

While it runs a table on stderr has a row for each trial, with the plan's step beside the measured
one, and the time left; elsewhere than on a terminal a line when a trial ends. The answer on stdout
has the measured layouts with their plans before and after the fit, the best one with its lead, and
the commands that launch it and plan on what was learnt.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from mpctl.core.units import count_text, plural, seconds_text
from mpctl.measure.tune.state import PAGE
from mpctl.plan.planning.layout_settings import layout_text
from mpctl.render.console import get_console, marked
from mpctl.render.parts import Figures, Lines, Part, Section, Sentence, table_of
from mpctl.render.progress import clock
from mpctl.render.terminal import drawn_table, print_parts

if TYPE_CHECKING:
    from mpctl.measure.tune.document import BestEntry, MeasuredEntry, TrialEntry, TuneDocument
    from mpctl.measure.tune.loop import Tuning
    from mpctl.measure.tune.state import TrialRecord

SHOWN_TRIALS, SHOWN_LAYOUTS = 12, 12
LEVEL = 0.0005  # a lead that rounds to 0.0 %
NOT_ENDED = "not ended: it runs, or was killed and goes on by the same command"
STATUS = {
    "running": "running",
    "out-of-memory": "out of memory",
    "failed": "failed",
    "too-slow": "too slow",
    "cancelled": "cancelled",
    "interrupted": "interrupted",
    "written": "written",
}


class TuneView:
    """The trials of a tuning as they are made, on stderr."""

    def __init__(self) -> None:
        self.console = get_console(stderr=True)
        self.live = Live(console=self.console, auto_refresh=False, transient=True)
        self.tuning: Tuning | None = None
        self.told = 0
        self.step = 0
        self.waits, self.waited = "", 0.0

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self.live.stop()

    def change(self, tuning: Tuning) -> None:
        """Show the trials: one has begun or ended."""
        is_first, self.tuning, self.step, self.waits = self.tuning is None, tuning, 0, ""
        if self.console.is_terminal:
            self._refresh()
            return
        over = [record for record in tuning.records if record.status != "running"]
        if is_first and over:
            self.told = len(over)
            made = [record for record in over if record.status != "written"]
            if made:
                self._print(Text(f"{plural(len(made), 'trial')} of earlier sessions"))
        for record in over[self.told :]:
            self._print(Text(trial_line(record)))
        self.told = len(over)

    def progress(self, step: int) -> None:
        """Show the last step of the running trial."""
        self.step = step
        self._refresh()

    def wait(self, state: str, seconds: float) -> None:
        """Show what the running trial waits for in a queue, and for how long it has."""
        if not self.console.is_terminal and state != self.waits:
            self._print(Text(state))
        self.waits, self.waited = state, seconds
        self._refresh()

    def event(self, message: str) -> None:
        """Print a message of a trial, marked `!`."""
        self._print(marked("!", message))

    def _print(self, line: Text) -> None:
        with suppress(OSError):
            self.console.print(line, soft_wrap=True)

    def _refresh(self) -> None:
        if self.tuning is not None and self.console.is_terminal:
            with suppress(OSError):
                self.live.update(self._shown(self.tuning), refresh=True)

    def _shown(self, tuning: Tuning) -> RenderableType:
        rows = [self._row(record) for record in tuning.records[-SHOWN_TRIALS:]]
        columns = ("#", "planned", "expected", "measured", "layout", "why")
        table = table_of("", columns, rows, left=("layout", "why"), whole=4)
        left = f"{clock(tuning.left)} left of {clock(tuning.limits.seconds)}"
        made = plural(len(tuning.made), "trial")
        best = min((one.mean for one in tuning.belief.measured), default=None)
        words = [made, left, *([f"best {seconds_text(best)}"] if best else [])]
        if tuning.belief.measured:
            words.append(f"{plural(len(tuning.belief.rivals), 'rival')} of it")
        return Group(drawn_table(table), Text(", ".join(words), "dim"))

    def _row(self, record: TrialRecord) -> tuple[str, ...]:
        running, why = "starting", record.why
        if self.step:
            running = f"step {self.step} of {record.steps}"
        elif self.waits:
            running, why = f"queued {clock(self.waited)}", self.waits
        is_running = record.status == "running"
        return (
            str(record.number),
            seconds_text(record.planned),
            seconds_text(record.expected),
            running if is_running else outcome_text(record),
            layout_text(record.settings),
            why if is_running else record.why,
        )


def outcome_text(record: TrialRecord) -> str:
    """The step time of a trial, or how it ended."""
    if record.status == "measured" and record.step_seconds is not None:
        return seconds_text(record.step_seconds)
    return STATUS.get(record.status, record.status)


def trial_line(record: TrialRecord) -> str:
    """`trial 3: 1.02 s (planned 604.3 ms, expected 1.10 s), dp 2 pp 2, micro batch 8`."""
    plans = f"planned {seconds_text(record.planned)}, expected {seconds_text(record.expected)}"
    error = f": {record.error}" if record.error else ""
    layout = layout_text(record.settings)
    return f"trial {record.number}: {outcome_text(record)} ({plans}), {layout}{error}"


def print_tune(document: TuneDocument) -> None:
    """Print what a tuning has found, on stdout."""
    print_parts(tune_parts(document))


def tune_page(document: TuneDocument) -> str:
    """The page as HTML."""
    from mpctl.render.page import page_text

    of_command = "Goes on with it, where time is left:"
    return page_text(tune_parts(document), command=document["command"], of_command=of_command)


def print_waiting(files: list[Path]) -> None:
    """Print which trials are to be run by another launcher, and where their logs go."""
    if not files:
        return
    console = get_console(soft_wrap=True)
    console.print(Text("\nTo run, then call this again", "bold"))
    for path in files:
        console.print(Text(f"  {path}  -> what it prints to {path.with_suffix('.log')}"))


def headline(document: TuneDocument) -> str:
    """`demo on 4 ranks of one core: 11 trials in 0:04:40 of 0:05:00`."""
    trials = [one for one in document["trials"] if one["status"] != "interrupted"]
    device = f" of {document['device']}" if document["device"] else ""
    spent, budget = clock(document["spent_seconds"]), clock(document["budget_seconds"])
    of_time = "" if document["launcher"] else f" in {spent} of {budget}"
    if queued := sum(one.get("waited_seconds", 0.0) for one in trials):
        of_time += f", and {clock(queued)} in the queue"
    name = document["job"].partition(":")[0]
    ranks = plural(document["ranks"], "rank")
    return f"{name} on {ranks}{device}: {plural(len(trials), 'trial')}{of_time}"


def verdict(document: TuneDocument) -> str:
    """Whether the best layout's lead is beyond noise, in words."""
    best = document["best"]
    if best is None:
        return "no layout was measured"
    varies = "varies" if any(len(one["trials"]) > 1 for one in document["layouts"]) else "may vary"
    noise = f"a trial {varies} by {100 * document['noise']:.1f} %"
    lead = "" if best["lead"] is None else f"{lead_text(best['lead'])}, "
    if best["is_settled"]:
        return f"{lead}{noise}; none of {plural(document['candidates'], 'layout')} is likely faster"
    by_number = document["launcher"] or document["ended"] == "trials"
    more = "more --trials tell" if by_number else "a longer --budget tells"
    if not document["rivals"]:
        return f"{lead}{noise}; not settled: the best was measured once, {more}"
    rivals = f"{document['rivals']} of {plural(document['candidates'], 'layout')}"
    return f"{lead}{noise}; not settled: {rivals} may still be faster, {more}"


def lead_text(lead: float) -> str:
    """The best layout beside the next one, whose step takes 1 + lead times as long.

    >>> lead_text(0.034)
    '3.4 % ahead of the next one'
    """
    if abs(lead) < LEVEL:
        return "level with the next one"
    if lead > 0:
        return f"{100 * lead:.1f} % ahead of the next one"
    return f"{-100 * lead:.1f} % behind another in time, ahead by trials and plan together"


def layout_cells(entry: MeasuredEntry) -> tuple[str, ...]:
    """Step times of a layout: planned, fitted, measured and their errors, the range of its
    trials."""
    trials, measured = entry["trials"], entry["step_seconds"]
    planned, fitted = entry["planned_seconds"], entry["fitted_seconds"]
    span = 100 * (max(trials) / min(trials) - 1)
    return (
        _with_error(planned, measured),
        "" if fitted is None else _with_error(fitted, measured),
        seconds_text(measured),
        f"{len(trials)}" + (f", {span:.1f} % apart" if len(trials) > 1 else ""),
        entry["layout"],
    )


def _with_error(planned: float, measured: float) -> str:
    return f"{seconds_text(planned)} ({round(100 * (planned / measured - 1)):+} %)"


LAYOUT_COLUMNS = ("planned", "fitted", "measured", "trials", "layout")


def failed_trials(document: TuneDocument) -> list[TrialEntry]:
    """The trials that gave no step time, without those that were interrupted."""
    silent = ("measured", "running", "interrupted", "written")
    return [one for one in document["trials"] if one["status"] not in silent]


def failure_line(trial: TrialEntry) -> str:
    """`trial 4 out of memory: tp 2 dp 2, micro batch 16: torch.OutOfMemoryError: ...`."""
    words = f": {trial['error']}" if trial["error"] else ""
    return f"trial {trial['number']} {STATUS[trial['status']]}: {trial['layout']}{words}"


def best_lines(best: BestEntry) -> Iterator[str]:
    """The best layout with its speed."""
    step, tokens = seconds_text(best["step_seconds"]), count_text(best["tokens_per_second"])
    yield f"best: {best['layout']}: {step} a step, {tokens} tokens/s"


def learnt_line(document: TuneDocument) -> str:
    """How far plans were from the measured steps, before and after the fit; empty without a
    fit."""
    learnt = document["learnt"]
    before, after = learnt["mean_error_before"], learnt["mean_error_after"]
    if learnt["presets"] is None or before is None or after is None:
        return ""
    return f"plans of the measured layouts were off by {100 * before:.0f} %, fitted to them by {100 * after:.0f} %"


LEGEND = (
    "Seconds of a step by the presets at the beginning (planned), by those fitted to all trials (fitted), each with "
    "its error, and as measured, the mean of its trials."
)
TRIALS_LEGEND = (
    "Planned: by the presets at the beginning; expected: after the trials before it. Queued: in a scheduler's queue, "
    "no part of the budget. Why: the reason for which the layout was chosen."
)
TRIAL_COLUMNS = ("#", "planned", "expected", "measured", "steps", "queued", "took", "layout", "why")


def tune_parts(document: TuneDocument) -> Iterator[Part]:
    """The best layout and its lead, plans beside measurements before and after the fit, every trial, and the
    commands that launch the best."""
    best, layouts = document["best"], document["layouts"]
    yield Sentence(headline(document), "title")
    if best is not None:
        yield from map(Sentence, best_lines(best))
    yield Sentence(verdict(document), "passed" if best and best["is_settled"] else "head")
    yield Sentence(f"ended: {document['words']}" if document["words"] else NOT_ENDED, "note")
    yield Figures(list(_figures(document)))
    yield Section("layouts", "Measured layouts")
    if layouts:
        rows = list(map(layout_cells, layouts[:SHOWN_LAYOUTS]))
        yield table_of("Measured layouts", LAYOUT_COLUMNS, rows, left=("layout",), whole=4)
        if len(layouts) > SHOWN_LAYOUTS:
            yield Sentence(f"and {len(layouts) - SHOWN_LAYOUTS} slower ones", "note")
    else:
        yield Sentence("None yet.", on="page")
    yield Sentence(LEGEND, "note", "page")
    for trial in failed_trials(document):
        yield Sentence(failure_line(trial), "warning")
    if text := learnt_line(document):
        yield Sentence(text)
    if best is not None:
        yield Section("launch", "Launch it")
        yield Lines("Ready to type", list(command_lines(document, best)), are_commands=True)
    yield Section("trials", "Trials")
    trials = [_trial_cells(trial) for trial in document["trials"]]
    yield table_of("Every trial, in order", TRIAL_COLUMNS, trials, left=TRIAL_COLUMNS[-2:], fold="terminal")
    yield Sentence(TRIALS_LEGEND, "note", "page")
    yield Sentence(f"plans, trials and reasons: {document['folder']}/{PAGE}", "note", "terminal")


def _figures(document: TuneDocument) -> Iterator[tuple[str, str]]:
    best = document["best"]
    if best is not None:
        yield "a step", seconds_text(best["step_seconds"])
        yield "tokens/s", count_text(best["tokens_per_second"])
        if best["lead"] is not None:
            yield "lead", lead_text(best["lead"])
    yield "noise of a trial", f"{100 * document['noise']:.1f} %"
    yield "layouts planned", f"{document['candidates']:,}"


def _trial_cells(trial: TrialEntry) -> tuple[str, ...]:
    seconds = trial["step_seconds"]
    outcome = trial["status"].replace("-", " ") if seconds is None else seconds_text(seconds)
    error = f" ({trial['error']})" if trial["error"] else ""
    return (
        str(trial["number"]),
        seconds_text(trial["planned_seconds"]),
        seconds_text(trial["expected_seconds"]),
        outcome,
        str(trial["steps"]),
        clock(waited) if (waited := trial.get("waited_seconds")) else "",
        seconds_text(trial["wall_seconds"]),
        trial["layout"],
        f"{trial['why']}{error}",
    )


def command_lines(document: TuneDocument, best: BestEntry) -> Iterator[str]:
    """The commands that launch the best layout, or write it for the launcher of the trials, and
    plan it on what was learnt."""
    job, launcher = f"{document['folder']}/{best['file']}", document["launcher"]
    yield f"mpctl plan {job} --emit {launcher}" if launcher else best["command"]
    if presets := document["learnt"]["presets"]:
        yield f"MPCTL_PRESETS={document['folder']}/{presets} mpctl plan {job}"
