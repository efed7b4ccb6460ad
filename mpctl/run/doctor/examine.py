"""All of `mpctl doctor`: probe every host, measure pairs, run collectives, find problems."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpctl import __version__
from mpctl.core.units import plural
from mpctl.run.doctor.collectives import BACKENDS
from mpctl.run.doctor.documents import (
    CollectiveReport,
    CollectiveRequest,
    CollectiveTiming,
    Diagnosis,
    HostReport,
    PairReport,
    PairRequest,
    PairResult,
    ProbeFailure,
    ProbeRequest,
)
from mpctl.run.doctor.filesystem import nearest_folder
from mpctl.run.doctor.findings import find_problems
from mpctl.run.doctor.host_findings import used_interface
from mpctl.run.doctor.hosts import Hosts
from mpctl.run.doctor.job import Needs
from mpctl.run.doctor.pairs import MOST_ROUNDS, partners
from mpctl.run.hosts.checks import Device
from mpctl.run.hosts.peers import Peer
from mpctl.run.hosts.probes import HostAnswer, NoAnswer

Progress = Callable[[str, int, int], None]
PORTS = range(20_000, 32_000)  # below the ephemeral range of Linux
PAIR_SECONDS = 1.5
TORCH_SECONDS, START_SECONDS = 120.0, 30.0


@dataclass(frozen=True)
class Examination:
    """Options of an examination. backend: name of the launcher backend; job: name of the job; collectives: run an
    all-reduce of torch as well; torch: import torch."""

    backend: str
    run_dir: Path
    needs: Needs
    job: str | None = None
    collectives: bool = False
    torch: bool = True


def examine(hosts: Hosts, wanted: Examination, on_progress: Progress) -> Diagnosis:
    """Probe all hosts, measure, find problems. on_progress: (stage, done, total)."""
    on_progress(f"looking at {plural(len(hosts.names), 'host')}", 0, 0)
    reports, skew = probe_hosts(hosts, wanted)
    pairs: list[PairResult] = []
    if len(hosts.names) > 1:
        on_progress("measuring pairs of hosts", 0, 0)
        pairs = measure_all_pairs(hosts, reports)
    collectives: list[CollectiveReport] = []
    if wanted.collectives:
        on_progress("running all-reduces", 0, 0)
        collectives = run_collectives(hosts, reports, wanted.needs)
    count = len(reports)
    return Diagnosis(
        mpctl=__version__,
        backend=wanted.backend,
        job=wanted.job,
        hosts=reports,
        skew=skew,
        connect_seconds=list(hosts.connect_seconds),
        pairs=pairs,
        all_pairs=count * (count - 1) // 2,
        collectives=collectives,
        findings=find_problems(reports, wanted.needs, skew=skew, pairs=pairs, collectives=collectives),
    )


def probe_hosts(hosts: Hosts, wanted: Examination) -> tuple[list[HostReport], list[float]]:
    """The reports of all hosts, and each clock's difference to this one's in seconds.

    Meanwhile the run directory (or the folder above it that exists) has a file with a nonce: a host
    that reads it shares the directory.
    """
    nonce, folder = secrets.token_hex(16), nearest_folder(wanted.run_dir)
    file = folder / f".mpctl-doctor-{nonce[:8]}"
    is_written = _write(file, nonce)
    request = ProbeRequest(
        run_dir=str(wanted.run_dir.absolute()),
        nonce_file=file.name if is_written else None,
        nonce=nonce,
        towards=hosts.addresses[0],
        torch_seconds=TORCH_SECONDS if wanted.torch else 0.0,
    )
    try:
        answers = hosts.run("mpctl.run.doctor.probe", [request] * len(hosts.names), TORCH_SECONDS + START_SECONDS)
    finally:
        if is_written:
            file.unlink(missing_ok=True)
    reports = [_report(name, answer) for name, answer in zip(hosts.names, answers, strict=True)]
    return reports, [clock_skew(r, a) for r, a in zip(reports, answers, strict=True)]


def _write(file: Path, text: str) -> bool:
    try:
        file.write_text(text, "utf-8")
    except OSError:
        return False
    return True


def _report(name: str, answer: HostAnswer) -> HostReport:
    """A host's report under the launcher's name for it; without an answer, a report of that."""
    try:
        return answer.read(HostReport).model_copy(update={"host": name})
    except NoAnswer as error:
        failure = ProbeFailure(probe="host", error=str(error))
        return HostReport(host=name, unix_time=0.0, failures=[failure])


def clock_skew(report: HostReport, answer: HostAnswer) -> float:
    """The host's clock minus this one's: 0 if it is between request and answer, else its distance
    from the nearer of the two."""
    if not report.unix_time:
        return 0.0
    ahead, behind = report.unix_time - answer.received, report.unix_time - answer.sent
    return max(ahead, 0.0) + min(behind, 0.0)


def measure_all_pairs(hosts: Hosts, reports: Sequence[HostReport]) -> list[PairResult]:
    """Latency and bandwidth of all pairs of hosts that answered; of many hosts a sample."""
    alive = [n for n, report in enumerate(reports) if report.unix_time]
    places = {host: place for place, host in enumerate(alive)}
    base = random.SystemRandom().randrange(PORTS.start, PORTS.stop - len(reports))
    addresses = [Peer(address=hosts.addresses[n], port=base + n) for n in alive]
    token = secrets.token_hex(16)
    requests = [
        PairRequest(
            me=places.get(n, 0),
            hosts=addresses,
            partners=partners(places[n], len(alive)) if n in places else [],
            token=token,
            seconds=PAIR_SECONDS,
        )
        for n in range(len(reports))
    ]
    seconds = START_SECONDS + 10 * min(len(alive), MOST_ROUNDS)
    answers = hosts.run("mpctl.run.doctor.pairs", requests, seconds)
    found: list[PairResult] = []
    for number, answer in enumerate(answers):
        if number in places:
            found += _pairs(number, answer, requests[number], alive)
    return sorted(found, key=lambda pair: (pair.first, pair.second))


def _pairs(number: int, answer: HostAnswer, request: PairRequest, alive: Sequence[int]) -> list[PairResult]:
    """Return the results of host `number`, with indices among all hosts; without an answer, the reason as error."""
    try:
        results = answer.read(PairReport).results
    except NoAnswer as error:
        others = [other for other in request.partners if other > request.me]
        results = [PairResult(first=request.me, second=o, error=str(error)) for o in others]
    return [
        result.model_copy(update={"first": number, "second": alive[result.second]})
        for result in results
        if 0 <= result.second < len(alive)
    ]


def run_collectives(hosts: Hosts, reports: Sequence[HostReport], needs: Needs) -> list[CollectiveReport]:
    """An all-reduce of torch over the ranks of the first host, and over one rank of every host."""
    gpus = min((r.torch.gpus for r in reports if r.torch), default=0)
    device: Device = needs.device or ("cuda" if gpus else "cpu")
    cores = min((r.processor.cores for r in reports if r.processor), default=1)
    most = gpus if device == "cuda" else cores
    inside = max(1, min(most, needs.ranks if needs.ranks > 1 else most))
    shapes = [(1, inside)] if inside > 1 else []
    if len(reports) > 1:
        shapes.append((len(reports), 1))
    return [_collective(hosts, reports, device, *shape) for shape in shapes]


def _collective(
    hosts: Hosts, reports: Sequence[HostReport], device: Device, count: int, ranks: int
) -> CollectiveReport:
    """An all-reduce over `ranks` ranks on each of the first `count` hosts."""
    port = random.SystemRandom().randrange(PORTS.start, PORTS.stop)
    address = hosts.addresses[0] if count > 1 else "127.0.0.1"
    requests = [
        CollectiveRequest(
            first_rank=number * ranks,
            ranks=ranks if number < count else 0,
            world_size=count * ranks,
            address=address,
            port=port,
            device=device,
            interface=_interface(reports[number], alone=count == 1),
            seconds=TORCH_SECONDS,
        )
        for number in range(len(reports))
    ]
    answers = hosts.run("mpctl.run.doctor.collectives", requests, TORCH_SECONDS + START_SECONDS)
    errors: dict[str, str] = {}
    timings: list[CollectiveTiming] = []
    for number, answer in enumerate(answers[:count]):
        try:
            report = answer.read(CollectiveReport)
        except NoAnswer as error:
            errors[str(number * ranks)] = str(error)
            continue
        errors |= report.errors
        timings = timings or report.timings  # by rank 0, of the first host
    return CollectiveReport(
        backend=BACKENDS[device], hosts=count, world_size=count * ranks, timings=timings, errors=errors
    )


def _interface(report: HostReport, *, alone: bool) -> str | None:
    """The interface that the ranks of a host use: that of the loopback for ranks of one host."""
    if report.network is None:
        return None
    if alone:
        up = (each for each in report.network.interfaces if "127.0.0.1" in each.addresses)
        return next((each.name for each in up), None)
    used = used_interface(report.network)
    return used.name if used else None
