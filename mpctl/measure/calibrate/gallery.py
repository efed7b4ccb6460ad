"""A row of the gallery: a run that somebody measured, as the line that plans it, next to its forecast.

Rows come from outside: every text is of bounded length, and the line is read as options of `mpctl plan`, never run.
By hand, a step of 10 s that is planned at 11 s: an error of +10 %.
"""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, MaxLen, MinLen
from pydantic import Field, StringConstraints
from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.core.errors import InputError
from mpctl.core.units import count_text
from mpctl.measure.calibrate.runs import require_possible
from mpctl.plan.planning.layout_settings import layout_of, layout_text
from mpctl.plan.planning.plan import Plan
from mpctl.spec.base import StrictModel
from mpctl.spec.job import JobSpec

ROW = "mpctl.gallery-row/1"
MOST_ROWS, LONGEST_FILE = 1000, 2**20


def _text(longest: int) -> StringConstraints:
    """One line of printed characters."""
    return StringConstraints(min_length=1, max_length=longest, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")


class GalleryRow(StrictModel):
    """A measured run, as `mpctl score` reads it."""

    name: Annotated[str, _text(80)] = Field(description="what ran, in words: Llama 3 70B, 64 H100, Megatron-LM")
    line: Annotated[str, MinLen(1), MaxLen(4000)] = Field(
        description="the line that plans it: mpctl plan --model llama-3-70b --gpus 64xh100 --tp 4 ...; options alone, "
        "no job file and no preset of your own"
    )
    step_seconds: Annotated[float, Gt(0), Le(1e6)] = Field(description="seconds of a step, without the first ones")
    steps: Annotated[int, Ge(1), Le(10**9)] = Field(description="number of steps of which it is the mean or median")
    software: Annotated[str, _text(120)] = Field(description="what trained, with versions: Megatron-LM core_r0.16.0")
    source: Annotated[str, StringConstraints(max_length=300, pattern=r"^https://[^\s<>\"'`\\]+$")] = Field(
        description="link to the log, table or paper that has the figure"
    )
    date: Annotated[str, StringConstraints(pattern=r"^20\d\d-(0[1-9]|1[0-2])$")] = Field(
        description="month of the run: 2026-11"
    )
    notes: Annotated[str, StringConstraints(max_length=300, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")] = Field(
        "", description="what a reader must know: evaluations counted in, a slow node"
    )


class Forecast(TypedDict):
    """A measured step next to its forecast. error: (forecast - measured) / measured; low_seconds, high_seconds: 9 of 10
    steps are expected between them; fits: whether the plan fits the devices, None where that is not known."""

    model: str
    gpus: int
    device: str
    runtime: str
    dtype: str
    layout: str
    measured_seconds: float
    forecast_seconds: float
    low_seconds: float
    high_seconds: float
    error: float
    inside: bool
    fits: bool | None
    extrapolates: list[str]


class ScoredRow(Forecast):
    """A row with its forecast."""

    name: str
    line: str
    source: str


class ScoreDocument(TypedDict):
    """Schema mpctl.score/1: what `mpctl score --json` prints. mean_error: mean of the absolute errors."""

    schema: Literal["mpctl.score/1"]
    rows: list[ScoredRow]
    mean_error: float


def forecast(plan: Plan, measured: float, where: str) -> Forecast:
    """Compare a plan with a measured step. Raises InputError where the plan is illegal or has no time, and for a step
    that is impossible."""
    plan.require_legal()
    if plan.estimate is None:
        raise InputError.of("no-model", where, "the line names no model", "name one: --model llama-3-70b")
    time = plan.estimate.time
    if isinstance(time, str):
        raise InputError.of("not-estimated", where, time, "name GPUs: --gpus 64xh100")
    job = plan.job
    require_possible(where, time, measured, job.device_kind)
    return {
        "model": _model(job, plan.estimate.parameters),
        "gpus": job.world_size,
        "device": job.cluster.device.name if job.cluster.device else "",
        "runtime": job.training.runtime,
        "dtype": job.training.chosen_dtype,
        "layout": layout_text(layout_of(job)),
        "measured_seconds": measured,
        "forecast_seconds": time.total,
        "low_seconds": time.low,
        "high_seconds": time.high,
        "error": time.total / measured - 1,
        "inside": time.low <= measured <= time.high,
        "fits": plan.fits,
        "extrapolates": list(time.extrapolates),
    }


def _model(job: JobSpec, parameters: int) -> str:
    """`llama-3-70b`, or for a model without a name `gpt, 1.7B`."""
    assert job.model is not None
    kind = "mixture of experts" if job.model.experts else job.model.family
    return job.model.name or f"{kind}, {count_text(parameters)}"
