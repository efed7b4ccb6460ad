"""The lines in which launchers print a step, a row for each: the words before its figures.

A line is a step of a format where it has the format's `mark`, a number after one of the words of
`step`, and a time or a rate. Every figure is the number that follows its words, with spaces, `:` or
`=` between; K, M, B and T directly after it are thousands and so on, as nanotron prints them.

Words and units: Megatron-LM core 0.19 (megatron/training/training.py, training_log) and its forks
(Megatron-DeepSpeed; Primus, `current/mean`); Megatron-Bridge 0.6 (training/utils/train_utils.py);
NeMo 2 (lightning/pytorch/callbacks/progress_printer.py), NeMo 1 in a bar; torchtitan 0.3
(components/metrics.py); DeepSpeed 0.19 (runtime/pipe/engine.py; utils/timer.py, ThroughputTimer);
nanotron of 2026-04 (trainer.py, train_step_logs); tqdm 4.67 (std.py, format_meter); transformers
5.23 (trainer_utils.py, speed_metrics).

torchtitan's tps is tokens a second and *rank*; tqdm's rate is a moving average.

>>> line = " iteration  20/ 100 | elapsed time per iteration (ms): 1250.0 | learning rate: 1e-4 |"
>>> step = read_step(FORMATS[0], line)
>>> (step.number, step.seconds)
(20, 1.25)
"""

from __future__ import annotations

import re
from math import inf
from typing import NamedTuple

_NUMBER = re.compile(
    r"[ :=]{0,24}([-+]?\d{1,15}(?:,\d{3}){0,4}(?:\.\d{0,12})?(?:[eE][-+]?\d{1,3})?)"
    r"(?:([KMBT])(?![A-Za-z]))?"
)
_SUFFIX = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_BAR = re.compile(
    r"\b(\d{1,9})/(\d{1,9}) \[([\d:]{4,12})<[^\]<]{0,48}?[ ,]{1,4}"
    r"(\d{1,9}(?:\.\d{1,6})?)(s/it|it/s|s/step|step/s)"
)
BAR = "trainer"
SUMMARY = "'train_steps_per_second':"


class LogStep(NamedTuple):
    """The figures of one line, as printed: each is None where the launcher does not print it.

    number: of the step. seconds: of a step. tokens_per_second: of all ranks; tokens_per_rank: the
    same of one rank. samples_per_second: of all ranks. tflops: TFLOP/s of a rank. batch: samples
    in a step. line: its number in the log.
    """

    number: int
    seconds: float | None = None
    tokens_per_second: float | None = None
    tokens_per_rank: float | None = None
    samples_per_second: float | None = None
    tflops: float | None = None
    batch: int | None = None
    line: int = 0

    @property
    def duration(self) -> float:
        """What is proportional to the step's time where the layout stays the same: its seconds,
        or one over its rate."""
        if self.seconds is not None:
            return self.seconds
        rates = (self.tokens_per_second, self.tokens_per_rank, self.samples_per_second)
        return next((1 / rate for rate in rates if rate), inf)


class LogFormat(NamedTuple):
    """The words of one launcher's lines. name: of the launcher; software: as a reader knows it.
    without: words of lines that look like a step and are none. looked_for: in an error."""

    name: str
    software: str
    mark: str
    step: tuple[str, ...]
    seconds: tuple[tuple[str, float], ...] = ()
    tokens_per_second: tuple[str, ...] = ()
    tokens_per_rank: tuple[str, ...] = ()
    samples_per_second: tuple[str, ...] = ()
    tflops: tuple[str, ...] = ()
    batch: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    @property
    def looked_for(self) -> str:
        """`elapsed time per iteration (Megatron-LM)`."""
        return f"{self.mark.strip(' :=(')!r} ({self.software})"


