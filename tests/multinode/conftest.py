"""Every test names what it needs, `pytest.mark.cluster("slurm")`, and is skipped without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multinode.needs import NEEDS, reason_to_skip
from tests.multinode.slurm import SlurmCluster, slurm_cluster
from tests.multinode.ssh_hosts import SshHosts, loopback_hosts, namespace_hosts

FOLDER = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, what cannot run on this machine."""
    for item in items:
        if FOLDER not in item.path.parents:
            continue
        needs = [need for mark in item.iter_markers("cluster") for need in mark.args]
        if not needs or set(needs) - set(NEEDS):
            text = f"{item.nodeid}: add pytestmark = pytest.mark.cluster(NEED); NEED: {[*NEEDS]}"
            raise pytest.UsageError(text)
        for reason in filter(None, map(reason_to_skip, needs)):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A Slurm of two nodes on this machine, up while the tests that use it run."""
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def slurm_of_three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A Slurm of the nodes n1, n2 and n3."""
    folder = tmp_path_factory.mktemp("slurm3")
    with slurm_cluster(folder, names=("n1", "n2", "n3")) as cluster:
        yield cluster


@pytest.fixture
def ssh_hosts(tmp_path: Path) -> Iterator[SshHosts]:
    """Hosts n1 and n2, both this machine, with an sshd each."""
    with loopback_hosts(tmp_path / "ssh") as hosts:
        yield hosts


@pytest.fixture
def three_ssh_hosts(tmp_path: Path) -> Iterator[SshHosts]:
    """Hosts n1, n2 and n3, all this machine, with an sshd each."""
    with loopback_hosts(tmp_path / "ssh", ("n1", "n2", "n3")) as hosts:
        yield hosts


@pytest.fixture
def namespaces(tmp_path: Path) -> Iterator[SshHosts]:
    """Hosts n1 and n2 with addresses and process tables of their own, and links that can be cut."""
    with namespace_hosts(tmp_path / "ssh") as hosts:
        yield hosts
