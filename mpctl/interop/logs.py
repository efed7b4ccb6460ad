"""The log of a training under another launcher: its steady steps, and what it says of the layout.

A *start* is what one process group printed: it begins with the launcher's dump of its arguments, or
where the number of the step falls back (a restart). Of each start the first WARM_UP_STEPS lines are
left out, as in our own runs, one where fewer than LEAST would remain; then the line after a
checkpoint or an evaluation, whose time some launchers include, lines with another batch than the
last one's (a ramp), and outliers. An outlier is farther from the median than five times the
standard deviation that the median absolute deviation stands for (1.4826 MAD, as of a normal
distribution), and than 10 % of the median. What is left is the steady part; its median is the step.

A log is one run: the steps of one launcher, or of those that print beside each other, and starts
with the same ranks and settings. Where several runs follow each other it is refused (log-mixed)
with the line to cut it at: steps of another launcher; other ranks or another layout printed;
another batch at the same step; and, where not both starts print their settings, other times or
rates.

By hand, times 9, 2, 1, 1.01, 0.99, 1, 4, 1 with a checkpoint before the 4: the warm-up is 9 and 2,
the checkpoint's line is 4, and five steady steps have the median 1.

>>> lines = [f" iteration {n}/ 9 | elapsed time per iteration (ms): {ms} |"
...          for n, ms in enumerate((9000, 2000, 1000, 1010, 990, 1000), 1)]
>>> run = read_log("\\n".join(lines))
>>> run.launcher, run.step_seconds, run.dropped
('megatron', 1.0, {'warm-up': 2})
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

from mpctl.core.errors import InputError, Issue
from mpctl.core.units import plural, seconds_text
from mpctl.interop.log_events import LogEvents
from mpctl.interop.log_formats import BAR, TIMES, LogStep, PrintedConfig, read_bar, read_step, read_summary
from mpctl.interop.log_launchers import LOGS, STEP_LINES, DumpReader, head_of, is_beside, looked_for, ranks_of
from mpctl.interop.log_lines import LogLine, file_pieces, lines_of, plain
from mpctl.records.rundir.summary import WARM_UP_STEPS

LEAST = 3
"""Steady lines of a log that make a measurement."""
LATEST = 10
"""Last steps whose commonest batch is that of the steady ones."""
MOST_STEPS = 2_000_000
NORMAL, FAR, LEAST_FAR = 1.4826, 5.0, 0.1
UNLIKE = 0.15
"""Starts whose steps differ by more than this share are different runs, unless their settings are
printed."""
ALIASES = {"accelerate": BAR, "transformers": BAR, "lightning": BAR, "megatron-bridge": "megatron"}
_ASIDE = re.compile(
    r"sav(?:ing|ed) .{0,40}?checkpoint|saving model|saved the model|validation loss|validate step|"
    r"running evaluation|evaluating|start(?:ing)? validation",
    re.IGNORECASE,
)
_ASIDE_WORDS = ("heckpoint", "odel", "alid", "valuat")  # a line without one needs no search
_WORLD_WORDS = ("world", "Starting", "MEMBER", "processes")
_WORLD = re.compile(
    r"(?:using world size: |Starting with |MEMBER: \d{1,7}/|Num processes: |"
    r"\bworld_size ?[=.]{1,80} ?)(\d{1,7})\b"
)


class LoggedStep(NamedTuple):
    """A step of a log. after: `checkpoint` or `evaluation` where one came before it, else empty; start:
    the number of its start, from 0."""

    step: LogStep
    after: str
    start: int


@dataclass(frozen=True)
class LogRun:
    """A training as its log has it.

    launcher: one of LOGS. steps: the steady ones. dropped: how many lines were left out, by
    reason: warm-up, checkpoint or evaluation, other batch, outlier. restarts: starts after the
    first. world_size: ranks, where the log says; config: what it printed of its settings. average:
    seconds of a step over the full run, warm-up included, where the log has nothing better; steps
    is empty then. every: all steps, the ones that were left out included; events: what else it says.
    """

    launcher: str
    steps: tuple[LogStep, ...]
    dropped: Mapping[str, int]
    restarts: int
    world_size: int | None
    config: PrintedConfig
    average: float | None = None
    every: tuple[LoggedStep, ...] = ()
    events: LogEvents = field(default_factory=LogEvents)

    def figure(self, name: str) -> float | None:
        """The median of a figure of LogStep; None where the launcher does not print it."""
        return _median(self.steps, name)

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a step; None where the log has rates alone."""
        return self.figure("seconds") or self.average

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens/s of all ranks; None where the log has no rate, or only that of a rank and not
        their number."""
        whole, of_rank = self.figure("tokens_per_second"), self.figure("tokens_per_rank")
        return whole or (of_rank * self.world_size if of_rank and self.world_size else None)

    @property
    def spread(self) -> float | None:
        """The standard deviation of the steady steps as a share of their median, from their median
        absolute deviation; None for an average."""
        durations = [step.duration for step in self.steps]
        return NORMAL * _deviation(durations) / median(durations) if durations else None

    @property
    def text(self) -> str:
        """`torchtitan: 41 steady steps, left out: 2 warm-up, 1 outlier, spread 0.4 %`."""
        if not self.steps:
            return f"{self.launcher}: the average of the run, its warm-up included"
        parts = [f"{self.launcher}: {plural(len(self.steps), 'steady line')}"]
        if self.dropped:
            parts.append("left out: " + ", ".join(f"{n} {why}" for why, n in self.dropped.items()))
        if self.restarts:
            parts.append(plural(self.restarts, "restart"))
        return ", ".join([*parts, f"spread {100 * (self.spread or 0):.1f} %"])


def read_log(text: str, launcher: str | None = None, *, where: str = "log") -> LogRun:
    """The run of a log's text. launcher: one of LOGS (or accelerate, transformers, lightning),
    by default that of which most lines are found. where: the log's name in errors.

    Raises InputError with all issues: no figures, too few steady steps, several runs in one log.
    """
    return _read(lines_of([text]), launcher, where)


def read_log_file(path: Path, launcher: str | None = None) -> LogRun:
    """Read the run of a log file, as read_log does; only a bounded part is in memory at a time."""
    return _read(lines_of(file_pieces(path)), launcher, str(path))


Rows = list[tuple[LogStep, str]]
"""Steps, and what came before each: `checkpoint`, `evaluation`, or nothing."""


@dataclass
class _Start:
    """Output of one process group: steps by launcher, kind of line and rank, settings, number of ranks,
    and progress bars by total steps."""

    line: int
    steps: dict[tuple[str, int, str], Rows] = field(default_factory=dict)
    config: PrintedConfig = field(default_factory=PrintedConfig)
    world_size: int | None = None
    bars: dict[int, dict[int, tuple[int, LogStep]]] = field(default_factory=dict)
    average: float | None = None
    aside: str = ""

    def of(self, launcher: str) -> Rows:
        """Steps in the lines of a launcher, of the kind and rank that has most."""
        return max((rows for key, rows in self.steps.items() if key[0] == launcher), key=len, default=[])

    @property
    def ranks(self) -> int | None:
        return ranks_of(self.config) or self.world_size


def _read(lines: Iterator[LogLine], launcher: str | None, where: str) -> LogRun:
    name = ALIASES.get(launcher or "", launcher)
    if name is not None and name not in LOGS:
        raise InputError.of(
            "log-launcher", where, f"{plain(name, 40)!r} is no launcher whose logs are read", f"use {', '.join(LOGS)}"
        )
    events = LogEvents()
    starts = _scan(lines, events)
    averages = [start.average for start in starts if start.average]
    name = name or _launcher(starts) or (BAR if averages else None)
    if name is None:
        hint = f"lines looked for: {', '.join(looked_for())}, and progress bars"
        raise InputError.of(
            "log-no-figures",
            where,
            "no line has the time or the rate of a step",
            f"{hint} '12/100 [00:20<02:20, 1.60s/it]'",
        )
    for start in starts:
        if start.config.kind and not is_beside(start.config.kind, name):
            start.config = PrintedConfig()  # of another launcher, which made no steps
    found = [start for start in starts if start.of(name)]
    if issues := [*_several_launchers(starts, name, where), *_several_runs(found, name, where)]:
        raise InputError(issues)
    kept, dropped = _steady([start.of(name) for start in found])
    is_average = name == BAR and len(kept) < LEAST and averages
    if not found and not is_average:
        other = _launcher(starts)
        hint = f"its lines are those of {other}" if other else "it has no step of any launcher"
        raise InputError.of("log-no-figures", where, f"it has no step in the lines of {name}", hint)
    if len(kept) < LEAST and not is_average:
        total = sum(len(start.of(name)) for start in found)
        out = ", ".join(f"{count} {why}" for why, count in dropped.items())
        message = (
            f"{plural(len(kept), 'steady line')} of {plural(total, 'line')} with a step of {name} "
            f"(left out: {out or 'none'}), and {LEAST} are needed"
        )
        raise InputError.of("log-too-short", where, message, "run it longer, or log more often")
    backwards = [*found[-1:], *reversed(starts)]
    world = next((start.ranks for start in backwards if start.ranks), None)
    config = next((s.config for s in backwards if s.config.values), backwards[0].config)
    if is_average:
        return LogRun(name, (), {}, 0, world, config, averages[-1], events=events)
    every = (LoggedStep(*row, number) for number, start in enumerate(found) for row in start.of(name))
    return LogRun(name, tuple(kept), dropped, len(found) - 1, world, config, every=tuple(every), events=events)


def _scan(lines: Iterable[LogLine], events: LogEvents) -> list[_Start]:
    """The starts of a log; the first may hold what was printed before any. events: filled."""
    starts = [_Start(1)]
    reader, count, newest = DumpReader(), 0, 0
    for line in lines:
        events.read(line.text, newest)
        start, head = starts[-1], head_of(line.text)
        step = None if head else _step_of(line, start)
        if step is None:
            ranks = _ranks_in(line.text)
            if start.steps and (head or (ranks and start.world_size not in (None, ranks))):
                starts.append(start := _Start(line.number))
            reader.read(line.text, start.config, head)
            start.world_size = start.world_size or ranks
            _read_aside(line, start)
            continue
        key, found = step
        newest = found.number
        rows = start.steps.setdefault(key, [])
        last = rows[-1][0].number if rows else -1
        if found.number < last - 2:  # the same step of several ranks may come late
            starts.append(start := _Start(line.number, aside=start.aside))
            rows = start.steps.setdefault(key, [])
        elif found.number <= last:
            if found.number == last:
                rows[-1] = (found, rows[-1][1])
            continue
        if (count := count + 1) <= MOST_STEPS:
            rows.append((found, start.aside))
        start.aside = ""
    for start in starts:
        _add_bars(start)
    return starts


def _step_of(line: LogLine, start: _Start) -> tuple[tuple[str, int, str], LogStep] | None:
    for name, number, form in STEP_LINES:
        if form.mark in line.text:
            key = name, number, line.rank
            rows = start.steps.get(key)
            before = rows[-1][0].number if rows else 0
            if (step := read_step(form, line.text, line.number, before)) is not None:
                return key, step
    return None


def _ranks_in(text: str) -> int | None:
    """The ranks of a process group that a line names."""
    if ":print]" in text or not any(word in text for word in _WORLD_WORDS):
        return None  # the former are DeepSpeed's settings, whose world_size counts replicas
    found = _WORLD.search(text)
    return int(found[1]) or None if found else None


def _read_aside(line: LogLine, start: _Start) -> None:
    """Read a line without a step: a progress bar, a summary, or work that delays the next step."""
    text = line.text
    if (bar := read_bar(text, line.number)) is not None:
        total, elapsed, step = bar
        start.bars.setdefault(total, {})[step.number] = elapsed, step
    elif (average := read_summary(text)) is not None:
        start.average = average
    elif any(word in text for word in _ASIDE_WORDS) and (found := _ASIDE.search(text)):
        is_save = found[0][:3].lower() == "sav"
        start.aside = "checkpoint" if is_save or start.aside == "checkpoint" else "evaluation"


def _add_bars(start: _Start) -> None:
    """The steps of the progress bar that ran longest, as others are of loading or evaluation."""
    if start.bars:
        longest = max(start.bars.values(), key=lambda states: max(states.values())[0])
        start.steps[BAR, 0, ""] = [(step, "") for _, (_, step) in sorted(longest.items())]


def _launcher(starts: Sequence[_Start]) -> str | None:
    """The launcher with most lines; a bar only where nothing else has enough."""
    counts = Counter({name: sum(len(s.of(name)) for s in starts) for name in LOGS})
    bars = counts.pop(BAR)
    name, most = max(counts.items(), key=lambda item: item[1])
    if most >= LEAST or (most and most >= bars):
        return name
    return BAR if bars else None


def _steady(rows: Sequence[Rows]) -> tuple[list[LogStep], dict[str, int]]:
    """The steady steps of all starts, and how many lines were left out for what reason."""
    total = sum(map(len, rows))
    warm_up = WARM_UP_STEPS if total - WARM_UP_STEPS * len(rows) >= LEAST else 1
    dropped: Counter[str] = Counter()
    after: Rows = []
    for of_start in rows:
        dropped["warm-up"] += min(warm_up, len(of_start))
        after += of_start[warm_up:]
    steps = [step for step, aside in after if not aside]
    if len(steps) < LEAST:  # every line has a checkpoint before it
        steps = [step for step, _ in after]
    dropped["after a checkpoint or evaluation"] = len(after) - len(steps)
    batch = last_batch(steps)
    same = [step for step in steps if step.batch in (None, batch)]
    dropped["of another batch"] = len(steps) - len(same)
    kept = _without_outliers(same)
    dropped["outlier" if len(same) - len(kept) == 1 else "outliers"] = len(same) - len(kept)
    return kept, {why: count for why, count in dropped.items() if count}


def last_batch(steps: Sequence[LogStep]) -> float | None:
    """The commonest batch of the last LATEST steps that state one: the last line may be cut, as in the log of a
    run that was killed. None where no step states one."""
    stated = [step.batch for step in steps if step.batch][-LATEST:]
    return Counter(reversed(stated)).most_common(1)[0][0] if stated else None


def _without_outliers(steps: Sequence[LogStep]) -> list[LogStep]:
    if not steps:
        return []
    durations = [step.duration for step in steps]
    middle = median(durations)
    far = max(FAR * NORMAL * _deviation(durations), LEAST_FAR * middle)
    return [step for step in steps if abs(step.duration - middle) <= far]


def _deviation(values: Sequence[float]) -> float:
    """The median absolute deviation."""
    middle = median(values)
    return median(abs(value - middle) for value in values)


def _median(steps: Iterable[LogStep], figure: str) -> float | None:
    values = [value for step in steps if (value := getattr(step, figure)) is not None]
    return median(values) if values else None


def _cut(line: int) -> str:
    return f"cut the log at line {line} and give each part with its own layout"


def _several_launchers(starts: Sequence[_Start], name: str, where: str) -> Iterator[Issue]:
    """Issues of steps of a launcher that is not of this run, or none of whose lines stands between
    the first and the last of this run's. Bars alone are of loading, too."""
    first, last = _lines_of(starts, name)
    for other in LOGS:
        begin, end = _lines_of(starts, other)
        is_apart = end < first or last < begin or not is_beside(other, name)
        if other in (name, BAR) or not begin or not first or not is_apart:
            continue
        (_, one, one_end), (cut, two, two_end) = sorted(((first, name, last), (begin, other, end)))
        message = f"steps of {one} from line {min(first, begin)} to {one_end}, and of {two} from "
        message += f"line {cut} to {two_end}: more than one run"
        head = max((s.line for s in starts if one_end < s.line <= cut), default=cut)
        yield Issue("log-mixed", where, message, _cut(head))


