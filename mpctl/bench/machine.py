"""A machine measured from its kernels up to training runs, and written as presets.

Three stages, each of which begins with the result of the one before:

    kernels        -> a device: products, attention, memory, host            (machine_fit.py)
    collectives    -> the link of its cores, or GPUs                         (machine_fit.py)
    training runs -> a few corrected figures, and the remaining spread

Training runs are the layouts of `mpctl bench verify` that give every rank a separate core (or GPU),
of one small model. They are planned on the measured preset, trained in rounds, and fitted
(calibrate/own_cluster.py). After the first two stages the presets are written; after the third they
are written again. The report is saved after every measurement, so that a bench that ends early
loses nothing. Its rows are estimated on the presets once these exist: the remaining differences
between estimates and measurements are those that a preset cannot express.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.bench.cases import plan_cases
from mpctl.bench.collectives import CollectiveBench, CollectiveRow
from mpctl.bench.kernels import KernelBench, KernelRow
from mpctl.bench.machine_fit import LinkFit, fit_device, fit_link
from mpctl.bench.machine_plan import MachineWork
from mpctl.bench.machine_preset import PRESETS, MachinePreset, machine_preset, measured_source
from mpctl.bench.report import BenchEnvelope, BenchEnvironment, envelope, save_report, take_folder
from mpctl.bench.runner import Budget, CaseRun, Watch, group_runs, run_cases
from mpctl.bench.verify import BUSY
from mpctl.calibrate.own_cluster import ClusterFit, fit_cluster, own_spread
from mpctl.calibrate.runs import Run
from mpctl.layout.job_layout import JobLayout
from mpctl.rundir.directory import RunDir
from mpctl.spec.cluster import ClusterSpec, DeviceSpec
from mpctl.spec.runtime import get_profile


def kernels_on(
    preset: MachinePreset, work: MachineWork, rows: Sequence[KernelRow]
) -> list[KernelRow]:
    """The rows with the estimates of this preset, and their shares of its device's peaks."""
    cases = work.kernel_cases(preset.settings())
    planned = {
        f"{kernel.name} x{ranks}": kernel.predicted_seconds
        for kernel in cases.kernels
        for ranks in cases.ranks
    }
    return [_kernel(row, planned.get(row["name"]), preset.device) for row in rows]


def _kernel(row: KernelRow, predicted: float | None, device: DeviceSpec) -> KernelRow:
    share = row["share_of_peak"]
    peaks: dict[Any, float] = {**device.peak_flops}
    if row["flops"]:
        share = row["flops_per_second"] / peaks[row["dtype"]] if row["dtype"] in peaks else None
    elif device.memory_bandwidth:
        share = row["bytes_per_second"] / device.memory_bandwidth
    return {**row, "predicted_seconds": predicted, "share_of_peak": share}


def collectives_on(
    preset: MachinePreset, work: MachineWork, measured: CollectiveBench
) -> list[CollectiveRow]:
    """The rows of these collectives with the estimates of this preset."""
    cases = work.collectives(None, preset.settings())
    assert cases is not None, "they were measured"
    same = replace(measured.cases, plan=cases.plan, topology=cases.topology)
    return replace(measured, cases=same).rows


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
    found = []
    for own in group_runs(runs).values():
        case, there = own[0].case, own[0].case.job.cluster
        kept = {"nodes": there.nodes, "gpus_per_node": there.gpus_per_node}
        job = case.job.model_copy(update={"cluster": cluster.model_copy(update=kept)})
        runtime = job.training.runtime
        found.append(Run(
            case.title, "", JobLayout.of(job), get_profile(runtime),
            {"devices": name, "clusters": name, "runtimes": runtime},
            {"step_seconds": median(run.step_seconds for run in own)},
        ))  # fmt: skip
    return found


def disturbed_runs(runs: Sequence[CaseRun]) -> list[str]:
    """The layouts of one rank on CPU that had their core for less than `BUSY` of a step: with no
    other ranks to wait for, such a rank waited for other programs."""
    return [
        name
        for name, own in group_runs(runs).items()
        if (job := own[0].case.job).world_size == 1
        and job.device_kind == "cpu"
        and median(_core_share(run) for run in own) < BUSY
    ]


def _core_share(run: CaseRun) -> float:
    return median(record["cpu_seconds"] / record["step_seconds"] for record in run.steady)


