"""`mpctl tune` from the outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpctl.cli.tune import read_budget
from mpctl.core.errors import InputError
from mpctl.measure.tune.document import tune_document
from mpctl.measure.tune.state import TuneFolder
from mpctl.plan.planning.plan import Plan, load_plan
from mpctl.records.rundir.directory import RunDir
from mpctl.run.clusters.kubernetes.submission import KubernetesSubmitter
from mpctl.spec.load import load_job
from tests.cli.calls import Mpctl, Said, assert_refused
from tests.measure.bench.small_jobs import small_settings, write_texts
from tests.measure.tune.fakes import Clock, FakeTarget, small_request, tuning_of
from tests.measure.tune.test_state import record
from tests.run.clusters.kubernetes.api_server import served


def assert_told(said: Said, *words: str) -> None:
    """The command was refused in these words."""
    assert_refused(said, wants_json=False)
    assert all(word in said.err for word in words), said.err


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90.0), ("5m", 300.0), ("1h30m", 5400.0), ("2 h", 7200.0), ("45", 45.0), ("0.5m", 30.0)],
)
def test_a_budget_is_read(text: str, seconds: float) -> None:
    assert read_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "-5m", "five", "5m30", "5d", "99999h", "1e3"])
def test_a_budget_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--budget"):
        read_budget(text)


def test_a_budget_that_is_too_small_is_refused(mpctl: Mpctl, tmp_path: Path) -> None:
    for budget in ("3s", "11s"):  # of which 10 s start the ranks
        said = mpctl("tune", "demo", "--ranks", 2, "--budget", budget, "--out", tmp_path / "t")
        assert_told(said, "tune-budget", "s are too short for one trial", "--budget")
        assert not (tmp_path / "t").exists()


def test_all_that_is_wrong_with_a_command_line_is_said_at_once(mpctl: Mpctl, tmp_path: Path) -> None:
    wrong = ("--trials", 0, "--budget", "5d", "--fix", "tp", "--fix", "=2")
    said = mpctl("tune", "demo", "--ranks", 2, *wrong, "--out", tmp_path / "t", "--json")
    assert_refused(said, wants_json=True)
    found = [(issue["where"], issue["message"]) for issue in said.document["issues"]]
    assert [where for where, _ in found] == ["--budget", "--trials", "--fix", "--fix"]
    assert "'tp' is not KEY=VALUE" in found[2][1]
    short = mpctl("tune", "demo", "--ranks", 2, "--trials", 0, "--budget", "2s", "--json")
    assert set(short.issues) == {"bad-trials", "tune-budget"}
    short = mpctl("tune", "demo", "--runtime", "megatron-core", "--budget", "2s", "--json")
    assert set(short.issues) == {"tune-runtime", "tune-budget"}


def test_a_runtime_that_mpctl_does_not_launch_is_refused(mpctl: Mpctl, tmp_path: Path) -> None:
    said = mpctl("tune", "demo", "--runtime", "megatron-core", "--out", tmp_path / "t")
    assert_told(said, "tune-runtime", "megatron-core", "--emit")
    assert not (tmp_path / "t").exists()


SBATCH = """\
import json, pathlib, sys, time
run = pathlib.Path(sys.argv[-1]).parent
if run.parent.name != "trials":
    print(99)
    sys.exit()
