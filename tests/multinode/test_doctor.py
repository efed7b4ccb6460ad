"""`mpctl doctor` on hosts that ssh reaches, and in a Slurm allocation; all are this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from mpctl.run.doctor.documents import Diagnosis
from tests.multinode.slurm import SlurmCluster
from tests.multinode.ssh_hosts import SshHosts


def doctor(hosts: SshHosts, run_dir: Path, *more: str) -> tuple[int, Diagnosis]:
    """Exit code and document of `mpctl doctor --on ssh` on n1 and n2."""
    hostfile = hosts.hostfile("n1 slots=2", "n2 slots=2")
    command = [
        sys.executable,
        "-m",
        "mpctl",
        "doctor",
        "--hostfile",
        str(hostfile),
        "--set",
        f"launch.ssh.config={json.dumps(str(hosts.config))}",
        "--run-dir",
        str(run_dir),
        "--json",
        *more,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.stdout, done.stderr
    return done.returncode, Diagnosis.model_validate_json(done.stdout)


def errors(diagnosis: Diagnosis) -> list[str]:
    """Every error in words."""
    return [
        f"{finding.where} {finding.hosts}: {finding.message}"
        for finding in diagnosis.findings
        if finding.status == "error"
    ]


def rules(diagnosis: Diagnosis, status: str = "error") -> set[str]:
    return {finding.rule for finding in diagnosis.findings if finding.status == status}


def processes(word: str) -> list[int]:
    found = psutil.process_iter(["cmdline"])
    return [p.pid for p in found if word in " ".join(p.info["cmdline"] or [])]


@pytest.mark.cluster("ssh")
def test_two_hosts_without_a_job(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    """All hosts of the hostfile are looked at, measured as a pair, and left as they were."""
    run_dir = tmp_path / "shared" / "runs"
    code, diagnosis = doctor(ssh_hosts, run_dir, "--collectives")
    assert (code, errors(diagnosis)) == (0, [])
    assert [host.host for host in diagnosis.hosts] == ["n1", "n2"]
    assert all(host.torch and host.folder and host.folder.is_shared for host in diagnosis.hosts)
    assert [pair.error for pair in diagnosis.pairs] == [None]
    assert [(c.hosts, c.world_size, c.errors) for c in diagnosis.collectives] == [(1, 2, {}), (2, 2, {})]
    assert all(0 < seconds < 60 for seconds in diagnosis.connect_seconds)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "ssh") == []
    assert processes(str(run_dir)) == []


@pytest.mark.cluster("ssh")
def test_a_host_that_refuses_is_named_with_a_way_out(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    ssh_hosts.stop("n2")
    code, diagnosis = doctor(ssh_hosts, tmp_path / "runs")
    assert code == 1
    (finding,) = diagnosis.findings
    assert "n2" in finding.where + finding.message
    assert finding.hint


@pytest.mark.cluster("ssh")
def test_a_host_with_a_run_directory_of_its_own(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    ssh_hosts.restart("n2", hide=folder)
    code, diagnosis = doctor(ssh_hosts, folder)
    assert code == 1
    assert "run-dir-not-shared" in rules(diagnosis)


@pytest.mark.cluster("ssh", "netns")
def test_hosts_with_networks_of_their_own(namespaces: SshHosts, tmp_path: Path) -> None:
    """Each host has one link: the interface that leads to n1, and the pair is measured over it."""
    code, diagnosis = doctor(namespaces, tmp_path / "runs")
    assert (code, errors(diagnosis)) == (0, [])
    networks = [host.network for host in diagnosis.hosts]
    assert [network and network.host for network in networks] == ["n1", "n2"]
    second = networks[1]
    assert second is not None and second.towards not in (None, "lo")
    assert [pair.error for pair in diagnosis.pairs] == [None]


@pytest.mark.cluster("slurm")
def test_all_nodes_of_an_allocation(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Without --on: an allocation of several nodes is found in the environment."""
    command = [sys.executable, "-m", "mpctl", "doctor", "--json", "--run-dir", str(tmp_path)]
    done = slurm.run(["salloc", "-Q", "-N2", *command], seconds=180)
    assert done.returncode == 0, done.stdout + done.stderr
    diagnosis = Diagnosis.model_validate_json(done.stdout)
    assert (diagnosis.backend, errors(diagnosis)) == ("slurm", [])
    assert [host.host for host in diagnosis.hosts] == ["n1", "n2"]
    assert [pair.error for pair in diagnosis.pairs] == [None]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.cluster("slurm")
def test_outside_of_an_allocation_the_way_out_is_named(slurm: SlurmCluster) -> None:
    command = [sys.executable, "-m", "mpctl", "doctor", "--on", "slurm", "--nodes", "2"]
    done = slurm.run(command)
    assert done.returncode == 1
    assert "salloc -N 2" in done.stdout
