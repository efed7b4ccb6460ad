"""The hosts of a launch through their node agents, which run the tests on their hosts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from ipaddress import ip_address
from typing import Any

from mpctl.doctor.documents import ReportModel
from mpctl.doctor.hosts import HostAnswer
from mpctl.launch.control.cluster import AgentCluster
from mpctl.launch.control.messages import Hello

SPARE_SECONDS = 15.0


class AgentHosts:
    """The hosts of a cluster whose agents are connected. began: when the first was started, by
    time.monotonic()."""

    def __init__(self, cluster: AgentCluster, began: float) -> None:
        self.cluster = cluster
        self.connect_seconds = [link.connected - began for link in cluster.links]
        self.names = [link.name for link in cluster.links]
        self.addresses = addresses(cluster.hellos)

    def run(self, module: str, requests: Sequence[ReportModel], seconds: float) -> list[HostAnswer]:
        """Run a module on every host at the same time. A host that is lost meanwhile answers that
        it is."""
        sent, server = time.time(), self.cluster.server
        futures = [
            server.request(
                node, "run_module", module=module, text=request.model_dump_json(), seconds=seconds
            )
            for node, request in enumerate(requests)
        ]
        deadline = time.monotonic() + seconds + SPARE_SECONDS
        return [_answer(future, sent, deadline) for future in futures]


def addresses(hellos: Sequence[Hello]) -> list[str]:
    """The address under which the other hosts reach each host: its end of the connection to the
    launcher. For the launcher's own host that is the loopback: then the address at which the other
    hosts reach the launcher."""
    remotes = (hello.remote for hello in hellos)
    outer = next((address for address in remotes if not ip_address(address).is_loopback), None)
    return [
        outer if outer and ip_address(hello.local).is_loopback else hello.local for hello in hellos
    ]


def _answer(future: Future[Any], sent: float, deadline: float) -> HostAnswer:
    try:
        value = future.result(max(0.0, deadline - time.monotonic()))
        code, output, errors = value["code"], str(value["output"]), str(value["errors"])
    except TimeoutError:
        code, output, errors = None, "", "no answer in time"
    except (RuntimeError, KeyError, TypeError) as error:  # lost, or an agent of another version
        code, output, errors = None, "", str(error)
    return HostAnswer(code, output, errors, sent, time.time())
