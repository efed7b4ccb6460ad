"""Step lines and printed settings in the log of a launcher.

A line is a step where it has the `mark` of a StepFormat, a number of the step, and a time or a
rate. A figure is the number that follows its words, with spaces, `:` or `=` between; K, M, B and T
after it are thousands and so on, as nanotron prints them. Where the time (without one the rate) is
NaN, infinite or not above 0, the line is no step. Each launcher's words are in its own module
(`LauncherLog`), but for progress bars: tqdm 4.67 (std.py, format_meter), whose rate is a moving
average, and transformers 5.23 (trainer_utils.py, speed_metrics).

Printed settings are text under dotted names, at most MOST of them, of LONGEST_VALUE characters each.

>>> form = StepFormat("ms:", {"number": ("step",), "milliseconds": ("ms",)})
>>> step = read_step(form, "step 20/100 ms: 1250.0")
>>> (step.number, step.seconds)
(20, 1.25)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf, nan
from typing import NamedTuple

from mpctl.interop.mapping import ReadJob

_NUMBER = re.compile(
    r"[ :=]{0,24}([-+]?(?:\d{1,15}(?:,\d{3}){0,4}(?:\.\d{0,12})?(?:[eE][-+]?\d{1,3})?"
    r"|(?i:nan|inf(?:inity)?)\b))(?:([KMBT])(?![A-Za-z]))?"
)
_SUFFIX = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_BAR = re.compile(
    r"\b(\d{1,9})/(\d{1,9}) \[([\d:]{4,12})<[^\]<]{0,48}?[ ,]{1,4}"
    r"(\d{1,9}(?:\.\d{1,6})?)(s/it|it/s|s/step|step/s)"
)
_BAR_STEP = re.compile(r"\b(\d{1,9})/\d{1,9} \[[\d:]{4,12}<")
_TRAINER = re.compile(r"\{'loss': [^{}]{1,4096}\}")
_FIGURE = re.compile(r"'([a-z_]{1,64})': '?(-?\d{1,15}(?:\.\d{0,18})?(?:e[-+]?\d{1,3})?)'?(?=[,}])")
BAR = "trainer"
"""The name of the bars of accelerate, transformers and Lightning."""
MOST, LONGEST_VALUE = 5_000, 2_000
OF_LAYOUT = re.compile(
    r"parallel|batch|seq_len|sequence_length|num_(?:hidden_)?layers|hidden_size|world_size|^mesh\.|"
    r"recompute|activation_checkpoint|zero_stage|distributed_optimizer|reshard|overlap|expert|"
    r"dtype|precision|(?:^|\.)(?:bf16|fp16|fp8|fp4)"
)
"""Names of values that make another run of a log's later part where they change: what a step's time
depends on, and not steps, rates, folders and the like, which a restart may change."""
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{1,16}")
SUMMARY = "'train_steps_per_second':"
TIMES = ("seconds", "tokens_per_second", "tokens_per_rank", "samples_per_second")


class LogStep(NamedTuple):
    """The figures of one line, as printed: each is None where the launcher does not print it.

    number: of the step. line: its number in the log. seconds: of a step. tokens_per_second: of all
    ranks; tokens_per_rank: the same of one rank. samples_per_second: of all ranks. tflops: TFLOP/s
    of a rank. batch: samples in a step. mfu: in percent.
    """

    number: int
    line: int = 0
    seconds: float | None = None
    tokens_per_second: float | None = None
    tokens_per_rank: float | None = None
    samples_per_second: float | None = None
    tflops: float | None = None
    batch: float | None = None
    mfu: float | None = None

    @property
    def duration(self) -> float:
        """Seconds of a step, or the inverse of its rate: proportional to the step time if the layout stays the same."""
        rates = (self.tokens_per_second, self.tokens_per_rank, self.samples_per_second)
        return self.seconds or next((1 / rate for rate in rates if rate), inf)


class StepFormat(NamedTuple):
    """The words of a line of a step. figures: those before each figure of LogStep, the likeliest
    first (`milliseconds` are its seconds); where no words say the number, lines are counted.
    without: words of lines that look like it and are none. version: in an error."""

    mark: str
    figures: Mapping[str, tuple[str, ...]]
    without: str = "\n"
    version: str = ""


@dataclass
class PrintedConfig:
    """The settings that a log prints. kind: the launcher that prints them, empty where there are
    none; values: as text, by dotted name."""

    kind: str = ""
    values: dict[str, str] = field(default_factory=dict)

    def begin(self, kind: str) -> None:
        """A dump of a launcher begins; what another one printed is no longer of this run."""
        if kind != self.kind:
            self.kind, self.values = kind, {}

    def add(self, name: str, value: str) -> None:
        if len(self.values) < MOST:
            self.values[name] = value[:LONGEST_VALUE].strip()

    def changes(self, other: PrintedConfig) -> str:
        """`tensor_model_parallel_size 4 becomes 8`, the first of those of the layout; empty where
        none changes."""
        for name, old in self.values.items() if self.kind == other.kind else ():
            new = other.values.get(name, old)
            is_other = old != new and ADDRESS.sub("", old) != ADDRESS.sub("", new)
            if is_other and OF_LAYOUT.search(name):
                return f"{name} {old} becomes {new}"
        return ""


class LauncherLog(NamedTuple):
    """How a launcher's log reads. beside: others whose lines and settings a run of it prints too.

    heads: what the dump of its settings begins with; read: adds what a line of the dump says to the
    settings, False at its end; ranks: the settings whose product are the ranks; job: the settings
    as a job's, None where they are not enough."""

    name: str
    software: str
    lines: tuple[StepFormat, ...] = ()
    beside: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    read: Callable[[str, str, list[str], PrintedConfig], bool] | None = None
    ranks: tuple[str, ...] = ()
    job: Callable[[Mapping[str, str]], ReadJob | None] | None = None


