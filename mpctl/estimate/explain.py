"""The figures of a step's time with the formulas that gave them.

By hand, `time.compute` of 8 micro batches of 0.5 s on the busiest stage: 4 s = 8 x 0.5 s.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpctl.estimate.figure import Figure, Unit
from mpctl.estimate.kernels import MissingFigure
from mpctl.estimate.network import MissingLink
from mpctl.estimate.op_times import OpTimes
from mpctl.estimate.step import PARTS, StepTime
from mpctl.estimate.time import StepTimeModel, get_clock
from mpctl.layout.job_layout import JobLayout
from mpctl.units import seconds_text


def explain_time(layout: JobLayout) -> list[Figure]:
    """Figures of the step's time; none where no time can be stated."""
    try:
        clock = get_clock(layout)
        return list(_figures(clock, clock.step()))
    except (MissingFigure, MissingLink):
        return []


def _figures(clock: StepTimeModel, time: StepTime) -> Iterator[Figure]:
    parts = time.parts()
    numbers = " + ".join(map(seconds_text, parts.values()))
    yield _seconds("time.step", time.total, " + ".join(parts), numbers)
    layout, m = clock.layout, clock.layout.num_microbatches
    for part in PARTS:
        value = parts[part.name]
        each = f"{m} x {seconds_text(value / m)}" if part.is_per_microbatch else seconds_text(value)
        yield _seconds(f"time.{part.name}", value, part.formula, each)
    yield from _band(clock, time)
    yield from _rates(clock, time)
    for stack, flow in zip(layout.table.stacks, layout.table.flows, strict=True):
        if flow.last is not None:
            work = clock.operators.block(stack, flow.last)
            beside = "gradients of weights" if layout.grid.mode == "1d" else "their own products"
            yield from _layer(f"time.{stack.figure_name}", work, beside)
    for stage, row in enumerate(clock.passes):
        for chunk, found in enumerate(row):
            prefix = f"time.stage-{stage}" + (f".chunk-{chunk}" if len(row) > 1 else "")
            for way, seconds in (
                ("forward", found.chunk.forward),
                ("backward", found.chunk.backward),
            ):
                yield _seconds(f"{prefix}.{way}", seconds, "one micro batch, messages included",
                               seconds_text(seconds))  # fmt: skip


def _band(clock: StepTimeModel, time: StepTime) -> Iterator[Figure]:
    told = "; ".join(time.extrapolates) or "within what was measured"
    source = clock.operators.profile.source
    for name, sign in (("low", "/"), ("high", "x")):
        numbers = f"{seconds_text(time.total)} {sign} {time.band.factor:.3f} ({told})"
        formula = f"step {sign} exp(1.645 x spread of measured errors): 9 of 10 runs lie in between"
        yield _seconds(f"time.{name}", getattr(time, name), formula, numbers, source)


def _rates(clock: StepTimeModel, time: StepTime) -> Iterator[Figure]:
    device = clock.layout.job.cluster.device
    source = device.source if device else ""
    for name, what, flops in (
        ("mfu", "the model's", time.model_flops), ("hfu", "the hardware's", time.hardware_flops)
    ):  # fmt: skip
        yield Figure(
            f"time.{name}", getattr(time, name), "", f"{what} FLOP a rank / (step time x peak)",
            f"{flops:.4g} / ({seconds_text(time.total)} x {time.peak:.4g})", source,
        )  # fmt: skip


def _layer(prefix: str, times: OpTimes, beside: str) -> Iterator[Figure]:
    """beside: what may hide messages over tp in backward."""
    for name, seconds, formula in (
        ("forward", times.forward, "matrix products, attention, element-wise kernels"),
        ("inputs", times.dgrad, "gradients of inputs, and recomputation"),
        ("weights", times.wgrad, "gradients of weights, and adding them up"),
        ("tp_forward", times.tp_forward, "messages over tp"),
        ("tp_backward", times.tp_backward, f"messages over tp that {beside} do not hide"),
        ("cp_forward", times.cp_forward, "messages over cp"),
        ("cp_backward", times.cp_backward, "messages over cp"),
        ("host_forward", times.host_forward, "launching kernels"),
        ("host_backward", times.host_backward, "launching kernels"),
    ):
        if seconds:
            what = f"{formula}, one layer and micro batch"
            yield _seconds(f"{prefix}.{name}", seconds, what, seconds_text(seconds))


def _seconds(name: str, value: float, formula: str, numbers: str, source: str = "") -> Figure:
    unit: Unit = "s"
    return Figure(name, value, unit, formula, numbers, source)
