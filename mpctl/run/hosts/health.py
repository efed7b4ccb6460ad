"""Whether this host can run ranks again after a failure: `python -m mpctl.run.hosts.health` reads a
HealthRequest from stdin (JSON) and prints a HealthReport.

All hosts of a launch run it at the same time, for seconds. Each measures itself anew (hosts/
machine.py), asks nvidia-smi for errors of its GPUs, writes a small file into the run directory, and
connects to other hosts (hosts/peers.py). What hangs (a network file system, a driver) is a problem after `seconds`.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import shutil
import sys
import threading
import time
from pathlib import Path

from pydantic import Field

from mpctl.run.hosts.machine import HostFacts, host_facts
from mpctl.run.hosts.modules import end_with_parent
from mpctl.run.hosts.peers import GO, PAUSE_SECONDS, Partners, Peer
from mpctl.run.hosts.probes import ReportModel, RunningProbe, nvidia_gpus, write_probe

PROBE_BYTES = 1 << 16
MOST_PEERS = 1 << 16


class HealthRequest(ReportModel):
    """Health check to run on a host. key: a file of the run directory; digest: SHA-256 of its content as the launcher
    wrote it; seconds: limit of each probe; needs_gpus: ranks run on GPUs; me: number of this host; peers: addresses of
    this host and its partners, by number; empty for no connections; token: of this check."""

    key: str
    digest: str
    seconds: float = Field(gt=0, le=600)
    needs_gpus: bool
    me: int = 0
    peers: dict[int, Peer] = Field(default_factory=dict, max_length=MOST_PEERS)
    token: str = ""


class HealthReport(ReportModel):
    """Result of a health check on a host. facts: None if not read in time; folder, gpus: problem with the run directory
    as this host sees it, and with its GPUs, empty if none; skipped: checks not made; unreachable: why a partner could
    not be reached, by its number; unix_time: of this host's clock at the end, seconds since 1970."""

    facts: HostFacts | None
    folder: str = ""
    gpus: str = ""
    skipped: list[str] = Field(default_factory=list)
    unreachable: dict[int, str] = Field(default_factory=dict)
    unix_time: float


def check_health(request: HealthRequest) -> HealthReport:
    """Check this host; takes little longer than request.seconds at most."""
    limit = request.seconds
    facts = RunningProbe("facts", host_facts, limit).start()
    folder = RunningProbe("folder", lambda: folder_problem(Path(request.key), request.digest), limit)
    gpus = RunningProbe("gpus", lambda: gpu_problem() if request.needs_gpus else ("", ""), limit)
    links = RunningProbe("links", lambda: unreachable(request), limit + PAUSE_SECONDS)
    for probe in (folder.start(), gpus.start(), links.start(), facts):
        probe.wait()
    gpus_wrong, gpus_skipped = gpus.result or (gpus.error or "", "")
    skipped = [gpus_skipped, f"connections: {links.error}" if links.error else ""]
    return HealthReport(
        facts=None if facts.error else facts.result,
        folder=folder.error or folder.result or "",
        gpus=gpus.error or gpus_wrong,
        skipped=[text for text in skipped if text],
        unreachable={} if links.error else links.result or {},
        unix_time=time.time(),
    )


def folder_problem(key: Path, digest: str) -> str:
    """Return the problem with the run directory here, empty if none: not the launcher's, or not writable. key: a file
    in it; digest: SHA-256 of its content."""
    folder = key.parent
    try:
        content = key.read_bytes()
    except OSError as error:
        return f"does not see the run directory: {key}: {error.strerror or error}"
    if not hmac.compare_digest(hashlib.sha256(content).hexdigest(), digest):
        return f"sees another directory than the launcher: {folder}"
    try:
        write_probe(folder, PROBE_BYTES)
    except OSError as error:
        return f"cannot write into the run directory: {folder}: {error.strerror or error}"
    return ""


def gpu_problem() -> tuple[str, str]:
    """Return the problem with this host's GPUs by nvidia-smi, and the reason why it was not asked; each empty if
    none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "", "no nvidia-smi: errors of GPUs are not looked at"
    try:
        gpus = nvidia_gpus(tool)
    except OSError as error:
        return f"nvidia-smi fails: {error}", ""
    words = [f"{gpu.uncorrected_errors} on GPU {gpu.index}" for gpu in gpus if gpu.uncorrected_errors]
    return (f"uncorrected ECC errors: {', '.join(words)}" if words else ""), ""


def unreachable(request: HealthRequest) -> dict[int, str]:
    """Return why partners with a larger number could not be reached. Returns once those with a smaller number have
    come, or the time is over. Raises OSError for a port that is taken."""
    partners = Partners(request.me, request.peers.keys(), request.token, lambda link: link.sendall(GO))
    if not partners.larger and not partners.awaited:
        return {}
    deadline = time.monotonic() + request.seconds
    failures: dict[int, str] = {}

    def connect(other: int) -> None:
        peer = request.peers[other]
        try:
            _, link = partners.connect(peer, max(0.1, deadline - time.monotonic()), deadline)
            with link:
                if link.recv(1) != GO:
                    raise OSError("another program answers there")
        except OSError as error:
            failures[other] = f"{peer.address} port {peer.port}: {error.strerror or error}"

    with partners.listening(request.peers[request.me].port):
        links = [threading.Thread(target=connect, args=(other,), daemon=True) for other in partners.larger]
        for link in links:
            link.start()
        for link in links:
            link.join(max(0.0, deadline - time.monotonic()))
        partners.all_came.wait(max(0.0, deadline - time.monotonic()))
    late = (other for other, link in zip(partners.larger, links, strict=True) if link.is_alive())
    return dict.fromkeys(late, "no answer in time") | failures


def main() -> None:
    end_with_parent()
    report = check_health(HealthRequest.model_validate_json(sys.stdin.read()))
    print(report.model_dump_json(), flush=True)
    os._exit(0)  # threads that hang in the kernel would be waited for


if __name__ == "__main__":
    main()
