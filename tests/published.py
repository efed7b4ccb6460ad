"""The published runs of tests/recorded, their gates, and the record of their cross-validation.

published_runs.json: A100, V100 and a few H100 and B200 runs. published_runs_modern.json: H100 to
GB300 and MI355X. nanotron.tsv: a sweep of layouts on H100 (tests/nanotron.py).
published_runs_experts.json: mixtures of experts on the same machines. published_runs_mlperf6.json: both
kinds, of MLPerf Training 6.0.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from math import expm1
from pathlib import Path
from statistics import mean
from typing import Any, get_args

from mpctl.measure.calibrate.runs import Run, read_runs
from mpctl.plan.estimate.routing import LOADS
from mpctl.spec.training import Dispatcher
from tests.joint_fit import Residuals
from tests.nanotron import nanotron_rows

RECORDED = Path(__file__).with_name("recorded")
CROSS_VALIDATED = RECORDED / "cross_validated.json"
# The most that a step's mean absolute error may be, in percent, on runs left out of the fit.
GATES = {
    "Selene": 5.0,
    "SimuMax, B200": 5.0,
    "Jean Zay": 6.0,
    "vTrain, several nodes": 8.0,
    "zero bubble": 8.0,
    "MosaicML": 10.0,
    "torchtitan": 10.0,
    "vTrain, one node": 12.0,
    "H100": 8.0,
    "H200": 8.0,
    "Blackwell": 12.0,
    "MI350 and MI355": 12.0,
    "nanotron, H100": 15.0,
    "IBM's A100": 25.0,  # a single run
}
# The gate of each table of published_runs.json; one machine's tables are held to it together.
GATE_OF = {
    "narayanan21_t1": "Selene",
    "korth22_t5": "Selene",
    "korth22_t4_layer": "Selene",
    "megatron2020": "Selene",
    "simumax_b200": "SimuMax, B200",
    "bloom": "Jean Zay",
    "vtrain_multi": "vTrain, several nodes",
    "zb": "zero bubble",
    "mosaic": "MosaicML",
    "torchtitan": "torchtitan",
    "vtrain_single": "vTrain, one node",
    "nanotron": "nanotron, H100",
}
# The gate of other tables, by device.
GATE_OF_DEVICE = {
    "a100-80gb": "IBM's A100",
    "h100-sxm": "H100",
    "h200": "H200",
    "b200": "Blackwell",
    "b300": "Blackwell",
    "gb200": "Blackwell",
    "gb300": "Blackwell",
    "mi350x": "MI350 and MI355",
    "mi355x": "MI350 and MI355",
}
# Mixtures of experts: the most over all rows, and over those of a table.
EXPERTS, EXPERT_TABLE = 15.0, 20.0
A100_AND_V100 = 5.9  # percent, over all of published_runs.json together
SPEARMAN, MEAN_REGRET, MEDIAN_REGRET = 0.8, 0.08, 0.02  # over sweeps of layouts
EVEN = ("forced", "token drop", "fake")  # beginnings of `details.routing` of an even load
REAL, TRAINED = "real data", "scattermoe"  # and of one that a trained router makes, by its name in LOADS
BAND = (0.85, 0.95)  # share of the runs left out that lie inside a band of 90 %


@cache
def published_rows() -> tuple[dict[str, Any], ...]:
    """All dense rows that ran: job, measured figures, source."""
    return (*earlier_rows(), *modern_rows(), *nanotron_rows("ran"))


def earlier_rows() -> tuple[dict[str, Any], ...]:
    """Rows of A100 and V100 above all."""
    return _rows("published_runs.json")


def modern_rows() -> tuple[dict[str, Any], ...]:
    """Rows of H100 to GB300 and MI355X, dense models."""
    return _rows("published_runs_modern.json")


def expert_rows() -> tuple[dict[str, Any], ...]:
    """Rows of mixtures of experts, H100 to GB300. All but three name the runtime megatron-core."""
    return _rows("published_runs_experts.json")


def mlperf6_rows() -> tuple[dict[str, Any], ...]:
    """Rows of MLPerf Training 6.0, dense models and mixtures of experts, B200 to GB300, MI350X and MI355X."""
    return _rows("published_runs_mlperf6.json")


@cache
def mlperf6_runs() -> tuple[Run, ...]:
    """These rows, ready to be estimated, with what details say of the software."""
    return tuple(read_runs(map(with_software, mlperf6_rows())))


def with_software(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row whose job also says what `details` say of the software, as far as keys have it: the
    dispatcher, the load, whether messages of experts overlap, the layout of the pipeline, and the profile of
    runs that capture a whole iteration."""
    details, training = row["details"], dict(row["job"]["training"])
    if (dispatcher := details.get("dispatcher")) in get_args(Dispatcher):
        training["moe_dispatcher"] = dispatcher
    routing = details.get("routing", "")
    if routing.startswith(EVEN):
        training["moe_load"] = 1.0
    elif routing.startswith(REAL):
        training["moe_load"] = next(load.mean for load in LOADS if load.name == TRAINED)
    if details.get("ep_overlap") is not None:
        training["moe_overlap"] = details["ep_overlap"]
    if details.get("cuda_graph") == "full_iteration":
        training["runtime"] = "megatron-core-graphs"
    parallel = row["job"]["parallel"]
    if words := details.get("pipeline_layout"):
        parallel = {**parallel, "pipeline_layout": words}
    return {**row, "job": {**row["job"], "parallel": parallel, "training": training}}


@cache
def expert_runs(*, software: bool = False) -> tuple[Run, ...]:
    """The rows with experts, ready to be estimated. software: as `with_software` says."""
    rows = map(with_software, expert_rows()) if software else expert_rows()
    return tuple(read_runs(rows))


def expert_errors(*, software: bool = False) -> dict[str, list[float]]:
    """Relative errors of the estimates of rows with experts, by table."""
    errors: dict[str, list[float]] = defaultdict(list)
    for run in expert_runs(software=software):
        errors[run.group] += [expm1(r) for r in run.residuals({})]
    return errors


def _rows(name: str) -> tuple[dict[str, Any], ...]:
    return tuple(json.loads((RECORDED / name).read_text("utf-8"))["rows"])


@cache
def published_runs() -> tuple[Run, ...]:
    """The rows, ready to be estimated."""
    return tuple(read_runs(published_rows()))


def read_priors() -> dict[str, float]:
    """Priors of fitted constants, by `constant.key`: what they were before they were fitted."""
    priors: dict[str, float] = json.loads((RECORDED / "priors.json").read_text("utf-8"))
    return priors


def gate_of(run: Run) -> str:
    """The gate of GATES that a run is held to."""
    return GATE_OF.get(run.group) or GATE_OF_DEVICE[run.parts["devices"]]


def errors_by_gate(residuals: Residuals) -> dict[str, list[float]]:
    """Relative errors of the estimates, (estimated - measured) / measured, by gate."""
    errors: dict[str, list[float]] = defaultdict(list)
    for run in published_runs():
        errors[gate_of(run)] += [expm1(r) for r in residuals[run.id]]
    return errors


def mean_percent(errors: list[float]) -> float:
    """Mean absolute error in percent."""
    return 100 * mean(map(abs, errors))
