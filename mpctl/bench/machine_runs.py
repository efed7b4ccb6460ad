"""Short training runs that hold a measured preset against reality, and move a few of its figures.

The layouts are those of `mpctl bench verify` that give every rank a core (or GPU) of its own, of
one small model. They are planned on the measured preset, trained in rounds A B C A B C, and fitted
(calibrate/own_cluster.py): what each layout takes, and how far a fit that never saw it is off.

By hand, on two cores: 1 rank, tp 2, dp 2, pp 2, cp 2 and their variants; tp 4 would take turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import exp, log
from statistics import median

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.bench.runner import CaseRun, group_runs
from mpctl.bench.verify import BUSY
from mpctl.calibrate.own_cluster import ClusterFit, own_spread
from mpctl.calibrate.runs import Run
from mpctl.layout.job_layout import JobLayout
from mpctl.spec.cluster import ClusterSpec
from mpctl.spec.runtime import get_profile


class MachineCheck(TypedDict):
    """A layout that was trained. seconds: of a step, the median over its runs; measured_seconds:
    planned from kernels and collectives alone; fitted_seconds: planned on the preset as written;
    left_out_seconds: planned by a fit that did not see this layout, None where there were too few
    layouts."""

    layout: str
    ranks: int
    seconds: float
    measured_seconds: float
    fitted_seconds: float
    left_out_seconds: float | None


def measured_runs(runs: Sequence[CaseRun], name: str, cluster: ClusterSpec) -> list[Run]:
    """A run of each layout on the cluster as it was measured, for a fit.

    name: of the presets; cluster: with the figures that the fit begins from.
    """
    return [_run(own, name, cluster) for own in group_runs(runs).values()]


def _run(runs: Sequence[CaseRun], name: str, cluster: ClusterSpec) -> Run:
    case = runs[0].case
    own = case.job.cluster
    kept = {"nodes": own.nodes, "gpus_per_node": own.gpus_per_node}
    job = case.job.model_copy(update={"cluster": cluster.model_copy(update=kept)})
    runtime = job.training.runtime
    return Run(
        case.title, "", JobLayout.of(job), get_profile(runtime),
        {"devices": name, "clusters": name, "runtimes": runtime},
        {"step_seconds": median(run.step_seconds for run in runs)},
    )  # fmt: skip


def disturbed_runs(runs: Sequence[CaseRun]) -> list[str]:
    """The layouts of one rank on CPU that had their core for less than `BUSY` of a step: with
    nobody to wait for, such a rank was waiting for other programs."""
    return [
        name
        for name, own in group_runs(runs).items()
        if (job := own[0].case.job).world_size == 1
        and job.device_kind == "cpu"
        and median(_core_share(run) for run in own) < BUSY
    ]


def _core_share(run: CaseRun) -> float:
    """Processor time of rank 0 over the time of a step."""
    return median(record["cpu_seconds"] / record["step_seconds"] for record in run.steady)


def with_rounds(fit: ClusterFit, runs: Sequence[CaseRun]) -> ClusterFit:
    """The same fit with the spread of single runs. The errors on layouts that were left out are of
    medians; a run to come also lies off its median as the rounds of its layout did.

    By hand, a layout 2 % off when it was left out, whose rounds took 0.9, 1 and 1.1 times their
    median: errors of 13, 2 and -7 %.
    """
    errors = []
    for own in group_runs(runs).values():
        middle = median(run.step_seconds for run in own)
        if (off := fit.left_out.get(own[0].case.title)) is not None:
            errors += [off + log(middle / run.step_seconds) for run in own]
    return replace(fit, spread=own_spread(errors))


def machine_checks(runs: Iterable[Run], fit: ClusterFit) -> list[MachineCheck]:
    """A row for each layout."""
    return [_check(run, fit) for run in runs]


def _check(run: Run, fit: ClusterFit) -> MachineCheck:
    seconds = run.measured["step_seconds"]
    left_out = fit.left_out.get(run.id)
    return {
        "layout": run.id,
        "ranks": run.job.world_size,
        "seconds": seconds,
        "measured_seconds": seconds * exp(fit.measured[run.id]),
        "fitted_seconds": seconds * exp(fit.fitted[run.id]),
        "left_out_seconds": None if left_out is None else seconds * exp(left_out),
    }


def mean_errors(checks: Sequence[MachineCheck]) -> Mapping[str, float]:
    """The mean of |planned / measured - 1| of all layouts, by what planned it: `measured`,
    `fitted`, and `left_out` where there is one.

    >>> mean_errors([{"layout": "tp2", "ranks": 2, "seconds": 1.0, "measured_seconds": 1.25,
    ...               "fitted_seconds": 0.75, "left_out_seconds": None}])
    {'measured': 0.25, 'fitted': 0.25}
    """
    pairs: dict[str, list[float]] = {}
    for check in checks:
        for name, planned in (
            ("measured", check["measured_seconds"]),
            ("fitted", check["fitted_seconds"]),
            ("left_out", check["left_out_seconds"]),
        ):
            if planned is not None:
                pairs.setdefault(name, []).append(abs(planned / check["seconds"] - 1))
    return {name: sum(errors) / len(errors) for name, errors in pairs.items()}
