"""A run that was submitted to Kubernetes, in the pods of its job: its own command in its own
environment, one process of this machine for each pod."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mpctl.cli.app import run as mpctl
from tests.run.clusters.kubernetes.api_server import Cluster
from tests.run.clusters.kubernetes.test_manifest import pods as pod_specs
from tests.run.clusters.kubernetes.test_submission import claim, command
from tests.run.clusters.torchrun.processes import pod, pytorch_pod
from tests.run.launch.command import PATIENCE, Launched, wait_for

SHORT = ("--set", "training.steps=3", "--set", "training.eval_samples=0")
STARTED: list[subprocess.Popen[bytes]] = []


@pytest.fixture(autouse=True)
def no_pod_is_left() -> Iterator[None]:
    yield
    while STARTED:
        STARTED[-1].kill()
        STARTED.pop().wait()


def start_pods(
    document: dict[str, Any], folder: Path, nodes: Iterable[int] = range(2)
) -> list[subprocess.Popen[bytes]]:
    """What Kubeflow and the kubelet do: each pod's command, with its variables and PET_*."""
    container = pod_specs(document["kind"], document)[0]["containers"][0]
    container = {**container, **document["spec"].get("trainer", {})}
    own = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    kubeflow = pod if document["kind"] == "TrainJob" else pytorch_pod
    processes = []
    for node in nodes:
        world = {**kubeflow(node, 2, "1"), "PET_MASTER_ADDR": "localhost"}
        with (folder / f"pod-{node}.txt").open("wb") as output:
            processes.append(
                subprocess.Popen(
                    container["command"],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **world, **own},
                )
            )
    STARTED.extend(processes)
    return processes


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["TrainJob", "PyTorchJob"])
def test_the_pods_of_a_submitted_run_train_it(
    kubernetes: Cluster, tmp_path: Path, data: Path, finished: Launched, kind: str
) -> None:
    kubernetes.add("persistentvolumeclaims", claim("ReadWriteMany"))
    mount = data.parent  # the claim
    argv = command(mount, data, *SHORT, "--set", f"launch.kubernetes.kind={kind}")
    argv[argv.index("--run-dir") + 1] = str(run := mount / f"of {kind}")
    assert mpctl([*argv, "--submit"]) == 0
    document = yaml.safe_load((run / "kubernetes.yaml").read_text())
    codes = [process.wait(PATIENCE) for process in start_pods(document, tmp_path)]
    assert codes == [0, 0], (tmp_path / "pod-0.txt").read_text()
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records]
    assert losses == pytest.approx(finished.losses[:3], rel=1e-6)
    launcher = json.loads((run / "launcher.json").read_text())
    assert launcher["job_id"] == document["metadata"]["name"]


@pytest.mark.slow
def test_a_pod_that_is_lost_and_one_that_is_drained_are_replaced(
    kubernetes: Cluster, tmp_path: Path, data: Path, finished: Launched
) -> None:
    """As a JobSet's podFailurePolicy and a PyTorchJob's restartPolicy replace them. Pod 0, which
    launches, is lost without a word, and pod 1 waits for the new one. Then pod 1 is drained: both
    end by SIGTERM once they have saved, so that both are started again."""
    kubernetes.add("persistentvolumeclaims", claim("ReadWriteMany"))
    mount = data.parent
    argv = command(mount, data, "--set", "checkpoint.interval=1", "--set", "launch.kubernetes.kind=PyTorchJob")
    argv[argv.index("--run-dir") + 1] = str(run := mount / "replaced")
    assert mpctl([*argv, "--submit"]) == 0
    document = yaml.safe_load((run / "kubernetes.yaml").read_text())

    def at_step(step: int) -> None:
        metrics = run / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= step)

    first, second = start_pods(document, tmp_path)
    at_step(2)
    first.kill()
    assert first.wait(PATIENCE) == -signal.SIGKILL and second.poll() is None
    (first,) = start_pods(document, tmp_path, [0])
    at_step(5)
    second.terminate()
    codes = [process.wait(PATIENCE) for process in (first, second)]
    assert codes == [128 + signal.SIGTERM] * 2, (tmp_path / "pod-0.txt").read_text()
    codes = [process.wait(PATIENCE) for process in start_pods(document, tmp_path)]
    assert codes == [0, 0], (tmp_path / "pod-0.txt").read_text()
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {record["step"]: record["loss"] for record in records}
    assert [losses[step + 1] for step in range(len(finished.losses))] == pytest.approx(finished.losses, rel=1e-6)
