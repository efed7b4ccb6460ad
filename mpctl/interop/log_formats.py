"""What each launcher prints in its log, a row for each: lines of steps, and its settings.

A line is a step where it has the `mark` of a StepFormat, a number of the step, and a time or a
rate. A figure is the number that follows its words, with spaces, `:` or `=` between; K, M, B and T
after it are thousands and so on, as nanotron prints them. Where the time (without one the rate) is
NaN, infinite or not above 0, the line is no step.

Words and units: Megatron-LM core 0.19 (megatron/training/training.py, training_log) and its forks
(Megatron-DeepSpeed; Primus, `current/mean`); Megatron-Bridge 0.6 (training/utils/train_utils.py);
NeMo 2 (lightning/pytorch/callbacks/progress_printer.py), NeMo 1 in a bar; torchtitan 0.3
(components/metrics.py), whose tps are tokens a second and *rank*; DeepSpeed 0.19
(runtime/pipe/engine.py; utils/timer.py, ThroughputTimer); nanotron of 2026-04 (trainer.py,
train_step_logs); tqdm 4.67 (std.py, format_meter), whose rate is a moving average; transformers
5.23 (trainer_utils.py, speed_metrics).

>>> line = " iteration  20/ 100 | elapsed time per iteration (ms): 1250.0 | learning rate: 1e-4 |"
>>> step = read_step(LAUNCHERS["megatron"].lines[0], line)
>>> (step.number, step.seconds)
(20, 1.25)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import inf, nan, prod
from typing import NamedTuple

from mpctl.interop import log_settings as printed
from mpctl.interop.log_settings import PrintedConfig
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
_VOCAB = re.compile(r"padded vocab \(size: (\d{1,9})\)")
BAR = "trainer"
SUMMARY = "'train_steps_per_second':"
TIMES = ("seconds", "tokens_per_second", "tokens_per_rank", "samples_per_second")


class LogStep(NamedTuple):
    """The figures of one line, as printed: each is None where the launcher does not print it.

    number: of the step. line: its number in the log. seconds: of a step. tokens_per_second: of all
    ranks; tokens_per_rank: the same of one rank. samples_per_second: of all ranks. tflops: TFLOP/s
    of a rank. batch: samples in a step.
    """

    number: int
    line: int = 0
    seconds: float | None = None
    tokens_per_second: float | None = None
    tokens_per_rank: float | None = None
    samples_per_second: float | None = None
    tflops: float | None = None
    batch: float | None = None

    @property
    def duration(self) -> float:
        """What is proportional to the step's time where the layout stays the same: its seconds,
        or one over its rate."""
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


class LauncherLog(NamedTuple):
    """How a launcher's log reads. beside: others whose lines and settings a run of it prints too.
    emitted: its name in `--emit`.

    heads: what the dump of its settings begins with; read: adds what a line of the dump says to the
    settings, False at its end; ranks: the settings whose product are the ranks; job: the settings
    as a job's, None where they are not enough."""

    name: str
    software: str
    lines: tuple[StepFormat, ...] = ()
    beside: tuple[str, ...] = ()
    emitted: str = ""
    heads: tuple[str, ...] = ()
    read: Callable[[str, str, list[str], PrintedConfig], bool] | None = None
    ranks: tuple[str, ...] = ()
    job: Callable[[Mapping[str, str]], ReadJob | None] | None = None


