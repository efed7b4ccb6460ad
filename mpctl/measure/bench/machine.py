"""A machine measured from its kernels up to training runs, and written as presets.

Rounds of three stages, each of which begins with the result of the one before:

    kernels        -> a device: products, attention, memory, host            (machine_fit.py)
    collectives    -> the link of its cores, or GPUs                         (machine_fit.py)
    training runs -> a few corrected figures, and the remaining spread

Training runs are the layouts of `mpctl bench verify` that give every rank a separate core (or GPU),
of one small model. They are planned on the measured preset, trained in rounds, and fitted
(measure/calibrate/own.py). After the first two stages the presets are written; after the third they
are written again. The report is saved after every measurement, so that a bench that ends early
loses nothing. Its rows are estimated on the presets once these exist: the remaining differences
between estimates and measurements are those that a preset cannot express.

A core is not equally fast at all times: virtual machines share sockets with others, laptops become
hot. So a round has all three stages, and on a CPU every measurement is stated at the usual pace of
the machine (measure/bench/yardstick.py). A layout whose runs differ by 2 % of their median
or less to either side is not run again; by default two rounds, and a few runs of a third, take less
than five minutes on two cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from math import exp, inf
from pathlib import Path
from statistics import median
from typing import Any, NotRequired, TypeVar, cast

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.measure.bench.cases import PlannedCase, plan_cases, with_data
from mpctl.measure.bench.collectives import CollectiveBench, CollectiveRow
from mpctl.measure.bench.kernels import KernelBench, KernelRow
from mpctl.measure.bench.machine_fit import TINY, LinkFit, fit_device, fit_link
from mpctl.measure.bench.machine_plan import MachineWork
from mpctl.measure.bench.machine_preset import PRESETS, MachinePreset, machine_preset, measured_source
from mpctl.measure.bench.probe import RankBench
from mpctl.measure.bench.report import BenchEnvelope, BenchEnvironment, envelope, save_report, take_folder
from mpctl.measure.bench.runner import Budget, CaseRun, Watch, group_runs, run_cases
from mpctl.measure.bench.verify import BUSY
from mpctl.measure.bench.yardstick import YardstickTimes, cpu_yardstick
from mpctl.measure.calibrate.own import MACHINE, fit_own
from mpctl.measure.calibrate.own_fit import OwnFit
from mpctl.measure.calibrate.runs import Kind, Run
from mpctl.model.layout.job_layout import JobLayout
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.rank_files import StepRecord
from mpctl.spec.cluster import ClusterSpec, DeviceSpec
from mpctl.spec.runtime import get_profile


def kernels_on(preset: MachinePreset, work: MachineWork, rows: Sequence[KernelRow]) -> list[KernelRow]:
    """The rows with the estimates of this preset, and their shares of its device's peaks."""
    cases = work.kernel_cases(preset.settings())
    planned = {f"{kernel.name} x{ranks}": kernel.predicted_seconds for kernel in cases.kernels for ranks in cases.ranks}
    return [_kernel(row, planned.get(row["name"]), preset.device) for row in rows]


def _kernel(row: KernelRow, predicted: float | None, device: DeviceSpec) -> KernelRow:
    share = row["share_of_peak"]
    peaks: dict[Any, float] = {**device.peak_flops}
    if row["flops"]:
        share = row["flops_per_second"] / peaks[row["dtype"]] if row["dtype"] in peaks else None
    elif device.memory_bandwidth:
        share = row["bytes_per_second"] / device.memory_bandwidth
    return {**row, "predicted_seconds": predicted, "share_of_peak": share}


def collectives_on(preset: MachinePreset, work: MachineWork, measured: CollectiveBench) -> list[CollectiveRow]:
    """The rows of these collectives with the estimates of this preset."""
    cases = work.collectives(None, preset.settings())
    assert cases is not None, "they were measured"
    same = replace(measured.cases, plan=cases.plan, topology=cases.topology)
    return replace(measured, cases=same).rows


