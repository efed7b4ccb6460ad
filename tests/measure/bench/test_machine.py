"""A bench of a machine from rows by hand: presets and report after each stage."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from math import inf, log
from pathlib import Path
from typing import Any, cast

import pytest

from mpctl.measure.bench.cases import PlannedCase
from mpctl.measure.bench.collectives import CollectiveRow
from mpctl.measure.bench.kernels import KernelBench, KernelRow
from mpctl.measure.bench.machine import (
    MachineBench,
    MachineCheck,
    disturbed_runs,
    doubt,
    is_settled,
    machine_checks,
    mean_errors,
    measured_runs,
)
from mpctl.measure.bench.report import BenchEnvironment
from mpctl.measure.bench.runner import Budget, Watch
from mpctl.measure.bench.yardstick import YardstickTimes
from mpctl.measure.calibrate.own import MACHINE, fit_own
from mpctl.plan.planning.plan import load_plan
from mpctl.render.bench import print_report
from mpctl.spec.cluster import InnerLinkSpec
from mpctl.spec.load import load_job
from tests.measure.bench.test_collectives import bench_of, rounds
from tests.measure.bench.test_machine_fit import KINDS, SIZES, measured, row, rows_of, truth
from tests.measure.bench.test_machine_plan import work
from tests.measure.bench.test_machine_preset import ENVIRONMENT
from tests.measure.bench.verify_runs import case_of, run_of

CLUSTER = load_job(None, {"cluster": "this-machine"}).cluster


def test_runs_are_of_the_given_cluster_with_their_own_numbers_of_nodes_and_devices() -> None:
    one, two = (
        case_of("1 rank"),
        case_of("dp2", parallel__dp=2, cluster__gpus_per_node=2, training__global_batch_size=2),
    )
    rounds = [run_of(case, s, number=n) for n, s in enumerate((1.0, 5.0)) for case in (one, two)]
    slow = CLUSTER.model_copy(update={"name": "mine", "slowdown": 2.0})
    runs = measured_runs(rounds, "mine", slow)
    seconds = [(run.id, run.measured["step_seconds"]) for run in runs]
    assert seconds == [("1 rank", 1.0), ("dp2", 1.0), ("1 rank", 5.0), ("dp2", 5.0)]
    assert runs[0].parts == {"devices": "mine", "clusters": "mine", "runtimes": "mpctl"}
    assert [run.job.cluster.gpus_per_node for run in runs] == [1, 2, 1, 2]
    assert {run.job.cluster.slowdown for run in runs} == {2.0}


def test_checks_are_seconds_of_what_was_planned() -> None:
    """A row a layout, of the median of its three rounds."""
    cases = [case_of(f"batch {n}", training__global_batch_size=n) for n in (1, 2, 4)]
    rounds = [run_of(case, s, number=n) for n, s in enumerate((0.9, 1.0, 1.2)) for case in cases]
    runs = measured_runs(rounds, "mine", CLUSTER)
    fit = fit_own(runs, MACHINE)
    checks = machine_checks(runs, fit)
    assert [check["layout"] for check in checks] == [case.title for case in cases]
    for check, run in zip(checks, runs[3:6], strict=True):
        assert (check["seconds"], check["ranks"]) == (1.0, 1)
        assert log(check["measured_seconds"]) == pytest.approx(run.residuals({})[0])
        assert log(check["fitted_seconds"]) == pytest.approx(run.residuals(fit.values)[0])
    errors = mean_errors(checks)
    assert errors["fitted"] < errors["measured"] and errors["fitted"] < errors["left_out"]


def test_a_lone_rank_that_waited_was_disturbed() -> None:
    """Steps by hand have half of their time as processor time; of two ranks one may wait."""
    two = case_of("dp2", parallel__dp=2, cluster__gpus_per_node=2, training__global_batch_size=2)
    waited = run_of(case_of("1 rank"), 1.0)
    computed = [{**record, "cpu_seconds": record["step_seconds"]} for record in waited.records]
    alone = replace(waited, case=case_of("alone"), records=cast(Any, computed))
    assert disturbed_runs([waited, alone, run_of(two, 1.0)]) == ["1 rank"]


def test_errors_are_means_of_their_sizes() -> None:
    checks: list[MachineCheck] = [
        {
            "layout": name,
            "ranks": 1,
            "seconds": 2.0,
            "measured_seconds": 3.0,
            "fitted_seconds": fitted,
            "left_out_seconds": 2.0,
        }
        for name, fitted in (("a", 1.0), ("b", 2.5))
    ]
    assert mean_errors(checks) == {"measured": 0.5, "fitted": 0.375, "left_out": 0.0}


def test_a_median_is_known_where_runs_agree() -> None:
    assert doubt([1.0]) == inf and not is_settled([]) and not is_settled([1.0])
    assert is_settled([0.99, 1.02]) and not is_settled([0.99, 1.04])
    assert doubt([1.0, 4.0, 2.0]) == 0.75


class Timed(MachineBench):
    """Rounds by hand: kernels and collectives take 20 s, a run of each layout the next of its
    seconds, all by this clock."""

    now = 0.0
    names: list[list[str]]
    takes: dict[str, list[float]]

    def clock(self) -> float:
        return self.now

    def yardstick(self, out: Path) -> AbstractContextManager[Callable[[], float]]:
        return nullcontext(lambda: 1.0)

    def _measure_alone(self, out: Path, number: int, watch: Watch) -> None:
        self.now += 20.0

    def write_presets(self, out: Path) -> None:
        pass

    def _train(self, out: Path, number: int, budget: Budget, watch: Watch) -> None:
        wanted = self.open_cases()
        self.names.append([case.name for case in wanted])
        for case in wanted:
            seconds = self.takes[case.name][number]
            self.now, self.longest = self.now + seconds, max(self.longest, seconds)
            self.trained.append((run_of(case, seconds, number=number), 1.0))


def timed_rounds(tmp_path: Path, budget: float, **takes: list[float]) -> Timed:
    found = Timed(planned_work(), cast(BenchEnvironment, {**ENVIRONMENT}), "mpctl bench machine")
    found.names, found.takes = [], takes
    found.cases = [case_of(name) for name in takes]
    found.run(tmp_path / "out", budget=Budget(budget, found.clock), watch=Watch(print))
    return found


def test_a_layout_is_trained_until_its_runs_agree(tmp_path: Path) -> None:
    """`b` differs by 5 % from run to run, `c` by more, and is the first of the third round."""
    found = timed_rounds(tmp_path, 1e3, a=[10.0, 10.1], b=[10.0, 10.5, 10.2], c=[10.0, 13.0, 11.0])
    assert found.names == [["a", "b", "c"], ["a", "b", "c"], ["c", "b"]]
    assert found.is_complete


def test_no_round_begins_that_could_train_nothing(tmp_path: Path) -> None:
    """A round takes 20 s of kernels and collectives, and at least two runs of 10 s."""
    for budget, times in ((1.0, 1), (69.0, 1), (71.0, 2)):
        found = timed_rounds(tmp_path / str(budget), budget, a=[10.0, 20.0])
        assert len(found.names) == times and not found.is_complete


def test_runs_end_with_the_budget_from_the_second_round_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured_bench(tmp_path)
    found.yardsticks.seconds.append(1.0)
    found.cases = [case_of(name) for name in ("a", "b", "c")]
    now, names = [0.0], []

    def runs_of(cases: Sequence[PlannedCase], *_: object, first: int, **__: object) -> Iterator[Any]:
        for case in cases:
            now[0] += 10.0
            names.append(f"{case.name}-{first}")
            yield run_of(case, 1.0 + first, number=first)

    monkeypatch.setattr("mpctl.measure.bench.machine.run_cases", runs_of)
    budget = Budget(55.0, lambda: now[0])
    for number in (0, 1):
        found._train(tmp_path, number, budget, Watch(print))
    assert names == ["a-0", "b-0", "c-0", "a-1", "b-1"]  # 5 s are left
    assert {check["layout"] for check in found.checks} == {"a", "b", "c"}
    assert found.preset is not None
    assert "5 of 8 training runs" in found.preset.texts()["clusters/mine.toml"]


def test_what_a_slow_machine_took_is_stated_at_its_usual_pace(tmp_path: Path) -> None:
    """The yardstick took 1 s, and 2 s around a run of 3 s and a kernel of 4 s: 1.5 and 2 s."""
    found = bench()
    found.yardsticks = YardstickTimes([1.0, 1.0, 2.0])
    found.trained = [(run_of(case_of("1 rank"), 3.0), 2.0), (run_of(case_of("2"), 1.0), 1.0)]
    assert [run.step_seconds for run in found.runs] == [1.5, 1.0]
    assert found.runs[0].records[-1]["cpu_seconds"] == found.trained[0][0].records[-1]["cpu_seconds"] / 2
    timed = KernelBench(found.environment, "", 1, found.work.kernels)
    timed.timings = [{"case": 0, "ranks": 2, "seconds": 4.0, "cpu_seconds": 2.0, "pace": 2.0}]
    (slow,) = found.at_usual_pace(timed).rows
    assert (slow["seconds"], slow["cpu_seconds"]) == (2.0, 1.0)
    assert timed.timings[0]["seconds"] == 4.0 and found.report()["findings"]["drift"] == 1.0


def test_a_measurement_is_between_two_yardsticks() -> None:
    found, said = bench(), iter([1.0, 3.0])
    found.pace = lambda: next(said)
    found.yardsticks.seconds.append(found.pace())
    assert found._mean_yardstick(found.yardsticks.seconds[-1]) == 2.0 and found.yardsticks.seconds == [1.0, 3.0]


LINK = InnerLinkSpec(bandwidth=4e9, latency=3e-5)


def kernel_rows() -> list[KernelRow]:
    """Kernels of a device of 200 GFLOP/s, on two cores."""
    found = [*rows_of(truth(depth=64.0)), row("layer", 0.3, site="tiny", predicted=1.0)]
    return [
        cast(
            KernelRow, {"name": _name(one), "flops": one["flops_per_second"], **one, "share_of_peak": None, "rounds": 1}
        )
        for one in found
    ]


def _name(one: KernelRow) -> str:
    """As measure/bench/kernel_list.py names the kernel."""
    sizes = "x".join(map(str, one["shape"].values()))
    return f"{one['kernel']} layers.mlp.up {one['part']} {sizes} {one['dtype']} x{one['ranks']}"


def collective_rows() -> list[CollectiveRow]:
    more = {"is_rehearsal": False, "wrong": 0, "rounds": 1}
    return [
        cast(CollectiveRow, {"name": f"{kind} {size}", **measured(kind, 2, size, LINK), **more})
        for kind in KINDS
        for size in SIZES
    ]


planned_work = cache(work)


def bench(**more: Any) -> MachineBench:
    environment = cast(BenchEnvironment, {**ENVIRONMENT})
    return MachineBench(planned_work(), environment, "mpctl bench machine", **more)


def measured_bench(out: Path) -> MachineBench:
    """A bench after its kernels and collectives."""
    found = bench(kernels=kernel_rows(), collectives=collective_rows())
    found.write_presets(out)
    return found


def test_a_report_before_anything_was_measured_names_no_file() -> None:
    findings = bench().report()["findings"]
    assert findings["files"] == [] and findings["device"] == {} and findings["spread"] is None


def test_presets_and_report_hold_what_was_measured(tmp_path: Path) -> None:
    report = measured_bench(tmp_path).report()
    assert json.loads((tmp_path / "report.json").read_text()) == report
    findings = report["findings"]
    assert findings["files"] == ["presets/devices/mine.toml", "presets/clusters/mine.toml"]
    assert all((tmp_path / name).is_file() for name in findings["files"])
    assert findings["device"]["peak_flops"]["fp32"] == pytest.approx(200e9, rel=1e-3)
    link = findings["cluster"]["intra_node"]
    assert link["bandwidth"] * link["efficiency"] == pytest.approx(4e9, rel=1e-3)
    assert findings["cluster"]["cores"] == 2 and "device" not in findings["cluster"]
    assert len(report["results"]) == len(kernel_rows()) + len(collective_rows())


def test_it_is_planned_on_what_was_written(tmp_path: Path) -> None:
    measured_bench(tmp_path)
    cluster = str(tmp_path / "presets" / "clusters" / "mine.toml")
    plan = load_plan("demo", {"cluster": cluster, "parallel.tp": 2})
    assert plan.estimate is not None and plan.estimate.step_seconds is not None
    assert plan.job.cluster.spread is None  # nothing was trained


def test_rows_have_the_estimates_on_the_preset(tmp_path: Path) -> None:
    """A product of the demo took what a device of 200 GFLOP/s takes, and so the preset says."""
    rows = {row["name"]: row for row in measured_bench(tmp_path).report()["results"]}
    product = cast(KernelRow, rows["matmul layers.mlp.up forward 512x256x1024 fp32 x2"])
    assert product["predicted_seconds"] == pytest.approx(product["seconds"], rel=0.05)
    assert product["share_of_peak"] == pytest.approx(product["flops_per_second"] / 200e9, rel=1e-3)
    triad = next(cast(KernelRow, row) for name, row in rows.items() if name.startswith("triad"))
    assert triad["share_of_peak"] == 1.0  # of the best stream


def test_collectives_have_the_estimates_on_the_preset(tmp_path: Path) -> None:
    found = bench(kernels=kernel_rows())
    cases = found.work.collectives(None)
    assert cases is not None
    times = [
        one
        for number, case in enumerate(cases.cases)
        for one in rounds(number, measured(case["kind"], 2, case["bytes"], LINK)["seconds"])
    ]
    found.sent = bench_of(cases, *times)
    found.collectives = found.sent.rows
    assert {row["predicted_seconds"] for row in found.collectives} == {None}
    found.write_presets(tmp_path)
    results = found.report()["results"]
    rows = [cast(CollectiveRow, row) for row in results if "transport" in row]
    assert len(rows) == len(cases.cases)
    planned = [row for row in rows if row["predicted_seconds"] is not None]
    assert {row["transport"] for row in planned} == {"shared"}
    for one in planned:
        assert one["predicted_seconds"] == pytest.approx(one["seconds"], rel=0.01)


def test_runs_give_a_spread_and_the_presets_are_written_again(tmp_path: Path) -> None:
    found = measured_bench(tmp_path)
    assert found.preset is not None
    cases = [case_of(f"batch {n}", training__global_batch_size=n) for n in (1, 2, 4)]
    found.trained = [(run_of(case, 0.2 * (n + 1)), 1.0) for n, case in enumerate(cases)]
    found.hold(tmp_path, found.preset)
    findings = found.report()["findings"]
    assert [check["layout"] for check in findings["checks"]] == [case.title for case in cases]
    assert findings["errors"]["fitted"] < findings["errors"]["measured"]
    assert findings["spread"] is not None
    cluster = str(tmp_path / "presets" / "clusters" / "mine.toml")
    assert load_plan("demo", {"cluster": cluster}).job.cluster.spread == findings["spread"]


def test_presets_say_that_runs_are_missing(tmp_path: Path) -> None:
    found = measured_bench(tmp_path)
    assert found.preset is not None
    text = found.preset.of_runs(2, 33).texts()["clusters/mine.toml"]
    assert "# Not complete: 2 of 33 training runs came to their end." in text.splitlines()
    assert found.preset.of_runs(33, 33) == found.preset


def test_the_table_says_how_far_plans_are_off_and_how_to_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = measured_bench(tmp_path)
    print_report(found.report(), Path("runs/lab"))
    said = capsys.readouterr().out
    assert "mine: measured, and not compared with any run" in said
    assert "--cluster runs/lab/presets/clusters/mine.toml" in said and "200.0 GFLOP/s" in said
    assert "fewer than three layouts were trained" in said
    assert found.preset is not None
    found.collectives[0]["wrong"] = 3
    found.trained = [(run_of(case_of("1 rank"), 1.0), 1.0)]
    found.hold(tmp_path, found.preset)
    print_report(found.report(), Path("runs/lab"))
    said = capsys.readouterr().out
    assert "plans of 1 layout are off by" in said
    assert f"{found.collectives[0]['name']}: the result is wrong" in said
    assert "the rank of layout 1 rank had a core for less than 85% of a step" in said
    print_report(bench().report(), Path("runs/lab"))
    assert "too little was measured for a preset" in capsys.readouterr().out