_ROWS = (
    LauncherLog(
        "megatron",
        "Megatron-LM",
        (
            StepFormat(
                "elapsed time per iteration (",
                {
                    "number": ("iteration",),
                    "milliseconds": ("elapsed time per iteration (ms)",),
                    "seconds": ("elapsed time per iteration (s)",),
                    "tokens_per_rank": ("tokens per GPU (tokens/s/GPU)", "tokens per gpu per second (tgs)"),
                    "samples_per_second": ("samples per second",),
                    "batch": ("global batch size",),
                    "tflops": ("throughput per GPU (TFLOP/s/GPU)", "TFLOPs"),
                },
            ),
        ),
        heads=(" arguments --",),
        read=printed.read_megatron,
        ranks=("world_size",),
        job=printed.megatron_job,
    ),
    LauncherLog(
        "megatron-bridge",
        "Megatron-Bridge",
        (StepFormat("Step Time :", {"seconds": ("Step Time",), "tflops": ("GPU utilization",)}),),
        beside=("megatron",),
        heads=("- Task Configuration -",),
        read=printed.read_bridge,
        job=printed.bridge_job,
    ),
    LauncherLog(
        "nemo",
        "NeMo",
        (
            StepFormat(
                "train_step_timing in s",
                {
                    "number": ("global_step", "iteration"),
                    "seconds": ("train_step_timing in s",),
                    "tokens_per_rank": ("tokens_per_sec_per_gpu",),
                    "tflops": ("TFLOPS_per_GPU",),
                    "batch": ("global_batch_size",),
                },
            ),
        ),
        emitted="megatron-bridge",
    ),
    LauncherLog(
        "torchtitan",
        "torchtitan",
        (
            StepFormat(
                "tps:",
                {"number": ("step",), "seconds": ("step_time",), "tokens_per_rank": (" tps",), "tflops": ("tflops",)},
                "validate step",
            ),
            StepFormat("wps:", {"number": ("step",), "tokens_per_rank": (" wps",)}, "validate step", " before 2025"),
        ),
        heads=("Running with configs: {", "Building device mesh with", "-D device mesh with"),
        read=printed.read_torchtitan,
        ranks=tuple(f"mesh.{axis}" for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")),
        job=printed.torchtitan_job,
    ),
    LauncherLog(
        "nanotron",
        "nanotron",
        (
            StepFormat(
                "elapsed_time_per_iteration_ms",
                {
                    "number": ("iteration",),
                    "milliseconds": ("elapsed_time_per_iteration_ms",),
                    "tokens_per_second": ("tokens_per_sec:",),
                    "batch": ("global_batch_size",),
                    "tokens_per_rank": ("tokens_per_sec_per_gpu",),
                    "tflops": ("model_tflops_per_gpu",),
                },
            ),
        ),
        heads=("Config(general=",),
        read=printed.read_nanotron,
        ranks=tuple(f"parallelism.{axis}" for axis in ("dp", "tp", "pp", "context_parallel_size")),
        job=printed.nanotron_job,
    ),
    LauncherLog(
        "deepspeed",
        "DeepSpeed",
        (
            StepFormat(
                "iter time (s)",
                {"number": ("steps", "step"), "seconds": ("iter time (s)",), "samples_per_second": ("samples/sec",)},
            ),
            StepFormat("CurrSamplesPerSec", {"number": ("global_step",), "samples_per_second": ("CurrSamplesPerSec",)}),
        ),
        beside=("megatron", BAR),
    ),
    LauncherLog(BAR, "accelerate, transformers, Lightning", emitted="accelerate"),
)
LAUNCHERS: Mapping[str, LauncherLog] = {row.name: row for row in _ROWS}
STEP_LINES = [(row.name, number, line) for row in _ROWS for number, line in enumerate(row.lines)]
_HEADS = {head: row.name for row in _ROWS for head in row.heads}
_HEAD = re.compile("|".join(map(re.escape, _HEADS)))


def looked_for() -> list[str]:
    """`'elapsed time per iteration' (Megatron-LM)`, for each kind of line."""
    return [f"{line.mark.strip(' :=(')!r} ({LAUNCHERS[name].software}{line.version})" for name, _, line in STEP_LINES]


def is_beside(one: str, other: str) -> bool:
    """Whether a run prints lines or settings of both launchers."""
    return one == other or other in LAUNCHERS[one].beside or one in LAUNCHERS[other].beside


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


def head_of(text: str) -> str:
    """The head of a dump of settings that begins in this line; empty where none does."""
    found = _HEAD.search(text)
    return found[0] if found and "end of arguments" not in text else ""


class DumpReader:
    """Reads the dumps of settings in the lines of a log, one after the other."""

    def __init__(self) -> None:
        self._open: LauncherLog | None = None
        self._state: list[str] = []

    def read(self, text: str, config: PrintedConfig, head: str) -> None:
        """Add what a line says to the settings. head: its `head_of`."""
        if head:
            self._open, self._state = LAUNCHERS[_HEADS[head]], []
            config.begin(self._open.name)
        if self._open is None or self._open.read is None:
            if "padded vocab" in text and (found := _VOCAB.search(text)):
                config.add("vocab_size", found[1])
        elif not self._open.read(text, head, self._state, config):
            self._open = None


def ranks_of(config: PrintedConfig) -> int | None:
    """The ranks that printed settings say, or whose product they are."""
    names = LAUNCHERS[config.kind].ranks if config.kind else ()
    sizes = [config.values[name] for name in names if name in config.values]
    if not sizes or not all(size.isdecimal() and len(size) < 9 for size in sizes):
        return None
    return prod(map(int, sizes)) or None


def read_printed(config: PrintedConfig) -> ReadJob | None:
    """The job that printed settings are; None where there are none that are enough. Raises
    InputError as `--from` does, for settings that no job says."""
    job = LAUNCHERS[config.kind].job if config.kind else None
    return job(config.values) if job is not None else None
