"""Settings that cannot be submitted: all of them at once, each with a way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpctl.clusters.kubernetes.submission import claim_issues, submission_issues
from tests.clusters.kubernetes.jobs import EVERYTHING, kubernetes_job


def wheres(run: Path, mount: Path | str, **settings: Any) -> list[str]:
    issues = submission_issues(kubernetes_job(mount, **settings), run)
    assert all(issue.hint for issue in issues)
    return [issue.where for issue in issues]


def test_legal_settings_have_no_issues(tmp_path: Path) -> None:
    assert wheres(tmp_path / "run", tmp_path) == []
    assert wheres(tmp_path / "run", tmp_path, **EVERYTHING) == []


def test_everything_that_is_missing_or_wrong_is_said_at_once(tmp_path: Path) -> None:
    found = wheres(
        tmp_path, "/mnt", image=None, claim="Runs!", namespace="Team", gpu_resource="a/b/c",
        memory_per_node="512GB", env={"RANK": "0"}, node_selector={"zone": "a b", "x y": "a"},
        tolerations=["/"],
    )  # fmt: skip
    keys = ("image", "namespace", "claim", "gpu_resource", "memory_per_node", "node_selector",
            "tolerations", "node_selector", "env")  # fmt: skip
    assert found == [*(f"launch.kubernetes.{key}" for key in keys), "--run-dir"]


def test_the_run_and_what_its_ranks_read_must_be_on_the_claim(tmp_path: Path) -> None:
    mount, elsewhere = tmp_path / "mount", tmp_path / "elsewhere"
    mount.mkdir()
    job = kubernetes_job(mount)
    data = job.data.model_copy(update={"path": str(elsewhere), "corpus": [str(elsewhere)],
                                       "validation": {"books": str(mount / "books")}})  # fmt: skip
    issues = submission_issues(job.model_copy(update={"data": data}), elsewhere / "run")
    assert [issue.where for issue in issues] == ["--run-dir", "data.path"]
    assert f"below {mount}" in issues[0].message


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