def with_rounds(fit: ClusterFit, runs: Sequence[CaseRun]) -> ClusterFit:
    """The same fit with the spread of single runs. The errors on left-out layouts are those of
    medians; a future run also differs from its median as the rounds of its layout did.

    A layout 2 % off when it was left out, whose rounds took 0.9, 1 and 1.1 times their
    median: errors of 13, 2 and -7 %.
    """
    errors = []
    for own in group_runs(runs).values():
        middle = median(run.step_seconds for run in own)
        if (off := fit.left_out.get(own[0].case.title)) is not None:
            errors += [off + log(middle / run.step_seconds) for run in own]
    return replace(fit, spread=own_spread(errors))


def machine_checks(runs: Iterable[Run], fit: ClusterFit) -> list[MachineCheck]:

    def planned(run: Run, off: float) -> float:
        return run.measured["step_seconds"] * exp(off)

    return [
        {
            "layout": run.id,
            "ranks": run.job.world_size,
            "seconds": run.measured["step_seconds"],
            "measured_seconds": planned(run, fit.measured[run.id]),
            "fitted_seconds": planned(run, fit.fitted[run.id]),
            "left_out_seconds": planned(run, fit.left_out[run.id])
            if run.id in fit.left_out
            else None,
        }
        for run in runs
    ]