class MachineCheck(TypedDict):
    """A layout that was trained. seconds: of a step, the median over its runs; measured_seconds:
    planned from kernels and collectives alone; fitted_seconds: planned on the preset as written;
    left_out_seconds: planned by a fit that did not see this layout; older reports have None where
    there were few layouts."""

    layout: str
    ranks: int
    seconds: float
    measured_seconds: float
    fitted_seconds: float
    left_out_seconds: float | None


def measured_runs(runs: Sequence[CaseRun], name: str, cluster: ClusterSpec) -> list[Run]:
    """These runs on the cluster as it was measured, for a fit.

    name: of the presets; cluster: with the figures that the fit begins from.
    """
    found = []
    for run in runs:
        case, there = run.case, run.case.job.cluster
        kept = {"nodes": there.nodes, "gpus_per_node": there.gpus_per_node}
        job = case.job.model_copy(update={"cluster": cluster.model_copy(update=kept)})
        runtime = job.training.runtime
        parts: dict[Kind, str] = {"devices": name, "clusters": name, "runtimes": runtime}
        measured = {"step_seconds": run.step_seconds}
        found.append(Run(case.title, "", JobLayout.of(job), get_profile(runtime), parts, measured))
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


def machine_checks(runs: Iterable[Run], fit: OwnFit) -> list[MachineCheck]:
    """A row for each layout of these runs."""
    layouts: dict[str, list[Run]] = {}
    for run in runs:
        layouts.setdefault(run.id, []).append(run)

    def planned(own: Sequence[Run], residuals: Mapping[str, list[float]]) -> float:
        return own[0].measured["step_seconds"] * exp(residuals[own[0].id][0])

    return [
        {
            "layout": name,
            "ranks": own[0].job.world_size,
            "seconds": median(run.measured["step_seconds"] for run in own),
            "measured_seconds": planned(own, fit.before),
            "fitted_seconds": planned(own, fit.fitted),
            "left_out_seconds": planned(own, fit.left_out),
        }
        for name, own in layouts.items()
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


SETTLED = 0.02  # of a median that is known well enough


def doubt(seconds: Sequence[float]) -> float:
    """Uncertainty of the median of these runs: half of their range over it, infinite for fewer than two.

    >>> round(doubt([0.99, 1.0, 1.03]), 3), doubt([1.0])
    (0.02, inf)
    """
    if len(seconds) < 2:
        return inf
    return (max(seconds) - min(seconds)) / 2 / median(seconds)


def is_settled(seconds: Sequence[float]) -> bool:
    """Whether another run of a layout would tell nothing more."""
    return doubt(seconds) <= SETTLED


SECONDS = ("seconds", "cpu_seconds")  # of a timing
B = TypeVar("B", bound=RankBench)


def paced_run(run: CaseRun, factor: float) -> CaseRun:
    """The run with all its steps `factor` times as long."""
    records = [
        {**record, "step_seconds": record["step_seconds"] * factor, "cpu_seconds": record["cpu_seconds"] * factor}
        for record in run.records
    ]
    return replace(run, records=cast(Sequence[StepRecord], records))


def in_round(watch: Watch, number: int, rounds: int) -> Watch:
    """The same, with stages that name the round; its bar shows the time left in it."""

    def on_progress(stage: str, done: int, total: int) -> None:
        watch.on_progress(f"round {number + 1} of {rounds}: {stage}", done, total)

    return replace(watch, on_progress=on_progress)


class MachineFindings(TypedDict):
    """The findings on the machine. name: of its presets; files: their paths, relative to the
    report's folder; device, cluster: the tables in them; spread: of its own runs, None where too
    few ran; link_error: mean relative error of the link's fit; wrong: collectives with wrong
    results; disturbed: layouts of one rank that did not have its core to itself; checks: a row for
    each layout that was trained; errors: means of |planned / measured - 1| over them, by the preset
    of the plan; drift: by how much the machine was slower at its slowest than at its fastest.
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
    drift: NotRequired[float]


class MachineReport(BenchEnvelope):
    """Output of `mpctl bench machine --json`, also written to OUT/report.json. Rows are those of the
    kernels and collectives benches (measure/bench/kernels.py, measure/bench/collectives.py), with
    estimates from the presets."""

    results: list[KernelRow | CollectiveRow]
    findings: MachineFindings


@dataclass
class MachineBench:
    """The measurement of a machine, with its results so far.

    timed, sent: the kernels and the collectives with all their rounds; kernels, collectives: their
    rows. planned: the rows of both with the estimates on the preset, once there is one. cases: the
    layouts, with data; longest: seconds of the longest training run, its start included. trained:
    runs as they were, and the yardstick around each; yardsticks: all of them; pace: measures one.
    """

    work: MachineWork
    environment: BenchEnvironment
    command: str
    kernels: list[KernelRow] = field(default_factory=list)
    collectives: list[CollectiveRow] = field(default_factory=list)
    timed: KernelBench | None = None
    sent: CollectiveBench | None = None
    cases: list[PlannedCase] = field(default_factory=list)
    longest: float = 0.0
    planned: list[KernelRow | CollectiveRow] = field(default_factory=list)
    trained: list[tuple[CaseRun, float]] = field(default_factory=list)
    yardsticks: YardstickTimes = field(default_factory=YardstickTimes)
    pace: Callable[[], float] = lambda: 1.0
    link: LinkFit | None = None
    preset: MachinePreset | None = None
    checks: list[MachineCheck] = field(default_factory=list)
    is_complete: bool = False

    def run(self, out: Path, *, budget: Budget, watch: Watch) -> None:
        """Rounds of all three stages, in the folder `out`, which is taken over. The first round
        always runs whole. Raises KeyboardInterrupt where Ctrl-C ended one, RunFailed where a rank
        failed, InputError where a file cannot be written."""
        take_folder(out)
        alone = 0.0
        with self.yardstick(out) as self.pace:
            for number in range(self.work.rounds):
                began = budget.clock()
                if number and not (self.open_cases() and budget.fits(alone + 2 * self.longest)):
                    break
                seen = in_round(watch, number, self.work.rounds)
                self._measure_alone(out, number, seen)
                self.write_presets(out)
                alone = budget.clock() - began
                self._train(out, number, budget, seen)
        self.is_complete = not self.open_cases()
        save_report(out, self.report())

    def yardstick(self, out: Path) -> AbstractContextManager[Callable[[], float]]:
        """The call that times a layer of the model, on a CPU; GPUs keep their clocks, and their
        memory is the runs'."""
        layers = [
            kernel.case
            for kernel in self.work.kernels.kernels
            if kernel.is_layer and kernel.site != TINY and kernel.case["part"] == "both"
        ]
        if not (layers and self.work.base.is_cpu):
            return nullcontext(lambda: 1.0)
        return cpu_yardstick(out, self.work.kernels.job, layers[0])

    def _mean_yardstick(self, before: float) -> float:
        """The yardstick's seconds around a measurement that has just ended; before: those at its
        beginning."""
        self.yardsticks.seconds.append(self.pace())
        return (before + self.yardsticks.seconds[-1]) / 2

    def _measure_alone(self, out: Path, number: int, watch: Watch) -> None:
        """A round of the kernels, and of the collectives where there are several ranks."""
        if self.timed is None:
            self.timed = KernelBench(self.environment, self.command, 1, self.work.kernels, None, self.work.quick)
            if (cases := self.work.collectives(None)) is not None:
                self.sent = CollectiveBench(self.environment, self.command, 1, cases)
        self.yardsticks.seconds.append(self.pace())
        self._measure(self.timed, RunDir(out / f"kernels-r{number + 1}"), watch)
        self.kernels = self.timed.rows
        save_report(out, self.report())
        if self.sent is not None:
            self._measure(self.sent, RunDir(out / f"collectives-r{number + 1}"), watch)

    def _measure(self, bench: RankBench, run: RunDir, watch: Watch) -> None:
        before = len(bench.timings)
        bench.measure(run, watch)
        around = self._mean_yardstick(self.yardsticks.seconds[-1])
        for timing in bench.timings[before:]:
            timing["pace"] = around
        if bench.is_stopped:
            raise KeyboardInterrupt

    def at_usual_pace(self, bench: B) -> B:
        """The same bench with the seconds at the usual pace."""
        timings = []
        for timing in bench.timings:
            factor = self.yardsticks.factor(timing.get("pace", self.yardsticks.usual))
            seconds = {key: timing[key] * factor for key in SECONDS if key in timing}
            timings.append({**timing, **seconds})
        return replace(bench, timings=timings)

    def write_presets(self, out: Path) -> None:
        """Fit device and link to the rows so far, and write presets and report into `out`. Raises
        InputError where too little was measured, or a file cannot be written."""
        work, source = self.work, measured_source(self.environment)
        if self.timed is not None:
            self.kernels = self.at_usual_pace(self.timed).rows
        if self.sent is not None:
            self.collectives = self.at_usual_pace(self.sent).rows
        device = fit_device(
            self.kernels,
            work.base,
            dtype=work.dtype,
            name=work.device_name(self.environment),
            memory_bytes=work.memory_bytes,
            source=source,
        )
        rows = [row for row in self.collectives if not row["is_rehearsal"]]
        self.link = fit_link(rows, name=work.link_name) if rows else None
        self.preset = machine_preset(work.name, device, self.link, self.environment, per_node=work.devices)
        self._save(out)

    def _save(self, out: Path) -> None:
        assert self.preset is not None, "it was measured"
        self.preset.write(out / PRESETS)
        sent = self.collectives
        if self.sent is not None:
            sent = collectives_on(self.preset, self.work, self.at_usual_pace(self.sent))
        self.planned = [*kernels_on(self.preset, self.work, self.kernels), *sent]
        save_report(out, self.report())

    def _train(self, out: Path, number: int, budget: Budget, watch: Watch) -> None:
        """Train every layout once whose seconds are not known yet, the least known first, and fit
        the measured preset to all runs; also to those that ran before Ctrl-C."""
        measured = self.preset
        assert measured is not None, "write_presets has made it"
        if not self.cases:
            cases = self.work.cases(measured.settings())
            planned = plan_cases(cases, out, self.work.machine, overwrite=True)
            self.cases = list(with_data(planned, out, watch.on_progress))
        runs = run_cases(
            self.open_cases(),
            out,
            command=self.command,
            rounds=1,
            budget=Budget(),
            watch=watch,
            is_taken=True,
            first=number,
        )
        began = budget.clock()
        try:
            for run in runs:
                self.trained.append((run, self._mean_yardstick(self.yardsticks.seconds[-1])))
                save_report(out, self.report())
                self.longest = max(self.longest, budget.clock() - began)
                began = budget.clock()
                if number and not budget.fits(self.longest):
                    break
        finally:
            if self.trained:
                wanted = len(self.trained) + len(self.open_cases())
                self.hold(out, measured.of_runs(len(self.trained), wanted))

    @property
    def runs(self) -> list[CaseRun]:
        """The training runs, their steps at the usual pace."""
        return [paced_run(run, self.yardsticks.factor(around)) for run, around in self.trained]

    def open_cases(self) -> list[PlannedCase]:
        """The layouts that another run would tell more of, those that differ most from run to run
        first."""
        own = group_runs(self.runs)
        seconds = {case.name: [run.step_seconds for run in own.get(case.name, [])] for case in self.cases}
        wanted = [
            case
            for case in self.cases
            if len(seconds[case.name]) < self.work.rounds and not is_settled(seconds[case.name])
        ]
        return sorted(wanted, key=lambda case: -doubt(seconds[case.name]))

    def hold(self, out: Path, measured: MachinePreset) -> None:
        """Fit the preset, as it was measured, to the training runs so far, and write it again."""
        runs: Sequence[Run] = measured_runs(self.runs, measured.name, measured.cluster)
        fit = fit_own(runs, MACHINE)
        self.preset, self.checks = measured.with_fit(fit), machine_checks(runs, fit)
        self._save(out)

    def report(self) -> MachineReport:
        return {
            **envelope("machine", self.work.job_name, self.environment, self.command, is_complete=self.is_complete),
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
            "drift": self.yardsticks.drift,
        }
