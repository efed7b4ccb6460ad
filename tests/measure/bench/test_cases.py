"""Cases of a bench: planned all at once, refused all at once, and sharing their data."""

import pytest

from mpctl.core.errors import InputError
from mpctl.measure.bench.cases import case_warnings, one_core_each, plan_cases, shared_units, with_data
from mpctl.plan.planning.plan import load_plan
from mpctl.run.hosts.machine import Machine
from mpctl.spec.load import load_job
from mpctl.train.data.manifest import MANIFEST
from tests.measure.bench.small_jobs import small_case

MACHINE = Machine(2, 0, 2**40)


def test_cases_keep_their_order_and_get_a_directory_each(tmp_path, texts):
    two = {"parallel.tp": 2, "cluster.gpus_per_node": 2}
    cases = [small_case("b", texts, **two), small_case("a", texts)]
    planned = plan_cases(cases, tmp_path / "out", MACHINE, overwrite=False)
    assert [(case.name, case.title, case.job.world_size) for case in planned] == [("b", "b", 2), ("a", "a", 1)]
    assert planned[0].launch.run.path == tmp_path / "out" / "b"
    assert planned[0].tokens_per_step == 16 * 32
    assert not (tmp_path / "out").exists()


def test_the_issues_of_all_cases_and_of_the_folder_are_reported_together(tmp_path, texts):
    (tmp_path / "notes.txt").write_text("mine")
    cases = [
        small_case("heads", texts, **{"parallel.tp": 4, "cluster.gpus_per_node": 4}),
        small_case("layers", texts, **{"parallel.pp": 2, "cluster.gpus_per_node": 2}),
        small_case("good", texts),
    ]
    with pytest.raises(InputError) as refused:
        plan_cases(cases, tmp_path, MACHINE, overwrite=False)
    rules = {issue.rule for issue in refused.value.issues}
    assert {"bench-occupied", "tp-divides-heads"} <= rules and len(rules) > 2


def test_a_warning_of_several_cases_is_reported_once(tmp_path, texts):
    four = {"training.micro_batch_size": 4, "cluster.gpus_per_node": 4}
    cases = [small_case(name, texts, **four) for name in ("a", "b")]
    planned = plan_cases(cases, tmp_path / "out", MACHINE, overwrite=False)
    (warning,) = case_warnings(planned)
    assert "4 ranks share 2 cores" in warning


def test_one_corpus_is_prepared_once_for_each_vocabulary(tmp_path, texts):
    cases = [
        small_case("a", texts),
        small_case("wide", texts, **{"model.vocab": 640}),
        small_case("b", texts, **{"training.micro_batch_size": 4}),
    ]
    planned = plan_cases(cases, tmp_path / "out", MACHINE, overwrite=False)
    ready = list(with_data(planned, tmp_path / "out", lambda *progress: None))
    folders = [case.job.data.path for case in ready]
    data = (tmp_path / "out/data").resolve()
    assert folders == [str(data / "1"), str(data / "2"), str(data / "1")]
    assert all((data / name / MANIFEST).exists() for name in "12")
    assert [case.launch.files["job.json"].count(str(data)) for case in ready] == [1, 1, 1]


def test_ranks_share_cores_by_their_threads_or_gpus():
    one = load_job("demo", {"launch.threads_per_rank": 2, "launch.device": "cpu"})
    assert shared_units(one, Machine(8, 4, 2**40)) == 4
    gpu = load_job("demo", {"launch.device": "cuda"})
    assert shared_units(gpu, Machine(8, 4, 2**40)) == 4


def test_a_rank_has_one_thread_on_cpu_unless_the_job_says_more():
    def threads(**settings):
        plan = load_plan("demo", {f"launch.{key}": value for key, value in settings.items()})
        return one_core_each(plan, MACHINE).job.launch.threads_per_rank

    assert threads(device="cpu") == threads(device="auto") == 1
    assert threads(device="cpu", threads_per_rank=3) == 3
    assert threads(device="cuda") is None


def test_runs_that_only_warm_up_are_refused(tmp_path, texts):
    """Two steps warm up, so that of two none would count."""
    case = small_case("short", texts, **{"training.steps": 2})
    with pytest.raises(InputError) as caught:
        plan_cases([case], tmp_path / "out", MACHINE, overwrite=False)
    (issue,) = caught.value.issues
    assert issue.rule == "bench-steps" and "--steps 3" in issue.hint
