"""The hosts of a launcher backend, connected for as long as they are looked at."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mpctl.clusters.backend import Backend
from mpctl.doctor.agents import AgentHosts
from mpctl.doctor.filesystem import nearest_folder
from mpctl.doctor.hosts import Hosts, LocalHosts
from mpctl.durable import remove
from mpctl.errors import InputError
from mpctl.launch.cluster import Cluster
from mpctl.launch.control.cluster import AgentCluster
from mpctl.planning.plan import Plan
from mpctl.rundir.directory import RunDir, cannot_write

OnEvent = Callable[[str], None]


@dataclass(frozen=True)
class ConnectedHosts:
    """Hosts that can be looked at. cluster: None on the launcher's host alone."""

    hosts: Hosts
    cluster: Cluster | None = None


@contextmanager
def connected_hosts(
    backend: Backend, plan: Plan, run_dir: Path, on_event: OnEvent
) -> Iterator[ConnectedHosts]:
    """The hosts of a backend; nothing is left on any of them afterwards.

    Node agents need a directory that all hosts share: a new one in `run_dir`, removed afterwards
    with the folders that were made for it. Raises InputError with every reason why a host could not
    be used.
    """
    if backend.name == "local":
        yield ConnectedHosts(LocalHosts([socket.gethostname()]))
        return
    if issues := backend.check(plan):
        raise InputError(issues)
    began = time.monotonic()
    with (
        scratch_run(run_dir) as run,
        backend.connect(plan, run, on_event) as cluster,
    ):
        if not isinstance(cluster, AgentCluster):
            message = f"its hosts have no node agents that mpctl doctor could ask: {backend.name}"
            raise InputError.of("no-agents", "--on", message, "run `mpctl doctor` on each host")
        yield ConnectedHosts(AgentHosts(cluster, began), cluster)


@contextmanager
def scratch_run(folder: Path) -> Iterator[RunDir]:
    """A new run directory in `folder`, and everything of it removed at the end. Raises InputError
    when it cannot be written."""
    existing = nearest_folder(folder)
    path = folder.absolute() / f".mpctl-doctor-{secrets.token_hex(4)}"
    try:
        path.mkdir(parents=True)
    except OSError as error:
        raise cannot_write(path, error) from None
    try:
        yield RunDir(path)
    finally:
        remove(path)
        for made in path.parents:
            if made == existing:
                break
            with suppress(OSError):  # a run may have been started in the folder meanwhile
                made.rmdir()
