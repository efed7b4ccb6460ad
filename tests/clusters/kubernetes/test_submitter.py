"""`mpctl launch --on kubernetes`: the command as a whole, against an API server."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from mpctl.cli.app import run as mpctl
from tests.clusters.kubernetes.api_server import Cluster
from tests.clusters.kubernetes.published import train_job_issues
from tests.launch.command import arguments


@pytest.fixture
def mount(tmp_path: Path, data: Path) -> Path:
    """A folder that stands for the claim, with the data on it."""
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
    return {"kind": "PersistentVolumeClaim", "apiVersion": "v1", "metadata": {"name": "runs"},
            "spec": {"accessModes": list(modes)}}  # fmt: skip


def unplaced_pod(job: str) -> dict[str, Any]:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                 "message": "0/3 nodes are available"}  # fmt: skip
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
    assert mpctl([*command(mount, copied(mount, data)), "--submit", "--dry-run"]) == 0
    document = yaml.safe_load(capsys.readouterr().out)
    assert train_job_issues(document) == []
    assert document["metadata"]["name"].startswith("run-1-")
    trainer = document["spec"]["trainer"]
    assert trainer["command"][3:5] == ["--run-dir", str(mount / "Run 1")]
    assert {"name": "MPCTL_JOB", "value": document["metadata"]["name"]} in trainer["env"]
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
    assert train_job_issues(yaml.safe_load(capsys.readouterr().out)) == []
    assert not there.parent.exists()
    assert mpctl([*argv, "--dry-run", "--set", "data.path=/home/me/data"]) == 2
    assert issues(capsys) == ["not-on-claim"]


def test_submit_writes_the_run_and_creates_the_object(
    kubernetes: Cluster,
    mount: Path,
    data: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kubernetes.add("persistentvolumeclaims", claim("ReadWriteMany"))
    assert mpctl([*command(mount, copied(mount, data)), "--submit", "--json"]) == 0
    submission = json.loads(capsys.readouterr().out)
    (name,) = kubernetes.names("trainjobs")
    assert (submission["job_id"], submission["scheduler"]) == (name, "kubernetes")
    run = mount / "Run 1"
    launcher = json.loads((run / "launcher.json").read_text())
    assert (launcher["backend"], launcher["job_id"]) == ("kubernetes", name)
    assert yaml.safe_load((run / "kubernetes.yaml").read_text())["metadata"]["name"] == name
    job = json.loads((run / "job.json").read_text())
    assert job["launch"]["on"] == "auto"  # the pods join by --on torchrun


def test_a_job_that_waits_is_seen_and_taken_back(
    kubernetes: Cluster, mount: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `mpctl status` and `mpctl stop`, which ask the cluster for the object of the run."""
    kubernetes.add("persistentvolumeclaims", claim("ReadWriteMany"))
    argv = [*command(mount, copied(mount, data)), "--submit"]
    subprocess.run([sys.executable, "-m", "mpctl", *argv], check=True, timeout=60)
    (name,) = kubernetes.names("trainjobs")
    kubernetes.add("pods", unplaced_pod(name))
    assert mpctl(["status", str(mount / "Run 1"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["status"] == "submitted"
    assert document["job_state"] == "pending (Unschedulable: 0/3 nodes are available)"
    mpctl(["stop", str(mount / "Run 1")])
    assert kubernetes.names("trainjobs") == []


def test_what_the_cluster_refuses_leaves_nothing_behind(
    kubernetes: Cluster,
    mount: Path,
    data: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kubernetes.add("persistentvolumeclaims", claim("ReadWriteOnce"))
    kubernetes.refusal = (403, "Forbidden", 'admission webhook "v" denied the request: no runtime')
    assert mpctl([*command(mount, copied(mount, data)), "--submit", "--json"]) == 2
    assert issues(capsys) == ["claim-not-shared", "refused-by-webhook"]
    assert not (mount / "Run 1").exists() and kubernetes.names("trainjobs") == []


def test_a_claim_that_is_absent(
    kubernetes: Cluster,
    mount: Path,
    data: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert mpctl([*command(mount, copied(mount, data)), "--submit", "--json"]) == 2
    assert issues(capsys) == ["no-claim"]


def test_every_setting_that_is_wrong_is_said_at_once(
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