FORMATS = (
    LogFormat(
        "megatron", "Megatron-LM", "elapsed time per iteration (",
        step=("iteration",),
        seconds=(("elapsed time per iteration (ms)", 1e-3),
                 ("elapsed time per iteration (s)", 1.0)),
        tokens_per_rank=("tokens per GPU (tokens/s/GPU)", "tokens per gpu per second (tgs)"),
        samples_per_second=("samples per second",),
        tflops=("throughput per GPU (TFLOP/s/GPU)", "TFLOPs"),
        batch=("global batch size",),
    ),
    LogFormat(
        "megatron-bridge", "Megatron-Bridge", "Step Time :",
        step=(), seconds=(("Step Time", 1.0),), tflops=("GPU utilization",),
    ),
    LogFormat(
        "nemo", "NeMo", "train_step_timing in s",
        step=("global_step", "iteration"), seconds=(("train_step_timing in s", 1.0),),
        tokens_per_rank=("tokens_per_sec_per_gpu",), tflops=("TFLOPS_per_GPU",),
        batch=("global_batch_size",),
    ),
    LogFormat(
        "torchtitan", "torchtitan", "tps:",
        step=("step",), seconds=(("step_time", 1.0),), tokens_per_rank=(" tps",),
        tflops=("tflops",), without=("validate step",),
    ),
    LogFormat(
        "torchtitan", "torchtitan before 2025", "wps:",
        step=("step",), tokens_per_rank=(" wps",), without=("validate step",),
    ),
    LogFormat(
        "nanotron", "nanotron", "elapsed_time_per_iteration_ms",
        step=("iteration",), seconds=(("elapsed_time_per_iteration_ms", 1e-3),),
        tokens_per_second=("tokens_per_sec:",), tokens_per_rank=("tokens_per_sec_per_gpu",),
        tflops=("model_tflops_per_gpu",), batch=("global_batch_size",),
    ),
    LogFormat(
        "deepspeed", "DeepSpeed", "iter time (s)",
        step=("steps", "step"), seconds=(("iter time (s)", 1.0),),
        samples_per_second=("samples/sec",),
    ),
    LogFormat(
        "deepspeed", "DeepSpeed", "CurrSamplesPerSec",
        step=("global_step",), samples_per_second=("CurrSamplesPerSec",),
    ),
)  # fmt: skip


def read_step(form: LogFormat, text: str, line: int = 0, before: int = 0) -> LogStep | None:
    """The step that a line is in a format; None where it is none.

    before: the number of the step before it, for formats whose lines have no number.
    """
    if form.mark not in text or any(words in text for words in form.without):
        return None
    number = _first(text, form.step) if form.step else float(before + 1)
    seconds = next((found * unit for words, unit in form.seconds
                    if (found := _first(text, (words,))) is not None), None)  # fmt: skip
    batch = _first(text, form.batch)
    step = LogStep(
        number=int(number) if number is not None and 0 <= number < inf else -1,
        seconds=_above_0(seconds),
        tokens_per_second=_above_0(_first(text, form.tokens_per_second)),
        tokens_per_rank=_above_0(_first(text, form.tokens_per_rank)),
        samples_per_second=_above_0(_first(text, form.samples_per_second)),
        tflops=_above_0(_first(text, form.tflops)),
        batch=int(batch) if batch is not None and 0 < batch < inf else None,
        line=line,
    )
    return step if step.number >= 0 and step.duration < inf else None


def _above_0(value: float | None) -> float | None:
    return value if value is not None and 0 < value < inf else None


def _first(text: str, candidates: tuple[str, ...]) -> float | None:
    """The number after the first of these words that has one."""
    for words in candidates:
        start = text.find(words)
        while start >= 0:
            if (found := _NUMBER.match(text, start + len(words))) is not None:
                return float(found[1].replace(",", "")) * _SUFFIX.get(found[2], 1)
            start = text.find(words, start + 1)
    return None


class BarStep(NamedTuple):
    """A state of a progress bar: the steps done, the steps in all, and seconds for each."""

    done: int
    total: int
    elapsed: int
    seconds: float


def read_bar(text: str) -> BarStep | None:
    """`12/100 [00:20<02:20, 1.60s/it]`; None where there is none, or no rate yet.

    >>> read_bar(" 12%|#   | 12/100 [01:20<02:20,  2.00it/s, loss=2]")
    BarStep(done=12, total=100, elapsed=80, seconds=0.5)
    """
    found = _BAR.search(text) if "<" in text else None
    if found is None or float(found[4]) <= 0:
        return None
    elapsed = 0
    for part in found[3].split(":"):
        elapsed = 60 * elapsed + int(part or 0)
    rate = float(found[4])
    seconds = rate if found[5].startswith("s/") else 1 / rate
    return BarStep(int(found[1]), int(found[2]), elapsed, seconds)


def read_summary(text: str) -> float | None:
    """Seconds of a step over a run, from transformers' last line of figures; None elsewhere."""
    if SUMMARY not in text:
        return None
    rate = _above_0(_first(text, (SUMMARY,)))
    return 1 / rate if rate else None