def _lines_of(starts: Sequence[_Start], name: str) -> tuple[int, int]:
    """The lines of a launcher's first and last step; 0 where it has fewer than LEAST."""
    lines = [step.line for start in starts for step, _ in start.of(name)]
    return (min(lines), max(lines)) if len(lines) >= LEAST else (0, 0)


def _several_runs(starts: Sequence[_Start], name: str, where: str) -> Iterator[Issue]:
    """Issues of starts of different runs, each beside the first."""
    first = starts[0] if starts else _Start(1)
    batches = {step.number: step for step, _ in first.of(name) if step.batch}
    for start in starts[1:]:
        other = next(
            (
                (batches[step.number], step)
                for step, _ in start.of(name)
                if step.number in batches and step.batch not in (None, batches[step.number].batch)
            ),
            None,
        )
        message = ""
        if first.ranks and start.ranks and first.ranks != start.ranks:
            message = f"{first.ranks} ranks at line {first.line} and {start.ranks} at line "
            message += f"{start.line}"
        elif changed := first.config.changes(start.config):
            message = f"{changed} from line {start.line} on"
        elif other is not None:
            message = " and ".join(f"{step.batch:.0f} samples at line {step.line}" for step in other)
            message = f"step {other[0].number} has {message}"
        elif not (first.config.values and start.config.values):
            message = _unlike(first, start, name)
        if message:
            yield Issue("log-mixed", where, f"{message}: more than one run", _cut(start.line))


def _unlike(first: _Start, start: _Start, name: str) -> str:
    """Describe how far the steps of two starts differ, if by more than UNLIKE and their noise; empty otherwise."""
    for figure in TIMES:
        one, other = ([value for step, _ in s.of(name)[1:] if (value := getattr(step, figure))] for s in (first, start))
        if min(len(one), len(other)) < LEAST:
            continue
        a, b = median(one), median(other)
        noise = FAR * NORMAL * max(_deviation(one), _deviation(other))
        if abs(a - b) > max(UNLIKE * min(a, b), noise):
            said = f"{seconds_text(a)} and {seconds_text(b)}"
            said = said if figure == "seconds" else f"{a:,.0f} and {b:,.0f} {RATES[figure]}"
            return (
                f"steps of line {first.line} on and of line {start.line} on, after the step's "
                f"number fell back, differ by {100 * abs(a - b) / min(a, b):.0f} % ({said})"
            )
    return ""


RATES = {"tokens_per_second": "tokens/s", "tokens_per_rank": "tokens/s of a rank", "samples_per_second": "samples/s"}
