"""Whether this host can run ranks again after a failure: `python -m mpctl.run.hosts.health` reads a
HealthRequest from stdin (JSON) and prints a HealthReport.

All hosts of a launch run it at the same time, for seconds. Each measures itself anew (hosts/
machine.py), asks nvidia-smi for errors of its GPUs, writes a small file into the run directory, and
connects to other hosts: those with a larger number in the list, while those with a smaller number
connect here. What hangs (a network file system, a driver) is a problem after `seconds`.

A connection is a digest of the token and the number of the host that opened it; the answer is one
byte. Nothing else is read of it, and the port is closed at the end.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import shutil
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from mpctl.run.hosts.machine import HostFacts, host_facts
from mpctl.run.hosts.modules import end_with_parent
from mpctl.run.hosts.probes import UNCORRECTED, RunningProbe, complaint, run_tool, uncorrected_errors, write_probe

GREETING, ANSWER = struct.Struct("!32sI"), b"G"
PROBE_BYTES = 1 << 16
PAUSE_SECONDS = 0.1
MOST_PEERS = 1 << 16


class Checked(BaseModel):
    """Base of the messages: strict types, no further keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Peer(Checked):
    """Where a host can be reached during the check."""

    address: str
    port: int = Field(ge=0, le=65_535)


class HealthRequest(Checked):
    """What a host is to check. key: a file of the run directory, and digest, the SHA-256 of its
    content as the launcher wrote it; seconds: the limit of each probe; needs_gpus: ranks run on
    GPUs; me: the number of this host; peers: where it and those that it connects with are, by
    their numbers; empty for no connections; token: of this check."""

    key: str
    digest: str
    seconds: float = Field(gt=0, le=600)
    needs_gpus: bool
    me: int = 0
    peers: dict[int, Peer] = Field(default_factory=dict, max_length=MOST_PEERS)
    token: str = ""


class HealthReport(Checked):
    """What a host found. facts: None where they could not be read in time; folder, gpus: what is
    wrong with the run directory as this host sees it, and with its GPUs, empty where nothing is;
    skipped: what could not be looked at; unreachable: why a partner could not be reached, by its
    number; unix_time: of this host's clock at the end, seconds since 1970."""

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
    links = RunningProbe("links", Connections(request).unreachable, limit + PAUSE_SECONDS)
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
    """What is wrong with the run directory here: it is not the launcher's, or cannot be written;
    empty when it is in order. key: a file below it; digest: the SHA-256 of its content."""
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
    """What nvidia-smi says is wrong with the GPUs of this host, empty when nothing is; and why it
    was not asked, empty when it was."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "", "no nvidia-smi: errors of GPUs are not looked at"
    asked = run_tool(tool, f"--query-gpu=index,{UNCORRECTED}", "--format=csv,noheader,nounits")
    if asked.returncode:
        return f"nvidia-smi fails: {complaint(asked)}", ""
    errors = uncorrected_errors(asked.stdout)
    words = (f"{count} on GPU {index}" for index, count in sorted(errors.items()))
    return (f"uncorrected ECC errors: {', '.join(words)}" if errors else ""), ""


class Connections:
    """The connections of this host with its partners."""

    def __init__(self, request: HealthRequest) -> None:
        self.request = request
        self.greeting = hashlib.sha256(request.token.encode()).digest()
        self.deadline = time.monotonic() + request.seconds
        self.larger = [other for other in request.peers if other > request.me]
        self.awaited = {other for other in request.peers if other < request.me}
        self.all_came = threading.Event()

    def unreachable(self) -> dict[int, str]:
        """Why each partner with a larger number could not be reached. Returns once those with a
        smaller number have come, or the time is over. Raises OSError for a port that is taken."""
        if not self.larger and not self.awaited:
            return {}
        failures: dict[int, str] = {}
        with listening(self.request.peers[self.request.me].port) as server:
            threading.Thread(target=self._serve, args=(server,), daemon=True).start()
            probes = [
                threading.Thread(target=self._connect, args=(other, failures), daemon=True) for other in self.larger
            ]
            for probe in probes:
                probe.start()
            for probe in probes:
                probe.join(max(0.0, self.deadline - time.monotonic()))
            if self.awaited:
                self.all_came.wait(max(0.0, self.deadline - time.monotonic()))
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        late = (other for other, probe in zip(self.larger, probes, strict=True) if probe.is_alive())
        return dict.fromkeys(late, "no answer in time") | failures

    def _connect(self, other: int, failures: dict[int, str]) -> None:
        """Greet a partner; one that refuses may not have started yet and is tried again."""
        peer = self.request.peers[other]
        while True:
            left = max(0.1, self.deadline - time.monotonic())
            try:
                with socket.create_connection((peer.address, peer.port), left) as link:
                    link.sendall(GREETING.pack(self.greeting, self.request.me))
                    if link.recv(1) != ANSWER:
                        raise OSError("another program answers there")
                return
            except ConnectionRefusedError as error:
                if time.monotonic() + PAUSE_SECONDS < self.deadline:
                    time.sleep(PAUSE_SECONDS)
                    continue
                why: OSError = error
            except OSError as error:
                why = error
            failures[other] = f"{peer.address} port {peer.port}: {why.strerror or why}"
            return

    def _serve(self, server: socket.socket) -> None:
        with suppress(OSError):  # the check has ended
            while True:
                link, _ = server.accept()
                threading.Thread(target=self._answer, args=(link,), daemon=True).start()

    def _answer(self, link: socket.socket) -> None:
        with link, suppress(OSError, struct.error):
            link.settimeout(self.request.seconds)
            digest, other = GREETING.unpack(link.recv(GREETING.size, socket.MSG_WAITALL))
            if not hmac.compare_digest(digest, self.greeting):
                return
            link.sendall(ANSWER)
            self.awaited.discard(other)
            if not self.awaited:
                self.all_came.set()


def listening(port: int) -> socket.socket:
    """A socket that accepts at a port of all addresses. Raises OSError when it is taken."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=128, dualstack_ipv6=dual)


def main() -> None:
    end_with_parent()
    report = check_health(HealthRequest.model_validate_json(sys.stdin.read()))
    print(report.model_dump_json(), flush=True)
    os._exit(0)  # threads that hang in the kernel would be waited for


if __name__ == "__main__":
    main()
