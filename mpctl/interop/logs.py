"""The log of a training under another launcher: its steady steps, and what it says of the layout.

A *start* is what one process group printed: it begins with the launcher's dump of its arguments, or
where the number of the step falls back (a restart). Of each start the first WARM_UP_STEPS lines are
left out, as in our own runs, one where fewer than LEAST would remain; then the line after a
checkpoint or an evaluation, whose time some launchers include, lines with another batch than the
last one's (a ramp), and outliers. An outlier is farther from the median than five times the
standard deviation that the median absolute deviation stands for (1.4826 MAD, as of a normal
distribution), and than 10 % of the median. What is left is the steady part; its median is the step.

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

from mpctl.errors import InputError, Issue
from mpctl.interop.log_formats import (
    BAR,
    FORMATS,
    BarStep,
    LogStep,
    read_bar,
    read_step,
    read_summary,
)
from mpctl.interop.log_lines import LogLine, file_lines, plain, text_lines
from mpctl.interop.log_settings import DumpReader, PrintedConfig, head_of
from mpctl.rundir.summary import WARM_UP_STEPS
from mpctl.units import plural, seconds_text

LEAST = 3
"""Steady lines of a log that make a measurement."""
MOST_STEPS = 2_000_000
NORMAL, FAR, LEAST_FAR = 1.4826, 5.0, 0.1
UNLIKE = 0.15
"""Starts whose steps differ by more than this share are different runs, unless their settings are
printed."""
LAUNCHERS = tuple(dict.fromkeys([*(form.name for form in FORMATS), BAR]))
ALIASES = {"accelerate": BAR, "transformers": BAR, "lightning": BAR, "bridge": "megatron-bridge"}
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


@dataclass(frozen=True)
class LogRun:
    """A training as its log has it.

    launcher: one of LAUNCHERS. steps: the steady ones. dropped: how many lines were left out, by
    reason: warm-up, checkpoint or evaluation, other batch, outlier. restarts: starts after the
    first. world_size: ranks, where the log says; config: what it printed of its settings. average:
    seconds of a step over the full run, warm-up included, where the log has nothing better; steps
    is empty then.
    """

    launcher: str
    steps: tuple[LogStep, ...]
    dropped: Mapping[str, int]
    restarts: int
    world_size: int | None
    config: PrintedConfig
    average: float | None = None

    @property
    def step_seconds(self) -> float | None:
        """The median of the steady steps; None where the log has rates alone."""
        return self._median("seconds") or self.average

    @property
    def tokens_per_second(self) -> float | None:
        """Median tokens/s of all ranks; None where the log has no rate, or only that of a rank and
        not their number."""
        whole, of_rank = self._median("tokens_per_second"), self.tokens_per_rank
        return whole or (of_rank * self.world_size if of_rank and self.world_size else None)

    @property
    def tokens_per_rank(self) -> float | None:
        return self._median("tokens_per_rank")

    @property
    def samples_per_second(self) -> float | None:
        return self._median("samples_per_second")

    @property
    def tflops(self) -> float | None:
        """TFLOP/s of a rank, as the launcher counts them."""
        return self._median("tflops")

    @property
    def batch(self) -> int | None:
        """Samples in a step, as printed beside its time."""
        return self.steps[-1].batch if self.steps else None

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

    def _median(self, name: str) -> float | None:
        values = [value for step in self.steps if (value := getattr(step, name)) is not None]
        return median(values) if values else None


def read_log(text: str, launcher: str | None = None, *, where: str = "log") -> LogRun:
    """The run of a log's text. launcher: one of LAUNCHERS (or accelerate, transformers, lightning),
    by default that of which most lines are found. where: the log's name in errors.

    Raises InputError with all issues: no figures, too few steady steps, several runs in one log.
    """
    return _read(text_lines(text), launcher, where)


def read_log_file(path: Path, launcher: str | None = None) -> LogRun:
    """As read_log, of a file, of which a bounded part is in memory at a time."""
    return _read(file_lines(path), launcher, str(path))


@dataclass
class _Start:
    """What one process group printed: its steps by format and rank, whether each came after
    a checkpoint or an evaluation, its settings and its ranks."""

    line: int
    steps: dict[tuple[str, str], list[tuple[LogStep, bool]]] = field(default_factory=dict)
    config: PrintedConfig = field(default_factory=PrintedConfig)
    world_size: int | None = None
    bars: dict[int, list[tuple[BarStep, int]]] = field(default_factory=dict)
    average: float | None = None
    is_aside: bool = False

    def of(self, launcher: str) -> list[tuple[LogStep, bool]]:
        """Its steps in the lines of a launcher, of the format and rank that has most."""
        own = [rows for (name, _), rows in self.steps.items() if name.split("/")[0] == launcher]
        return max(own, key=len, default=[])

    @property
    def ranks(self) -> int | None:
        return self.world_size or self.config.world_size


def _read(lines: Iterator[LogLine], launcher: str | None, where: str) -> LogRun:
    name = ALIASES.get(launcher or "", launcher)
    if name is not None and name not in LAUNCHERS:
        raise InputError.of("log-launcher", where, f"{plain(name, 40)!r} is no launcher whose logs "
                            "are read", f"use {', '.join(LAUNCHERS)}")  # fmt: skip
    starts = _scan(lines)
    averages = [start.average for start in starts if start.average]
    name = name or _launcher(starts) or (BAR if averages else None)
    if name is None:
        raise _no_figures(where)
    found = [start for start in starts if start.of(name)]
    if issues := list(_mixed(found, name, where)):
        raise InputError(issues)
    kept, dropped = _steady(found, name)
    is_average = name == BAR and len(kept) < LEAST and averages
    if not found and not is_average:
        raise _without(starts, where, name)
    if len(kept) < LEAST and not is_average:
        total = sum(len(start.of(name)) for start in found)
        raise _too_few(total, name, where, len(kept), dropped)
    backwards = [*found[-1:], *reversed(starts)]
    world = next((start.ranks for start in backwards if start.ranks), None)
    config = next((s.config for s in backwards if s.config.values), backwards[0].config)
    if is_average:
        return LogRun(name, (), {}, 0, world, config, averages[-1])
    return LogRun(name, tuple(kept), dropped, len(found) - 1, world, config)


def _scan(lines: Iterable[LogLine]) -> list[_Start]:
    starts = [_Start(1)]
    reader, count = DumpReader(), 0
    for line in lines:
        start, text = starts[-1], line.text
        head = head_of(text)
        if head and start.steps:
            start = _Start(line.number)
            starts.append(start)
        reader.read(text, start.config, head)
        step = _step_of(line, start)
        if step is None:
            ranks = _ranks_in(text)
            if ranks and start.steps and start.world_size not in (None, ranks):
                start = _Start(line.number)
                starts.append(start)
            start.world_size = start.world_size or ranks
            _read_aside(line, start)
            continue
        key, found = step
        rows = start.steps.setdefault(key, [])
        last = rows[-1][0].number if rows else -1
        if found.number < last - 2:  # the same step of several ranks may come late
            start = _Start(line.number, is_aside=start.is_aside)
            starts.append(start)
            rows = start.steps.setdefault(key, [])
        elif found.number <= last:
            if found.number == last:
                rows[-1] = (found, rows[-1][1])
            continue
        if (count := count + 1) <= MOST_STEPS:
            rows.append((found, start.is_aside))
        start.is_aside = False
    for start in starts:
        _add_bars(start)
    return starts


def _step_of(line: LogLine, start: _Start) -> tuple[tuple[str, str], LogStep] | None:
    for number, form in enumerate(FORMATS):
        if form.mark in line.text:
            key = f"{form.name}/{number}", line.rank
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
    """What a line without a step says of what delays the next step, or of a bar."""
    text = line.text
    if (bar := read_bar(text)) is not None:
        start.bars.setdefault(bar.total, []).append((bar, line.number))
    elif (average := read_summary(text)) is not None:
        start.average = average
    elif any(word in text for word in _ASIDE_WORDS) and _ASIDE.search(text):
        start.is_aside = True


def _add_bars(start: _Start) -> None:
    """The steps of the progress bar that ran longest, as other bars are of loading or evaluation;
    of states with the same number of steps the last."""
    if not start.bars:
        return
    longest = max(start.bars.values(), key=lambda states: max(s.elapsed for s, _ in states))
    states = {state.done: (state, line) for state, line in longest}
    steps = [LogStep(done, seconds=state.seconds, line=line)
             for done, (state, line) in sorted(states.items())]  # fmt: skip
    start.steps[BAR, ""] = [(step, False) for step in steps]


def _launcher(starts: Sequence[_Start]) -> str | None:
    """The launcher with most lines; a bar only where nothing else has enough."""
    counts = Counter({name: sum(len(s.of(name)) for s in starts) for name in LAUNCHERS})
    bars = counts.pop(BAR)
    name, most = max(counts.items(), key=lambda item: item[1])
    if most >= LEAST or (most and most >= bars):
        is_bridge = name == "megatron" and counts["megatron-bridge"]
        return "megatron-bridge" if is_bridge and most <= counts["megatron-bridge"] else name
    return BAR if bars else None


def _steady(starts: Sequence[_Start], name: str) -> tuple[list[LogStep], dict[str, int]]:
    """The steady steps of all starts, and how many lines were left out for what reason."""
    rows = [start.of(name) for start in starts]
    total = sum(len(of_start) for of_start in rows)
    warm_up = WARM_UP_STEPS if total - WARM_UP_STEPS * len(rows) >= LEAST else 1
    dropped: Counter[str] = Counter()
    after: list[tuple[LogStep, bool]] = []
    for of_start in rows:
        dropped["warm-up"] += min(warm_up, len(of_start))
        after += of_start[warm_up:]
    plain_steps = [step for step, is_aside in after if not is_aside]
    if len(plain_steps) >= LEAST:  # else every line has a checkpoint before it
        dropped["after a checkpoint or evaluation"] = len(after) - len(plain_steps)
    else:
        plain_steps = [step for step, _ in after]
    batch = plain_steps[-1].batch if plain_steps else None
    same = [step for step in plain_steps if step.batch == batch]
    dropped["of another batch"] = len(plain_steps) - len(same)
    kept = _without_outliers(same)
    dropped["outlier" if len(same) - len(kept) == 1 else "outliers"] = len(same) - len(kept)
    return kept, {why: count for why, count in dropped.items() if count}


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


def _mixed(starts: Sequence[_Start], name: str, where: str) -> Iterator[Issue]:
    """Issues of a log with several runs: other ranks, other settings, or, where it prints neither,
    steps that take a different time."""
    first = starts[0] if starts else _Start(1)
    for start in starts[1:]:
        hint = f"cut the log at line {start.line} and give each part with its own layout"
        if first.ranks and start.ranks and first.ranks != start.ranks:
            message = f"it has {first.ranks} ranks at line {first.line} and {start.ranks} at line "
            yield Issue("log-mixed", where, f"{message}{start.line}: more than one run", hint)
        elif changed := first.config.changes(start.config):
            message = f"{changed} from line {start.line} on: more than one run"
            yield Issue("log-mixed", where, message, hint)
        elif not (first.config.values and start.config.values):
            yield from _unlike(first, start, name, where, hint)


def _unlike(first: _Start, start: _Start, name: str, where: str, hint: str) -> Iterator[Issue]:
    one, other = ([step.duration for step, _ in s.of(name)[1:]] for s in (first, start))
    if min(len(one), len(other)) < LEAST:
        return
    a, b = median(one), median(other)
    noise = FAR * NORMAL * max(_deviation(one), _deviation(other))
    if abs(a - b) > max(UNLIKE * min(a, b), noise):
        share = 100 * abs(a - b) / min(a, b)
        what = f"{seconds_text(a)} and {seconds_text(b)}" if _has_seconds(first, name) else "rates"
        message = (
            f"steps of line {first.line} on and of line {start.line} on, after the step's number "
            f"fell back, differ by {share:.0f} % ({what}): more than one run"
        )
        yield Issue("log-mixed", where, message, hint)


def _has_seconds(start: _Start, name: str) -> bool:
    return start.of(name)[-1][0].seconds is not None


def _no_figures(where: str) -> InputError:
    message = "no line has the time or the rate of a step"
    hint = "lines looked for: " + ", ".join(dict.fromkeys(form.looked_for for form in FORMATS))
    return InputError.of("log-no-figures", where, message,
                         f"{hint}, and progress bars '12/100 [00:20<02:20, 1.60s/it]'")  # fmt: skip


def _without(starts: Sequence[_Start], where: str, name: str) -> InputError:
    other = _launcher(starts)
    message = f"it has no step in the lines of {name}"
    hint = f"its lines are those of {other}" if other else "it has no step of any launcher"
    return InputError.of("log-no-figures", where, message, hint)


def _too_few(
    total: int, name: str, where: str, kept: int, dropped: Mapping[str, int]
) -> InputError:
    out = ", ".join(f"{count} {why}" for why, count in dropped.items())
    message = (
        f"{plural(kept, 'steady line')} of {plural(total, 'line')} with a step of {name} "
        f"(left out: {out or 'none'}), and {LEAST} are needed"
    )
    return InputError.of("log-too-short", where, message,
                         "run it longer, or log more often")  # fmt: skip