steps = json.loads((run / "job.json").read_text())["training"]["steps"]
record = {"loss": 1.0, "tokens": 1, "step_seconds": 1.5, "tokens_per_second": 1.0, "time": 1.0}
lines = [json.dumps({**record, "step": step}) for step in range(1, steps + 1)]
(run / "metrics.jsonl").write_text("\\n".join(lines) + "\\n")
(run / "summary.json").write_text(json.dumps({"status": "finished"}))
print(70 + int(run.name))
"""
"""An sbatch whose jobs have ended when it returns."""
NODES = "main*|up|7:30|1-infinite|4|idle|64|257000|(null)|n[1-4]"
"""What sinfo prints of a partition with a time limit."""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Slurm of four nodes, by its commands in a folder."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sbatch.py").write_text(SBATCH)
    stand_in(folder, "sbatch", f'exec "{sys.executable}" "{folder}/sbatch.py" "$@"')
    stand_in(folder, "sinfo", f"echo '{NODES}'")
    stand_in(folder, "squeue", "echo 'COMPLETED|None|0:01|1:00|n1'")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


FEW = ("--fix", "zero=0", "--fix", "micro_batch_size=8", "--fix", "pp=1")  # layouts


def stand_in(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def small_line(folder: Path, *more: object) -> tuple[object, ...]:
    """A tuning of a narrow model on two ranks."""
    texts = folder / "texts"
    texts.mkdir()
    settings = {**small_settings(write_texts(texts)), "model.layers": 2}
    words = [w for k, v in settings.items() for w in ("--set", f"{k}={json.dumps(v)}")]
    return ("tune", "demo", "--ranks", 2, *words, "--out", folder / "t", *more)


def test_trials_are_jobs_of_slurm(mpctl: Mpctl, tmp_path: Path, slurm: Path) -> None:
    """Two trials; then sbatch refuses the third, and what was measured is kept."""
    line = small_line(tmp_path, "--on", "slurm", "--fix", "zero=0")
    first = mpctl(*line, "--trials", 2, "--json")
    assert first.code == 0, first.err
    found = first.document["trials"]
    assert [(trial["status"], trial["step_seconds"]) for trial in found] == [("measured", 1.5)] * 2
    assert [trial["job"] for trial in found] == ["71", "72"]
    assert first.document["best"]["command"].endswith(" --submit")
    script = (tmp_path / "t/trials/001/slurm.sh").read_text()
    assert "--no-requeue" in script and "#SBATCH --time=0:07:30\n" in script  # of the partition
    stand_in(slurm, "sbatch", "echo 'sbatch: error: QOSMaxSubmitJobPerUserLimit' >&2; exit 1")
    refused = mpctl(*line, "--trials", 3)
    assert refused.code == 2 and "2 trials" in refused.out
    for words in ("tune-refused", "QOSMaxSubmitJobPerUserLimit", "type the same command again"):
        assert words in refused.err
    records = TuneFolder(tmp_path / "t").records()
    assert [one.status for one in records] == ["measured"] * 2


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (("--set", "launch.slurm.partition=gpus"), ("slurm-partition", "no partition 'gpus'")),
        (("--nodes", 9, "--gpus-per-node", 1), ("slurm-nodes", "fewer nodes")),
    ],
)
def test_what_slurm_would_never_start_is_refused(
    mpctl: Mpctl, tmp_path: Path, slurm: Path, wrong: tuple[object, ...], words: tuple[str, ...]
) -> None:
    figures = ("--set", "cluster.inter_node.bandwidth=1e9", "--set", "cluster.inter_node.latency=0")
    on = ("--on", "slurm", *figures, "--global-batch-size", 18, "--fix", "zero=0")
    said = mpctl("tune", "demo", *on, *wrong, "--out", tmp_path / "t")
    assert_told(said, *words)
    assert not (tmp_path / "t").exists()


def test_a_host_without_slurm_is_refused(mpctl: Mpctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    line = ("tune", "demo", "--ranks", 2, "--on", "slurm", *FEW, "--out", tmp_path / "t")
    assert_told(mpctl(*line), "no-slurm", "sinfo is not on this host", "--on local")
    assert_told(mpctl(*line, "--submit"), "no-slurm", "sinfo is not on this host")
    assert not (tmp_path / "t").exists()


def test_a_cluster_that_does_not_answer_is_refused(
    mpctl: Mpctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad settings first, all at once; then kubectl's words."""
    mount = tmp_path / "mount"
    mount.mkdir()
    line = ("tune", "demo", "--ranks", 2, "--on", "kubernetes", *FEW)
    said = mpctl(*line, "--out", tmp_path / "t", "--json")
    assert_refused(said, wants_json=True)
    where = [issue["where"] for issue in said.document["issues"]]
    assert where == [f"launch.kubernetes.{key}" for key in ("image", "claim", "mount_path")]
    cluster = {"image": "mpctl:1", "claim": "runs", "mount_path": mount, "kind": "TrainJob"}
    settings = [w for k, v in cluster.items() for w in ("--set", f"launch.kubernetes.{k}={v}")]
    said = mpctl(*line, *settings, "--out", tmp_path / "t")
    assert_told(said, "not-on-claim", "--out")
    monkeypatch.setenv("PATH", str(tmp_path))
    said = mpctl(*line, *settings, "--out", mount / "t")
    assert_told(said, "no-kubectl", "kubectl is not installed here")
    assert not (mount / "t").exists()


