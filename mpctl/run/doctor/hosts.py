"""The hosts to examine: this one, or those of a launcher backend, by their node agents.

A module of mpctl runs on all of them at once. It reads its request as JSON from stdin (so that a
token in it is not in the list of processes) and prints the answer as JSON.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from mpctl.core.durable import remove
from mpctl.core.errors import InputError
from mpctl.plan.planning.plan import Plan
from mpctl.records.rundir.directory import RunDir, cannot_write
from mpctl.run.clusters.backend import Backend
from mpctl.run.doctor.filesystem import nearest_folder
from mpctl.run.hosts.probes import HostAnswer, ReportModel, run_here
from mpctl.run.launch.cluster import Cluster
from mpctl.run.launch.control.cluster import AgentCluster
from mpctl.run.launch.control.messages import outer_addresses


class Hosts(Protocol):
    """The hosts to examine, in order.

    names: the launcher's name of each; addresses: at which the other hosts reach it;
    connect_seconds: how long each took to connect, empty where nothing had to be connected.
    """

    names: list[str]
    addresses: list[str]
    connect_seconds: list[float]

    @property
    def cluster(self) -> Cluster | None:
        """The hosts as a launch has them; None on the launcher's host alone."""

    def run(self, module: str, requests: Sequence[ReportModel], seconds: float) -> list[HostAnswer]:
        """Run `python -m module` on every host at the same time, each with its request; one answer
        a host, in order."""


class LocalHosts:
    """This host, once for each name: several names are several processes on it."""

    cluster = None

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.addresses = [*names], ["127.0.0.1"] * len(names)
        self.connect_seconds: list[float] = []

    def run(self, module: str, requests: Sequence[ReportModel], seconds: float) -> list[HostAnswer]:
        """Run a process a request, all at the same time. Ctrl-C does not wait for them: they end
        with this process."""
        return [answer.result() for answer in [_started(module, r, seconds) for r in requests]]


def _started(module: str, request: ReportModel, seconds: float) -> Future[HostAnswer]:
    """The future answer of a module that a thread runs."""
    answer: Future[HostAnswer] = Future()

    def work() -> None:
        try:
            answer.set_result(run_here(module, request.model_dump_json(), seconds))
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return answer


SPARE_SECONDS = 15.0


class AgentHosts:
    """The hosts of a cluster whose agents are connected. began: when the first was started, by
    time.monotonic()."""

    def __init__(self, cluster: AgentCluster, began: float) -> None:
        self.cluster = cluster
        self.connect_seconds = [link.connected - began for link in cluster.links]
        self.names = [link.name for link in cluster.links]
        self.addresses = outer_addresses(cluster.hellos)

    def run(self, module: str, requests: Sequence[ReportModel], seconds: float) -> list[HostAnswer]:
        """Run a module on every host at the same time. The answer of a host that is lost meanwhile
        reports that."""
        sent, server = time.time(), self.cluster.server
        futures = [
            server.request(link.node, "run_module", module=module, text=request.model_dump_json(), seconds=seconds)
            for link, request in zip(self.cluster.links, requests, strict=True)
        ]
        deadline = time.monotonic() + seconds + SPARE_SECONDS
        return [_answer(future, sent, deadline) for future in futures]


def _answer(future: Future[Any], sent: float, deadline: float) -> HostAnswer:
    try:
        return HostAnswer.of(future.result(max(0.0, deadline - time.monotonic())), sent)
    except TimeoutError:
        return HostAnswer.of(TimeoutError("no answer in time"), sent)
    except RuntimeError as error:  # lost
        return HostAnswer.of(error, sent)


OnEvent = Callable[[str], None]


@contextmanager
def connected_hosts(backend: Backend, plan: Plan, run_dir: Path, on_event: OnEvent) -> Iterator[Hosts]:
    """The hosts of a backend; nothing is left on them afterwards.

    Node agents need a directory that all hosts share: a new one in `run_dir`, removed afterwards
    with the folders that were made for it. Raises InputError with every reason why a host could not
    be used.
    """
    if backend.name == "local":
        yield LocalHosts([socket.gethostname()])
        return
    if issues := backend.check(plan):
        raise InputError(issues)
    began = time.monotonic()
    with scratch_run(run_dir) as run, backend.connect(plan, run, on_event) as cluster:
        if not isinstance(cluster, AgentCluster):
            message = f"its hosts have no node agents that mpctl doctor could ask: {backend.name}"
            raise InputError.of("no-agents", "--on", message, "run `mpctl doctor` on each host")
        yield AgentHosts(cluster, began)


@contextmanager
def scratch_run(folder: Path) -> Iterator[RunDir]:
    """A new run directory in `folder`, removed with its content at the end. Raises InputError when
    it cannot be written."""
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
