"""Settings that cannot be submitted: all of them at once, each with a way out."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mpctl.cli.app import run as mpctl
from mpctl.plan.planning.plan import make_plan
from mpctl.run.clusters.kubernetes.kubectl import LABEL
from mpctl.run.clusters.kubernetes.submission import (
    LONGEST_JOB_NAME,
    QUALIFIED,
    QUANTITY,
    SUBDOMAIN,
    claim_issues,
    env_issues,
    job_name,
    submission_issues,
)
from mpctl.run.launch.program import program_issues
from tests.run.clusters.kubernetes.api_server import Cluster
from tests.run.clusters.kubernetes.jobs import EVERYTHING, FURTHER, kubernetes_job
from tests.run.clusters.kubernetes.published import train_job_issues
from tests.run.launch.command import arguments


def wheres(run: Path, mount: Path | str, **settings: Any) -> list[str]:
    issues = submission_issues(kubernetes_job(mount, **settings), run)
    assert all(issue.hint for issue in issues)
    return [issue.where for issue in issues]


def test_legal_settings_have_no_issues(tmp_path: Path) -> None:
    assert wheres(tmp_path / "run", tmp_path) == []
    assert wheres(tmp_path / "run", tmp_path, **EVERYTHING) == []


def test_everything_that_is_missing_or_wrong_is_reported_at_once(tmp_path: Path) -> None:
    found = wheres(
        tmp_path,
        "/mnt",
        image=None,
        claim="Runs!",
        namespace="Team",
        gpu_resource="a/b/c",
        memory_per_node="512GB",
        env={"RANK": "0"},
        node_selector={"zone": "a b", "x y": "a"},
        tolerations=["/"],
    )
    keys = (
        "image",
        "namespace",
        "claim",
        "gpu_resource",
        "memory_per_node",
        "node_selector",
        "tolerations",
        "node_selector",
        "env",
    )
    assert found == [*(f"launch.kubernetes.{key}" for key in keys), "--run-dir"]


def test_policies_patches_and_secrets_are_checked(tmp_path: Path) -> None:
    found = wheres(
        tmp_path / "run",
        tmp_path,
        restricted=True,
        ipc_lock=True,
        run_as_user=0,
        env={"HF_TOKEN": "hf_abc", "TOKENIZERS_PARALLELISM": "false"},
        host_network=True,
        secret_env={"A": "no-key", "RANK": "a/b"},
        env_from=["hub"],
        ttl_seconds=1,
        labels={"kueue.x-k8s.io/queue-name": "q", "team": "a b"},
        resources={"rdma/hca": "many", "nvidia.com/gpu": "4"},
        volumes=[{"claim": "C", "mount_path": "data"}, {"claim": "c", "mount_path": "/dev/shm", "sub_path": "../x"}],
        pod_patch={
            "kind": "Pod",
            "spec": {"containers": [{"name": "node", "command": ["sh"]}], "restartPolicy": "OnFailure"},
        },
    )
    assert found == [
        f"launch.kubernetes.{key}"
        for key in (
            "env_from",
            "labels",
            "resources",
            "secret_env",
            "labels",
            "env",
            "secret_env",
            "resources",
            *["restricted"] * 3,
            "host_network",
            "env_from",
            "ttl_seconds",
            *["pod_patch"] * 3,
            *["volumes"] * 4,
        )
    ]
    assert wheres(tmp_path / "run", tmp_path, kind="JobSet", **EVERYTHING, **FURTHER) == []


def test_a_further_volume_may_hold_the_data_but_not_the_run(tmp_path: Path) -> None:
    mount, corpora = tmp_path / "mount", tmp_path / "corpora"
    mount.mkdir()
    job = kubernetes_job(mount, volumes=[{"claim": "corpora", "mount_path": str(corpora)}])
    data = job.data.model_copy(update={"path": str(corpora / "web"), "corpus": None})
    job = job.model_copy(update={"data": data})
    assert submission_issues(job, mount / "run") == []
    assert [issue.where for issue in submission_issues(job, corpora / "run")] == ["--run-dir"]


def test_the_run_and_what_its_ranks_read_must_be_on_the_claim(tmp_path: Path) -> None:
    mount, elsewhere = tmp_path / "mount", tmp_path / "elsewhere"
    mount.mkdir()
    job = kubernetes_job(mount)
    data = job.data.model_copy(
        update={"path": str(elsewhere), "corpus": [str(elsewhere)], "validation": {"books": str(mount / "books")}}
    )
    issues = submission_issues(job.model_copy(update={"data": data}), elsewhere / "run")
    assert [issue.where for issue in issues] == ["--run-dir", "data.path"]
    assert f"below {mount}" in issues[0].message


@pytest.mark.parametrize(
    ("folder", "is_taken"),
    [("/workspace of the image", True), ("MOUNT/code", True), ("HERE", False), ("HERE/..", True), (None, False)],
)
def test_a_program_may_be_part_of_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str | None, is_taken: bool
) -> None:
    """A script that this machine has outside of the claim is more likely a mistake."""
    mount, here = tmp_path / "mount", tmp_path / "here"
    for made in (mount, here):
        made.mkdir()
    (here / "train.py").touch()
    monkeypatch.chdir(here)
    named = folder and folder.replace("MOUNT", str(mount)).replace("HERE", str(here))
    program = ["python", "train.py"] if folder != "MOUNT/code" else ["my-trainer"]
    settings = {"program": program, "program_dir": named, "on": "kubernetes"}
    job = kubernetes_job(mount)
    job = job.model_copy(update={"launch": job.launch.model_copy(update=settings)})
    issues = submission_issues(job, mount / "run")
    assert [issue.where for issue in issues] == ([] if is_taken else ["launch.program_dir"])
    assert all("in the image set launch.program_dir" in issue.hint for issue in issues)
    if is_taken:  # and it is looked for in the pods alone
        assert list(program_issues(make_plan(job), is_elsewhere=False)) == []


def test_a_script_on_the_claim_is_looked_for_before_it_is_submitted(tmp_path: Path) -> None:
    job = kubernetes_job(tmp_path)
    settings = {"program": ["python", "no.py"], "program_dir": str(tmp_path), "on": "kubernetes"}
    job = job.model_copy(update={"launch": job.launch.model_copy(update=settings)})
    (issue,) = program_issues(make_plan(job), is_elsewhere=False)
    assert issue.rule == "no-such-program" and f"{tmp_path}/no.py" in issue.message


def test_a_link_that_leads_off_the_claim_is_seen(tmp_path: Path) -> None:
    mount, elsewhere = tmp_path / "mount", tmp_path / "elsewhere"
    mount.mkdir()
    elsewhere.mkdir()
    (mount / "link").symlink_to(elsewhere)
    assert wheres(mount / "link" / "run", mount) == ["--run-dir"]


def test_the_device_must_be_known(tmp_path: Path) -> None:
    """The machine that submits may have no GPU where the pods have."""
    (issue,) = submission_issues(kubernetes_job(tmp_path, device="auto"), tmp_path / "run")
    assert issue.where == "launch.device" and "--device cuda" in issue.hint


def test_the_claim_must_exist_and_be_shared() -> None:
    job = kubernetes_job()
    shared = {"spec": {"accessModes": ["ReadWriteOnce", "ReadWriteMany"]}}
    assert list(claim_issues(shared, job)) == list(claim_issues({}, job)) == []
    (absent,) = claim_issues(None, job)
    (alone,) = claim_issues({"spec": {"accessModes": ["ReadWriteOnce"]}}, job)
    assert (absent.rule, alone.rule) == ("no-claim", "claim-not-shared")


def test_the_mount_must_be_seen_here(tmp_path: Path) -> None:
    assert wheres(tmp_path, tmp_path / "absent") == ["launch.kubernetes.mount_path"]
    assert wheres(tmp_path, "runs") == ["launch.kubernetes.mount_path"]


@given(st.text(max_size=80), st.floats(0, 4e9))
def test_a_derived_name_begins_the_host_names_of_pods(run: str, when: float) -> None:
    name = job_name(run, when)
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert len(name) <= LONGEST_JOB_NAME and "--" not in name
    assert len(f"{name}-worker-1048575-abcde") <= 63


def test_a_derived_name_is_that_of_the_run_and_the_time() -> None:
    assert job_name("Llama 3 (tuned)", 0) == "llama-3-tuned-0101-000000"
    assert job_name("70B", 0) == "run-70b-0101-000000"
    assert job_name("Ü", 0) == "run-0101-000000"


@pytest.mark.parametrize(
    ("form", "legal", "illegal"),
    [
        (LABEL, ["a", "team-a", "a" * 63], ["-a", "A", "a.b", "", "a" * 64, "a\n"]),
        (SUBDOMAIN, ["a.b-c.d"], ["a..b", "a." * 200, "a/b"]),
        (
            QUALIFIED,
            ["nvidia.com/gpu", "gpu", "a/B_c.d", f"{'a.' * 126}a/b"],
            ["/gpu", "a/", "a/b/c", "nvidia com/gpu", "", f"{'a.' * 127}a/b"],
        ),
        (QUANTITY, ["512Gi", "1.5T", "7"], ["512GB", "-1Gi", "lots", ""]),
    ],
)
def test_forms_of_names(form: str, legal: list[str], illegal: list[str]) -> None:
    assert [name for name in (*legal, *illegal) if re.fullmatch(form, name)] == legal


def test_variables_that_place_a_pod_cannot_be_set() -> None:
    names = ["NCCL_DEBUG", "PET_NNODES", "RANK", "MASTER_ADDR", "A-B", "1A"]
    wrong = {issue.message.split()[0].strip("'"): issue.rule for issue in env_issues(names)}
    assert wrong == {
        "PET_NNODES": "reserved-variable",
        "RANK": "reserved-variable",
        "MASTER_ADDR": "reserved-variable",
        "A-B": "bad-name",
        "1A": "bad-name",
    }


@pytest.fixture
def mount(tmp_path: Path, data: Path) -> Path:
    """A folder in the role of the claim, with the data on it."""
    (tmp_path / "claim").mkdir()
    (tmp_path / "claim/data").symlink_to(data)
    return tmp_path / "claim"


def command(mount: Path, data: Path, *more: str) -> list[str]:
    settings = {"image": "registry/mpctl:1", "claim": "runs", "mount_path": str(mount)}
    sets = [f"launch.kubernetes.{key}={json.dumps(value)}" for key, value in settings.items()]
    parts = [part for one in sets for part in ("--set", one)]
    layout = ("--dp", "2", "--set", "cluster.nodes=2", "--set", "cluster.gpus_per_node=1")
    return arguments(data, mount / "Run 1", *layout, "--on", "kubernetes", *parts, *more)


def claim(*modes: str) -> dict[str, Any]:
    return {
        "kind": "PersistentVolumeClaim",
        "apiVersion": "v1",
        "metadata": {"name": "runs"},
        "spec": {"accessModes": list(modes)},
    }


def unplaced_pod(job: str) -> dict[str, Any]:
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/3 nodes are available",
    }
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {"name": f"{job}-0", "labels": {"jobset.sigs.k8s.io/jobset-name": job}},
        "status": {"phase": "Pending", "conditions": [condition]},
    }


def issues(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [issue["rule"] for issue in json.loads(capsys.readouterr().out)["issues"]]


def copied(mount: Path, data: Path) -> Path:
    """The data on the claim itself: a link off the claim is refused."""
    (mount / "data").unlink()
    shutil.copytree(data, mount / "data")
    return mount / "data"


def test_dry_run_prints_the_object_and_needs_no_cluster(
    mount: Path, data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(mount))  # no kubectl either
    argv = [*command(mount, copied(mount, data)), "--submit", "--dry-run"]
    assert mpctl(argv) == 0
    document = yaml.safe_load(capsys.readouterr().out)
    assert train_job_issues(document) == []
    assert document["metadata"]["name"].startswith("run-1-")
    trainer = document["spec"]["trainer"]
    assert trainer["command"][3:5] == ["--run-dir", str(mount / "Run 1")]
    assert {"name": "MPCTL_JOB", "value": document["metadata"]["name"]} in trainer["env"]
    assert mpctl([*argv, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["scheduler"], shown["job_id"]) == ("kubernetes", None)
    patches = yaml.safe_load(shown["document"])["spec"]["runtimePatches"]
    assert patches == document["spec"]["runtimePatches"]
    assert not (mount / "Run 1").exists()


def test_the_object_is_rendered_on_a_machine_without_volume_data_or_disk(
    mount: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A submission from there is refused, and a path that the pods do not see in any case."""
    there = Path("/no/such/volume")
    huge = ("--set", "model.hidden=65536", "--set", "model.layers=64")  # 60 TB of checkpoints
    argv = [*command(there, there / "data"), *huge, "--submit", "--json"]
    assert mpctl(argv) == 2
    assert {"not-mounted", "disk-holds-checkpoints"} <= set(issues(capsys))
    assert mpctl([*argv, "--dry-run"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert train_job_issues(yaml.safe_load(shown["document"])) == []
    assert not there.parent.exists()
    assert mpctl([*argv, "--dry-run", "--set", "data.path=/home/me/data"]) == 2
    assert issues(capsys) == ["not-on-claim"]


def test_submit_writes_the_run_and_creates_the_object_which_is_seen_and_taken_back(
    kubernetes: Cluster, mount: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `mpctl status` and `mpctl stop`, which ask the cluster for the object of the run."""
    kubernetes.add("persistentvolumeclaims", claim("ReadWriteMany"))
    argv = [*command(mount, copied(mount, data)), "--submit", "--json"]
    submitted = subprocess.run([sys.executable, "-m", "mpctl", *argv], check=True, timeout=60, stdout=subprocess.PIPE)
    submission = json.loads(submitted.stdout)
    (name,) = kubernetes.names("trainjobs")
    assert (submission["job_id"], submission["scheduler"]) == (name, "kubernetes")
    run = mount / "Run 1"
    launcher = json.loads((run / "launcher.json").read_text())
    assert (launcher["backend"], launcher["job_id"]) == ("kubernetes", name)
    assert yaml.safe_load((run / "kubernetes.yaml").read_text())["metadata"]["name"] == name
    job = json.loads((run / "job.json").read_text())
    assert job["launch"]["on"] == "auto"  # the pods join by --on torchrun
    kubernetes.add("pods", unplaced_pod(name))
    assert mpctl(["status", str(run), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["status"] == "submitted"
    assert document["job_state"] == "pending (Unschedulable: 0/3 nodes are available)"
    mpctl(["stop", str(run)])
    assert kubernetes.names("trainjobs") == []


def test_what_the_cluster_refuses_leaves_nothing_behind(
    kubernetes: Cluster, mount: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kubernetes.add("persistentvolumeclaims", claim("ReadWriteOnce"))
    kubernetes.refusal = (403, "Forbidden", 'admission webhook "v" denied the request: no runtime')
    assert mpctl([*command(mount, copied(mount, data)), "--submit", "--json"]) == 2
    assert issues(capsys) == ["claim-not-shared", "refused-by-webhook"]
    assert not (mount / "Run 1").exists() and kubernetes.names("trainjobs") == []


def test_a_claim_that_is_absent(
    kubernetes: Cluster, mount: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mpctl([*command(mount, copied(mount, data)), "--submit", "--json"]) == 2
    assert issues(capsys) == ["no-claim"]


def test_every_setting_that_is_wrong_is_reported_at_once(
    mount: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ("--set", "launch.kubernetes.namespace='Team'", "--set", "launch.kubernetes.queue='Q!'")
    assert mpctl([*command(mount, data), *wrong, "--submit", "--json"]) == 2
    assert issues(capsys) == ["bad-name", "bad-name", "not-on-claim"]


def test_without_submit_there_is_nothing_that_runs_here(
    mount: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mpctl([*command(mount, data), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["issues"][0]["hint"] == "add --submit"
