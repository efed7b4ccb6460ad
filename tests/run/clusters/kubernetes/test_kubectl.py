"""kubectl itself against an API server: what it creates, and how its failures are distinguished."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest

from mpctl.run.clusters.kubernetes.jobs import resource
from mpctl.run.clusters.kubernetes.kubectl import KNOWN, Kubectl, KubectlError, failure_issue
from tests.run.clusters.kubernetes.api_server import Cluster, point_kubectl
from tests.run.clusters.kubernetes.jobs import KINDS
from tests.run.clusters.kubernetes.test_manifest import text_of


def text(kind: str = "TrainJob", **settings: object) -> str:
    return text_of(kind, **settings)


def refusal(kubectl: Kubectl, document: str) -> str:
    with pytest.raises(KubectlError) as caught:
        kubectl.create(document)
    assert caught.value.issues[0].hint
    return caught.value.rule


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_is_created_read_and_deleted(kubernetes: Cluster, kind: str) -> None:
    kubectl, plural = Kubectl(), resource(kind).partition(".")[0]
    kubectl.create(text(kind), dry_run=True)
    assert kubernetes.names(plural) == []
    kubectl.create(text(kind))
    assert kubernetes.names(plural) == ["llama-1"]
    assert kubectl.get(resource(kind), "llama-1")["kind"] == kind
    kubectl.delete(resource(kind), "llama-1")
    assert kubernetes.names(plural) == []
    assert kubectl.find(resource(kind), "llama-1") is None
    kubectl.delete(resource(kind), "llama-1")  # again: there is nothing to do


def test_fields_are_checked_by_the_server(kubernetes: Cluster) -> None:
    Kubectl().create(text(namespace="team-a"))
    assert any("fieldValidation=Strict" in line for line in kubernetes.requests)
    wrong = text(namespace="team-a").replace("numNodes", "numNods")
    with pytest.raises(KubectlError, match="numNods: unknown field"):
        Kubectl("team-a").create(wrong)


def test_refusals_of_the_server_are_distinguished(kubernetes: Cluster) -> None:
    kubectl = Kubectl()
    kubectl.create(text())
    assert refusal(kubectl, text()) == "already-exists"
    jobs = "trainjobs.trainer.kubeflow.org"
    for (code, reason, message), rule in {
        (403, "Forbidden", f'{jobs} is forbidden: User "ann" cannot create resource'): "forbidden",
        (403, "Forbidden", f'{jobs} "a" is forbidden: exceeded quota: gpus'): "over-quota",
        (
            403,
            "Forbidden",
            'admission webhook "validator.trainjob" denied the request: spec.runtimeRef: Invalid value: "x": not found',
        ): "refused-by-webhook",
        (404, "NotFound", 'namespaces "team-a" not found'): "no-namespace",
        (401, "Unauthorized", "Unauthorized"): "not-logged-in",
    }.items():
        kubernetes.refusal = (code, reason, message)
        assert refusal(kubectl, text()) == rule, message


def test_a_kind_that_is_not_installed(kubernetes: Cluster) -> None:
    kubernetes.installed = ("kubeflow.org/v1",)
    with pytest.raises(KubectlError, match="does not know this kind"):
        Kubectl().get(resource("TrainJob"), "llama-1")


def test_a_claim_that_is_absent_is_not_an_error(kubernetes: Cluster) -> None:
    assert Kubectl().find("persistentvolumeclaims", "runs") is None
    claim = {"kind": "PersistentVolumeClaim", "apiVersion": "v1", "metadata": {"name": "runs"}}
    kubernetes.add("persistentvolumeclaims", claim)
    assert Kubectl().find("persistentvolumeclaims", "runs") is not None


def test_a_cluster_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    point_kubectl(tmp_path, monkeypatch, f"http://127.0.0.1:{port}")
    assert refusal(Kubectl(), text()) == "no-cluster"
    assert refusal(Kubectl(context="elsewhere"), text()) == "no-context"


def test_without_kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert refusal(Kubectl(), text()) == "no-kubectl"


def test_namespace_and_context_are_options_of_every_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kubectl").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    said = Kubectl("team-a", "big").call("get", "pods")
    assert said == "--namespace=team-a --context=big --request-timeout=20s get pods\n"


WORDS = {
    "no-such-kind": 'error: resource mapping not found for name: "a" namespace: "" from "STDIN": '
    'no matches for kind "TrainJob" in version "trainer.kubeflow.org/v1alpha1"\nensure CRDs are '
    "installed first",
    "no-cluster": "Unable to connect to the server: dial tcp 10.0.0.1:6443: i/o timeout",
    "not-logged-in": "error: You must be logged in to the server (Unauthorized)",
    "no-context": "error: current-context is not set",
    "kubectl-failed": "error: something new",
}


@pytest.mark.parametrize("rule", WORDS)
def test_words_of_kubectl(rule: str) -> None:
    """Words that the server of these tests does not bring about, as kubectl 1.32 writes them."""
    log = "E1122 02:45:05.381096    9450 memcache.go:265] Unhandled Error\n\n"
    issue = failure_issue(log + WORDS[rule], "create")
    assert issue.rule == rule and issue.hint and "memcache" not in issue.message


def test_a_failure_without_words() -> None:
    assert "said nothing" in failure_issue("", "get").message
    assert len({known.rule for known in KNOWN}) == len(KNOWN)