def read_step(form: StepFormat, text: str, line: int = 0, before: int = 0) -> LogStep | None:
    """The step that a line is; None where it is none. before: the number of the step before it, for
    lines without a number."""
    if form.mark not in text or form.without in text:
        return None
    found = {
        figure: value for figure, candidates in form.figures.items() if (value := _number(text, candidates)) is not None
    }
    if "milliseconds" in found:
        found["seconds"] = found.pop("milliseconds") / 1000
    number = found.pop("number", nan) if "number" in form.figures else before + 1
    time = next((found[figure] for figure in TIMES if figure in found), nan)
    if not (0 <= number < inf and 0 < time < inf):
        return None
    sane = {figure: value for figure, value in found.items() if 0 < value < inf}
    step = LogStep(int(number), line, **sane)
    return step if step.duration < inf else None


def _number(text: str, candidates: tuple[str, ...]) -> float | None:
    """The number after the first of these words that has one."""
    for words in candidates:
        start = text.find(words)
        while start >= 0:
            if (found := _NUMBER.match(text, start + len(words))) is not None:
                return float(found[1].replace(",", "")) * _SUFFIX.get(found[2], 1)
            start = text.find(words, start + 1)
    return None


def read_bar(text: str, line: int = 0) -> tuple[int, int, LogStep] | None:
    """A state of a progress bar: its steps in all, the seconds so far, and the step, such as
    `12/100 [00:20<02:20, 1.60s/it]`; None where there is none, or no rate yet.

    >>> total, elapsed, step = read_bar(" 12%|#   | 12/100 [01:20<02:20,  2.00it/s, loss=2]")
    >>> total, elapsed, step.number, step.seconds
    (100, 80, 12, 0.5)
    """
    found = _BAR.search(text) if "<" in text else None
    if found is None or (rate := float(found[4])) <= 0:
        return None
    elapsed = 0
    for part in found[3].split(":"):
        elapsed = 60 * elapsed + int(part or 0)
    seconds = rate if found[5].startswith("s/") else 1 / rate
    return int(found[2]), elapsed, LogStep(int(found[1]), line, seconds)


def bar_step(text: str) -> int | None:
    """The step that a progress bar shows, also one that has no rate yet; None without a bar.

    >>> bar_step("  2%|          | 1/40 [00:00<?, ?it/s]")
    1
    """
    found = _BAR_STEP.search(text)
    return int(found[1]) if found else None


def read_trainer(text: str) -> dict[str, float]:
    """The figures of a step of transformers' Trainer, of which `loss` is one; empty for any other
    line. It prints them as numbers, and since version 5 as strings. The step is that of the bar
    that is drawn again below it.

    >>> read_trainer("{'loss': '1.265', 'grad_norm': '1.37', 'epoch': '0.15'}")
    {'loss': 1.265, 'grad_norm': 1.37, 'epoch': 0.15}
    >>> read_trainer("{'loss': 1.265, 'epoch': 0.15}")["loss"]
    1.265
    >>> read_trainer("{'eval_loss': '0.75', 'epoch': '0.6'}")
    {}
    """
    found = _TRAINER.search(text)
    figures = {} if found is None else {n: float(v) for n, v in _FIGURE.findall(found[0])}
    return figures if {"loss", "epoch"} <= figures.keys() else {}


def read_summary(text: str) -> float | None:
    """Seconds of a step over a run, from transformers' last line of figures; None elsewhere."""
    rate = _number(text, (SUMMARY,)) or 0.0
    return 1 / rate if 0 < rate < inf and 1 / rate < inf else None