def mean_errors(checks: Sequence[MachineCheck]) -> Mapping[str, float]:
    """The mean of |planned / measured - 1| of all layouts, by the preset of the plan: `measured`,
    `fitted`, and `left_out` if there is one.

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


KERNELS_SHARE, COLLECTIVES_SHARE = 0.3, 0.2  # of a budget; the rest is for training runs


class MachineFindings(TypedDict):
    """The findings on the machine. name: of its presets; files: their paths, relative to the
    report's folder; device, cluster: the tables in them; spread: of its own runs, None where too
    few ran; link_error: mean relative error of the link's fit; wrong: collectives with wrong
    results; disturbed: layouts of one rank that did not have its core to itself; checks: a row for
    each layout that was trained; errors: means of |planned / measured - 1| over them, by the preset
    of the plan.
    """

    name: str
    files: list[str]
    device: dict[str, Any]
    cluster: dict[str, Any]
    spread: float | None
    link_error: float | None
    wrong: list[str]
    disturbed: list[str]
    checks: list[MachineCheck]
    errors: dict[str, float]


class MachineReport(BenchEnvelope):
    """What `mpctl bench machine --json` prints, and OUT/report.json. Its rows are those of kernels
    and of collectives (bench/kernels.py, bench/collectives.py), estimated on the presets."""

    results: list[KernelRow | CollectiveRow]
    findings: MachineFindings


@dataclass
class MachineBench:
    """The measurement of a machine, with its results so far.

    sent: the collectives with all their rounds; collectives: their rows. planned: the rows of both
    with the estimates on the preset, once there is one.
    """

    work: MachineWork
    environment: BenchEnvironment
    command: str
    kernels: list[KernelRow] = field(default_factory=list)
    collectives: list[CollectiveRow] = field(default_factory=list)
    sent: CollectiveBench | None = None
    planned: list[KernelRow | CollectiveRow] = field(default_factory=list)
    runs: list[CaseRun] = field(default_factory=list)
    link: LinkFit | None = None
    preset: MachinePreset | None = None
    checks: list[MachineCheck] = field(default_factory=list)
    is_complete: bool = False

    def run(self, out: Path, *, budget: Budget, watch: Watch) -> None:
        """All three stages, in the folder `out`, which is taken over. Raises KeyboardInterrupt
        where Ctrl-C ended one, RunFailed where a rank failed, InputError where a file cannot be
        written."""
        take_folder(out)
        done = self._measure_kernels(out, budget, watch)
        done &= self._measure_collectives(out, budget, watch)
        self.write_presets(out)
        done &= self._train(out, budget, watch)
        self.is_complete = done
        save_report(out, self.report())

    def _measure_kernels(self, out: Path, budget: Budget, watch: Watch) -> bool:
        measured = KernelBench(
            self.environment, self.command, self.work.rounds, self.work.kernels,
            _share(budget, KERNELS_SHARE), self.work.quick,
        )  # fmt: skip

        def keep() -> None:
            self.kernels = measured.rows
            save_report(out, self.report())

        measured.measure(RunDir(out / "kernels-r1"), watch, keep)
        self.kernels = measured.rows
        if measured.is_stopped:
            raise KeyboardInterrupt
        return measured.is_complete

    def _measure_collectives(self, out: Path, budget: Budget, watch: Watch) -> bool:
        cases = self.work.collectives(_share(budget, COLLECTIVES_SHARE / (1 - KERNELS_SHARE)))
        if cases is None:
            return True
        self.sent = CollectiveBench(self.environment, self.command, self.work.rounds, cases)
        self.sent.measure(RunDir(out / "collectives-r1"), watch)
        self.collectives = self.sent.rows
        if self.sent.is_stopped:
            raise KeyboardInterrupt
        return self.sent.is_complete

    def write_presets(self, out: Path) -> None:
        """Fit device and link to the rows so far, and write presets and report into `out`. Raises
        InputError where too little was measured, or a file cannot be written."""
        work, source = self.work, measured_source(self.environment)
        device = fit_device(
            self.kernels, work.base, dtype=work.dtype, name=work.device_name(self.environment),
            memory_bytes=work.memory_bytes, source=source,
        )  # fmt: skip
        rows = [row for row in self.collectives if not row["is_rehearsal"]]
        self.link = fit_link(rows, name=work.link_name) if rows else None
        self.preset = machine_preset(
            work.name, device, self.link, self.environment, per_node=work.devices
        )
        self._save(out)

    def _save(self, out: Path) -> None:
        assert self.preset is not None, "it was measured"
        self.preset.write(out / PRESETS)
        sent = self.collectives
        if self.sent is not None:
            sent = collectives_on(self.preset, self.work, self.sent)
        self.planned = [*kernels_on(self.preset, self.work, self.kernels), *sent]
        save_report(out, self.report())

    def _train(self, out: Path, budget: Budget, watch: Watch) -> bool:
        """Train every layout on the measured preset, and fit it to them; also to those that ran
        before Ctrl-C."""
        measured = self.preset
        assert measured is not None, "write_presets has made it"
        cases = plan_cases(
            self.work.cases(measured.settings()), out, self.work.machine, overwrite=True
        )
        runs = run_cases(
            cases, out, command=self.command, rounds=self.work.rounds, budget=Budget(budget.left),
            watch=watch, is_taken=True,
        )  # fmt: skip
        wanted = self.work.rounds * len(cases)
        try:
            for run in runs:
                self.runs.append(run)
                save_report(out, self.report())
        finally:
            if self.runs:
                self.hold(out, measured.of_runs(len(self.runs), wanted))
        return len(self.runs) == wanted

    def hold(self, out: Path, measured: MachinePreset) -> None:
        """Fit the preset, as it was measured, to the training runs so far, and write it again."""
        runs: Sequence[Run] = measured_runs(self.runs, measured.name, measured.cluster)
        fit = with_rounds(fit_cluster(runs), self.runs)
        self.preset, self.checks = measured.with_fit(fit), machine_checks(runs, fit)
        self._save(out)

    def report(self) -> MachineReport:
        return {
            **envelope(
                "machine", self.work.job_name, self.environment, self.command,
                is_complete=self.is_complete,
            ),
            "results": self.planned or [*self.kernels, *self.collectives],
            "findings": self._findings(),
        }  # fmt: skip

    def _findings(self) -> MachineFindings:
        preset = self.preset
        cluster: dict[str, Any] = {} if preset is None else preset.settings()
        device = cluster.pop("device", {})
        return {
            "name": self.work.name,
            "files": [] if preset is None else [f"{PRESETS}/{name}" for name in preset.texts()],
            "device": device,
            "cluster": cluster,
            "spread": None if preset is None else preset.cluster.spread,
            "link_error": None if self.link is None else self.link.error,
            "wrong": [row["name"] for row in self.collectives if row["wrong"] > 0],
            "disturbed": disturbed_runs(self.runs),
            "checks": self.checks,
            "errors": dict(mean_errors(self.checks)),
        }


def _share(budget: Budget, share: float) -> float | None:
    """Seconds of this share of the remaining time; None without a limit."""
    return None if budget.left is None else share * budget.left
