"""Where a run stands among published ones of its kind: same device, data types of the same width, with
experts or without, and a model of up to NEAR times its size (or a part of it), or of any size where these are too few.

Published runs are tuned ones, most of them of vendors (published.tsv has the sources). MFU is
counted as plans count it, from their seconds.

By hand, MFU 45 % among published 40, 44, 46 and 50 %: above two of four, percentile 50.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from statistics import median
from typing import NamedTuple

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.measure.why.planned import Planned

NEAR, LEAST = 4.0, 5
WIDTHS = {"fp32": 32, "tf32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "mxfp8": 8, "nvfp4": 4}


class PublishedRun(NamedTuple):
    """mfu: a share; gpus: in the run; group: the table that it is from."""

    group: str
    device: str
    dtype: str
    parameters: float
    has_experts: bool
    gpus: int
    mfu: float


class StandingEntry(TypedDict):
    """mfu: of the run, as a share. percentile: share of the published runs below it, 0 to 100. among: of how
    many; what: of which kind, in words; median_mfu, best_mfu: of these."""

    mfu: float
    percentile: int
    among: int
    what: str
    median_mfu: float
    best_mfu: float


def published_runs() -> Iterator[PublishedRun]:
    """The runs of published.tsv."""
    text = files("mpctl.measure.why").joinpath("published.tsv").read_text("utf-8")
    rows = [line.split("\t") for line in text.splitlines() if not line.startswith("#")]
    for group, device, dtype, parameters, experts, gpus, mfu in rows[1:]:
        yield PublishedRun(group, device, dtype, float(parameters), experts == "1", int(gpus), float(mfu))


def find_standing(planned: Planned, seconds: float) -> StandingEntry | None:
    """The standing of a run that takes so many seconds a step; None where too few runs of its kind are
    published."""
    job, device = planned.job, planned.job.cluster.device
    if device is None:
        return None
    width, size = WIDTHS.get(job.training.chosen_dtype), planned.layout.table.numel
    alike = [
        run
        for run in published_runs()
        if (run.device, WIDTHS[run.dtype], run.has_experts) == (device.name, width, job.has_experts)
    ]
    near = [run for run in alike if 1 / NEAR <= run.parameters / size <= NEAR]
    chosen = near if len(near) >= LEAST else alike
    if len(chosen) < LEAST:
        return None
    kind = "mixtures of experts" if job.has_experts else "dense models"
    sized = f"within {NEAR:g}x its size" if chosen is near else "of any size"
    mfu = planned.time.model_flops / seconds / planned.time.peak
    return {
        "mfu": mfu,
        "percentile": round(100 * sum(run.mfu < mfu for run in chosen) / len(chosen)),
        "among": len(chosen),
        "what": f"published {width}-bit runs on {device.name} of {kind} {sized}",
        "median_mfu": median(run.mfu for run in chosen),
        "best_mfu": max(run.mfu for run in chosen),
    }
