"""A machine measured from its kernels up to training runs, and written as presets.

Three stages, each of which begins with what the one before has found:

    kernels        -> a device: products, attention, memory, host            (device_fit.py)
    collectives    -> the link of its cores, or GPUs                         (link_fit.py)
    training runs  -> a few figures moved, and the spread that is left       (machine_runs.py)

After the first two the presets are written; after the third they are written again. The report is
saved whenever something was measured, so that whatever ends the bench early costs nothing.

By hand, with a budget of 200 s: 60 s of rounds for kernels, 40 s for collectives, the rest for
runs; each stage completes one round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.bench.budget import Budget
from mpctl.bench.cases import plan_cases
from mpctl.bench.collective_rows import CollectiveRow
from mpctl.bench.collectives import MeasuredCollectives, measure_collectives
from mpctl.bench.device_fit import DeviceFit, fit_device
from mpctl.bench.folder import save_report, take_folder
from mpctl.bench.kernels import KernelRow, MeasuredKernels, measure_kernels
from mpctl.bench.link_fit import LinkFit, fit_link
from mpctl.bench.machine_plan import MachineWork
from mpctl.bench.machine_preset import PRESETS, MachinePreset, machine_preset, measured_source
from mpctl.bench.machine_rows import collectives_on, kernels_on
from mpctl.bench.machine_runs import (
    MachineCheck,
    disturbed_runs,
    machine_checks,
    mean_errors,
    measured_runs,
    with_rounds,
)
from mpctl.bench.report import SCHEMA, BenchEnvelope, BenchEnvironment
from mpctl.bench.runner import CaseRun, Watch, run_cases
from mpctl.calibrate.own_cluster import fit_cluster
from mpctl.calibrate.runs import Run
from mpctl.rundir.directory import RunDir

KERNELS_SHARE, COLLECTIVES_SHARE = 0.3, 0.2  # of a budget; the rest is for training runs


class MachineFindings(TypedDict):
    """What the machine is. name: of its presets; files: theirs, relative to the report's folder;
    device, cluster: the tables in them; spread: of its own runs, None where too few ran;
    link_error: mean relative error of the link's fit; wrong: collectives with wrong results;
    disturbed: layouts of one rank that did not have its core to itself; checks: a row for each
    layout that was trained; errors: means of |planned / measured - 1| over them, by what planned.
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
    and of collectives (bench/kernels.py, bench/collective_rows.py), estimated on the presets."""

    results: list[KernelRow | CollectiveRow]
    findings: MachineFindings


@dataclass
class MachineBench:
    """The measurement of a machine, with what came of it so far.

    sent: the collectives with all their rounds; collectives: their rows. planned: the rows of both
    beside what is planned on the preset, once there is one.
    """

    work: MachineWork
    environment: BenchEnvironment
    command: str
    kernels: list[KernelRow] = field(default_factory=list)
    collectives: list[CollectiveRow] = field(default_factory=list)
    sent: MeasuredCollectives | None = None
    planned: list[KernelRow | CollectiveRow] = field(default_factory=list)
    runs: list[CaseRun] = field(default_factory=list)
    device: DeviceFit | None = None
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
        def keep(so_far: MeasuredKernels) -> None:
            self.kernels = so_far.rows
            save_report(out, self.report())

        measured = measure_kernels(
            self.work.kernels, RunDir(out / "kernels-r1"), rounds=self.work.rounds,
            seconds=_share(budget, KERNELS_SHARE), quick=self.work.quick,
            on_progress=watch.on_progress, on_event=watch.on_event, on_round=keep,
        )  # fmt: skip
        self.kernels = measured.rows
        if measured.is_stopped:
            raise KeyboardInterrupt
        return measured.is_complete

    def _measure_collectives(self, out: Path, budget: Budget, watch: Watch) -> bool:
        cases = self.work.collectives(_share(budget, COLLECTIVES_SHARE / (1 - KERNELS_SHARE)))
        if cases is None:
            return True
        measured = measure_collectives(
            cases, RunDir(out / "collectives-r1"),
            on_progress=watch.on_progress, on_event=watch.on_event,
        )  # fmt: skip
        self.sent, self.collectives = measured, measured.rows
        if not measured.is_complete:
            raise KeyboardInterrupt
        return all(row["rounds"] == cases.options.rounds for row in self.collectives)

    def write_presets(self, out: Path) -> None:
        """Fit device and link to the rows so far, and write presets and report into `out`. Raises
        InputError where too little was measured, or a file cannot be written."""
        work, source = self.work, measured_source(self.environment)
        self.device = fit_device(
            self.kernels, work.base, dtype=work.dtype, name=work.device_name(self.environment),
            memory_bytes=work.memory_bytes, source=source,
        )  # fmt: skip
        rows = [row for row in self.collectives if not row["is_rehearsal"]]
        self.link = fit_link(rows, name=work.link_name) if rows else None
        self.preset = machine_preset(
            work.name, self.device, self.link, self.environment, per_node=work.devices
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
        """What was measured so far."""
        return {
            "schema": SCHEMA,
            "bench": "machine",
            "job": self.work.job_name,
            "is_complete": self.is_complete,
            "environment": self.environment,
            "command": self.command,
            "results": self.planned or [*self.kernels, *self.collectives],
            "findings": self._findings(),
        }

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
    """Seconds of this share of the time that is left; None where there is no limit."""
    return None if budget.left is None else share * budget.left