def test_trials_are_jobs_of_kubernetes(mpctl: Mpctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kubectl and a server of the tests, as pods that have ended at once; then no quota is left."""
    mount, submit = tmp_path / "mount", KubernetesSubmitter.submit
    mount.mkdir()
    settings = {"image": "mpctl:1", "claim": "runs", "mount_path": mount}
    words = [w for k, v in settings.items() for w in ("--set", f"launch.kubernetes.{k}={v}")]
    line = (*small_line(mount, "--on", "kubernetes", *FEW), *words)

    def submit_and_end(submitter: KubernetesSubmitter, plan: Plan, run: RunDir) -> str:
        job_id = submit(submitter, plan, run)
        subprocess.run([sys.executable, "-c", SBATCH, str(run.manifest)], check=True)
        return job_id

    monkeypatch.setattr(KubernetesSubmitter, "submit", submit_and_end)
    with served(tmp_path, monkeypatch) as cluster:
        claim = {"kind": "PersistentVolumeClaim", "apiVersion": "v1", "metadata": {"name": "runs"}}
        cluster.add("persistentvolumeclaims", claim)
        first = mpctl(*line, "--trials", 1, "--json")
        assert first.code == 0, first.err
        (trial,) = first.document["trials"]
        assert trial["step_seconds"] == 1.5 and cluster.names("trainjobs") == [trial["job"]]
        cluster.refusal = (403, "Forbidden", "trainjobs is forbidden: exceeded quota: gpus")
        refused = mpctl(*line, "--trials", 2)
        assert refused.code == 2 and "1 trial" in refused.out
        assert "over-quota" in refused.err and "free quota" in refused.err
    assert len(TuneFolder(mount / "t").records()) == 1


def test_a_whole_tuning_is_one_job_of_slurm(
    mpctl: Mpctl, tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ("tune", "demo", "--ranks", 2, "--on", "slurm", "--out", tmp_path / "t", "--submit")
    monkeypatch.setattr(sys, "argv", ["mpctl", *map(str, line)])
    said = mpctl(*line, "--budget", "1h")
    assert_told(said, "--budget: 1:05:00, but partition 'main' allows 0:07:30", "leave out --submit")
    stand_in(slurm, "sinfo", f"echo '{NODES.replace('7:30', 'infinite')}'")
    said = mpctl(*line, "--budget", "1h", "--json")
    assert (said.code, said.document["job_id"]) == (0, "99"), said.err
    script = (tmp_path / "t/slurm.sh").read_text()
    assert "--job-name=t\n" in script and "#SBATCH --time=1:05:00\n" in script
    (command,) = [text for text in script.splitlines() if "-m mpctl" in text]
    assert command.endswith(f"-m mpctl tune demo --ranks 2 --on slurm --out {tmp_path / 't'} &")
    assert mpctl(*line[:-1], "--budget", "1s").code == 2  # the folder is this job's
    assert "tail -f" in mpctl(*line).out


@pytest.mark.parametrize("target", [("--on", "local"), ("--on", "kubernetes")])
def test_only_slurm_has_an_allocation(mpctl: Mpctl, tmp_path: Path, target: tuple[str, ...]) -> None:
    said = mpctl("tune", "demo", "--ranks", 2, *target, "--submit", "--out", tmp_path / "t")
    assert_told(said, "nothing-to-submit", "is Slurm's", "leave out --submit")


def test_a_job_without_a_model_is_refused(mpctl: Mpctl, tmp_path: Path) -> None:
    said = mpctl("tune", "--cluster", "this-machine", "--out", tmp_path / "t")
    assert_told(said, "no-model", "needs a model")


def test_ranks_and_nodes_contradict_each_other(mpctl: Mpctl, tmp_path: Path) -> None:
    said = mpctl("tune", "demo", "--ranks", 2, "--nodes", 2, "--out", tmp_path / "t")
    assert_told(said, "usage", "--ranks 2 and --nodes", "one of them")


def test_a_folder_of_another_job_is_refused(mpctl: Mpctl, tmp_path: Path) -> None:
    request, folder = small_request(), TuneFolder(tmp_path / "t")
    folder.claim(request.job, {})
    folder.save(record(1))
    said = mpctl("tune", "demo", "--ranks", 4, "--budget", "3s", "--out", folder.path)
    assert_told(said, "tune-other-job", "cluster.gpus_per_node 2 there, 4 here")


def test_what_a_folder_has_is_shown_without_a_trial(mpctl: Mpctl, tmp_path: Path) -> None:
    tuning = tuning_of(tmp_path / "t", small_request(), FakeTarget(lambda _: 1.0, Clock()))
    tuning.keep(record(1, "measured", seconds=(3.0, 1.0, 1.0, 1.2, 1.1)))
    tuning.update()
    document = tune_document(tuning, str)
    (tmp_path / "t" / "report.json").write_text(json.dumps(document))
    said = mpctl("tune", "--show", tmp_path / "t")
    assert said.code == 0 and "1 trial in" in said.out and "not ended" in said.out
    assert "1.10 s a step" in (tmp_path / "t" / "report.html").read_text()
    assert mpctl("tune", "--show", tmp_path / "t", "--json").document["best"]["file"]
    assert_told(mpctl("tune", "demo", "--show", tmp_path / "t"), "usage", "leave out JOB")
    assert_told(mpctl("tune", "--show", tmp_path), "no-tuning", "runs/tune-NAME")
    (tmp_path / "report.json").write_text("{}")
    assert_told(mpctl("tune", "--show", tmp_path), "no-tuning", "mpctl.tune/1")


@pytest.mark.slow
def test_a_small_tuning_runs_and_goes_on(mpctl: Mpctl, tmp_path: Path) -> None:
    """Two ranks of a narrow model: two trials, then one more in the same folder."""
    out, line = tmp_path / "t", small_line(tmp_path, "--budget", "5m")
    first = mpctl(*line, "--trials", 2, "--json")
    assert first.code == 0, first.err
    found = first.document
    assert found["schema"] == "mpctl.tune/1" and found["ended"] == "trials"
    assert [trial["status"] for trial in found["trials"]] == ["measured"] * 2
    assert found["best"]["step_seconds"] == min(e["step_seconds"] for e in found["layouts"])
    assert "trials of" not in first.err and (out / "report.html").read_text().count("<h2") >= 3
    best = load_plan(str(out / "best.toml")).job
    assert best.world_size == 2 and best.model is not None and best.model.layers == 2
    assert load_job(str(out / "trials/001/job.json")).training.steps <= 12
    second = mpctl(*line, "--trials", 3)
    assert second.code == 0, second.err
    assert "3 trials" in second.out and "mpctl launch demo" in second.out
