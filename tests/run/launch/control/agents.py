"""Node agents as processes of this machine, each in the role of a separate host."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mpctl.core.errors import Issue
from mpctl.run.hosts.checks import unshared_issue
from mpctl.run.launch.control.cluster import AgentOrder


class LocalAgents:
    """An AgentStarter whose agents all run here."""

    def __init__(self, order: AgentOrder) -> None:
        self.order = order
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, nodes: Sequence[int]) -> None:
        for node in nodes:
            command = [sys.executable, *self.order.arguments("127.0.0.1", node)]
            with self.log(node).open("wb") as log:
                self.processes[node] = subprocess.Popen(command, start_new_session=True, stderr=log)

    def log(self, node: int) -> Path:
        return self.order.run / "nodes" / f"agent-{node}.log"

    def failures(self) -> dict[int, Issue]:
        ended = {node: p.poll() for node, p in self.processes.items()}
        return {
            node: unshared_issue(f"n{node}", self.log(node).read_text())
            or Issue("agent-ended", f"n{node}", f"ended with code {code}")
            for node, code in ended.items()
            if code is not None
        }

    def end(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait(20)
