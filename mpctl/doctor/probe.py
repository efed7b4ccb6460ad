"""Measures one host: `python -m mpctl.doctor.probe` reads a ProbeRequest from stdin (JSON) and
prints a HostReport.

All probes run at the same time, each in a thread with a time limit. One that fails, or does not
end, is a line in `failures`; the process ends all the same.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel

from mpctl.doctor.documents import HostReport, ProbeFailure
from mpctl.doctor.filesystem import probe_folder
from mpctl.doctor.gpus import probe_gpus
from mpctl.doctor.hardware import probe_limits, probe_memory, probe_processor
from mpctl.doctor.loopback import measure_loopback
from mpctl.doctor.network import probe_network
from mpctl.doctor.parent import end_with_parent
from mpctl.doctor.requests import ProbeRequest
from mpctl.doctor.software import probe_software, probe_torch

Probe = Callable[[], BaseModel]


@dataclass
class RunningProbe:
    """A probe in a thread of its own. result: None until it has ended, and where it failed."""

    name: str
    probe: Probe
    limit: float
    result: BaseModel | None = None
    error: str | None = None
    seconds: float | None = None
    began: float = field(default_factory=time.monotonic)

    def start(self) -> RunningProbe:
        """Start the probe; the thread does not keep the process alive."""
        self.thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self.thread.start()
        return self

    def wait(self) -> None:
        """Wait until the probe has ended or its time is over."""
        self.thread.join(max(0.0, self.began + self.limit - time.monotonic()))
        if self.thread.is_alive():
            self.error = f"no answer within {self.limit:g} s"

    def _run(self) -> None:
        try:
            self.result = self.probe()
        except Exception as error:  # whatever a probe meets is an answer about the host
            self.error = str(error) or type(error).__name__
        self.seconds = time.monotonic() - self.began


def report_host(request: ProbeRequest) -> HostReport:
    """Run all probes that the request asks for."""
    running = [RunningProbe(*each).start() for each in _probes(request)]
    for probe in running:
        probe.wait()
    if request.loopback:  # alone, since the others would slow it down
        last = RunningProbe("loopback", measure_loopback, request.probe_seconds).start()
        last.wait()
        running.append(last)
    sections = {p.name: p.result for p in running if p.result is not None and p.error is None}
    return HostReport(
        host=socket.gethostname(),
        unix_time=time.time(),
        failures=[ProbeFailure(probe=p.name, error=p.error) for p in running if p.error],
        seconds={p.name: p.seconds for p in running if p.seconds is not None},
        **sections,  # type: ignore[arg-type]
    )


def _probes(request: ProbeRequest) -> list[tuple[str, Probe, float]]:
    """Section of HostReport, its probe and its time limit."""
    limit = request.probe_seconds
    probes: list[tuple[str, Probe, float]] = [
        ("processor", probe_processor, limit),
        ("software", probe_software, limit),
        ("memory", probe_memory, limit),
        ("limits", probe_limits, limit),
        ("gpus", probe_gpus, 4 * limit),
        ("network", lambda: probe_network(request.towards), limit),
    ]
    if request.run_dir is not None:
        run_dir, nonce_file, nonce = Path(request.run_dir), request.nonce_file, request.nonce
        probes.append(("folder", lambda: probe_folder(run_dir, nonce_file, nonce), limit))
    if request.torch_seconds > 0:
        seconds = request.torch_seconds
        probes.append(("torch", lambda: probe_torch(seconds), seconds + 5))
    return probes


def main() -> None:
    """Read the request, print the report and end, also where a probe still hangs."""
    end_with_parent()
    report = report_host(ProbeRequest.model_validate_json(sys.stdin.read()))
    print(report.model_dump_json())
    sys.stdout.flush()
    os._exit(0)  # threads that hang in the kernel would be waited for


if __name__ == "__main__":
    main()
