"""Findings from the reports of all hosts: hosts that differ, pairs that are slow or cannot connect,
and every other finding. Pure functions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from statistics import median
from typing import NamedTuple

from mpctl.core.units import bytes_text, few_text, plural, seconds_text
from mpctl.run.doctor.documents import CollectiveReport, Finding, HostReport, PairResult, error, warning
from mpctl.run.doctor.host_findings import host_findings, used_interface
from mpctl.run.doctor.job import Needs, job_findings

MOST_SKEW = 1.0
SLOW = 0.5
LATE, LATE_SECONDS = 3.0, 100e-6
LINK_SHARE = 0.05
"""One TCP connection reaches 10 to 100 % of a link, a smaller share of a faster link."""

Say = Callable[[str, str, str, str, Sequence[str]], Finding]


class Trait(NamedTuple):
    """Property in which hosts should not differ. read: its value on a host, None if unknown."""

    say: Say
    rule: str
    where: str
    read: Callable[[HostReport], object | None]
    hint: str


def find_problems(
    hosts: Sequence[HostReport],
    needs: Needs,
    *,
    skew: Sequence[float] = (),
    pairs: Sequence[PairResult] = (),
    collectives: Sequence[CollectiveReport] = (),
) -> list[Finding]:
    """Every finding, errors first; the same finding about several hosts is one."""
    several = len(hosts) > 1
    each = (
        finding.model_copy(update={"hosts": [host.host]})
        for host in hosts
        for finding in chain(host_findings(host, needs, several=several), job_findings(host, needs))
    )
    every = chain(
        each,
        _number_of_hosts(hosts, needs),
        difference_findings(hosts),
        clock_findings(hosts, skew),
        pair_findings(hosts, pairs),
        collective_findings(collectives),
    )
    return sorted(merged(every), key=lambda finding: finding.status != "error")


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Findings that differ in nothing but their hosts as one with all of these hosts, in order."""
    hosts: dict[tuple[str, ...], list[str]] = {}
    firsts: dict[tuple[str, ...], Finding] = {}
    for finding in findings:
        key = (finding.status, finding.rule, finding.where, finding.message, finding.hint)
        firsts.setdefault(key, finding)
        hosts.setdefault(key, []).extend(finding.hosts)
    return [first.model_copy(update={"hosts": list(dict.fromkeys(hosts[key]))}) for key, first in firsts.items()]


def _number_of_hosts(hosts: Sequence[HostReport], needs: Needs) -> Iterator[Finding]:
    if len(hosts) < needs.nodes:
        message = f"the job needs {needs.nodes} hosts, {len(hosts)} are there"
        yield error("hosts-too-few", "hosts", message, "add hosts, or plan for fewer: --nodes")


def difference_findings(hosts: Sequence[HostReport]) -> Iterator[Finding]:
    """The traits in which hosts differ; the hosts named are those unlike the most common value."""
    for trait in TRAITS:
        values = {number: trait.read(host) for number, host in enumerate(hosts)}
        groups: dict[object, list[str]] = defaultdict(list)
        for number, value in values.items():
            if value is not None:
                groups[value].append(hosts[number].host)
        if len(groups) > 1:
            by_size = sorted(groups.items(), key=lambda group: -len(group[1]))
            texts = [f"{value} on {few_text(names)}" for value, names in by_size]
            others = [name for _, names in by_size[1:] for name in names]
            message = f"differs: {'; '.join(texts)}"
            yield trait.say(trait.rule, trait.where, message, trait.hint, others)


def _minor(host: HostReport) -> str | None:
    return None if host.software is None else ".".join(host.software.python.split(".")[:2])


def _driver(host: HostReport) -> str | None:
    return host.gpus.devices[0].driver if host.gpus and host.gpus.devices else None


def _gpus(host: HostReport) -> str | None:
    """Return `8 x NVIDIA H100 80GB HBM3`; None if nvidia-smi does not report it."""
    if host.gpus is None or host.gpus.error:
        return None
    counts = Counter(gpu.name for gpu in host.gpus.devices)
    return ", ".join(f"{count} x {name}" for name, count in sorted(counts.items())) or "none"


def _settings(host: HostReport) -> str | None:
    """The variables of NCCL and gloo; interfaces may have other names on other hosts."""
    if host.software is None:
        return None
    pairs = host.software.environment.items()
    ours = [
        f"{name}={value}"
        for name, value in pairs
        if name.startswith(("NCCL_", "GLOO_")) and not name.endswith("_SOCKET_IFNAME")
    ]
    return " ".join(ours) or "none"


SAME = "install the same version on all hosts"
TRAITS = (
    Trait(error, "mpctl-differs", "mpctl", lambda h: h.software and h.software.mpctl, SAME),
    Trait(error, "torch-differs", "torch", lambda h: h.software and h.software.torch, SAME),
    Trait(error, "nccl-differs", "NCCL", lambda h: h.torch and h.torch.nccl, SAME),
    Trait(warning, "python-differs", "Python", _minor, SAME),
    Trait(
        warning,
        "architecture-differs",
        "architecture",
        lambda h: h.software and h.software.architecture,
        "losses may differ in their last digits",
    ),
    Trait(warning, "driver-differs", "NVIDIA driver", _driver, SAME),
    Trait(warning, "gpus-differ", "GPUs", _gpus, "the slowest sets the pace"),
    Trait(
        warning,
        "processors-differ",
        "processors",
        lambda h: h.processor and h.processor.cores,
        "the slowest sets the pace",
    ),
    Trait(warning, "settings-differ", "environment", _settings, "set NCCL_ and GLOO_ variables alike on all hosts"),
)


def clock_findings(hosts: Sequence[HostReport], skew: Sequence[float]) -> Iterator[Finding]:
    for host, seconds in zip(hosts, skew, strict=False):
        if abs(seconds) > MOST_SKEW:
            word = "ahead of" if seconds > 0 else "behind"
            message = f"{seconds_text(abs(seconds))} {word} the launcher's"
            hint = "synchronise it (chrony, systemd-timesyncd): times in logs would mislead"
            yield warning("clock-skew", "clock", message, hint, [host.host])


OPEN_PORTS = (
    "open all TCP ports between the hosts (firewall, security group), and see that their "
    "names lead to addresses of the network that they share"
)
SEE_LINK = "see the link of that host: ethtool, cables, other traffic"
Pair = tuple[int, int]


def pair_findings(hosts: Sequence[HostReport], pairs: Sequence[PairResult]) -> Iterator[Finding]:
    """Pairs that cannot connect, and pairs far slower than their link or than the median of all."""
    speeds = [_link_speed(host) for host in hosts]
    apart: dict[Pair, str] = {}
    below: dict[Pair, str] = {}
    rates: dict[Pair, float] = {}
    delays: dict[Pair, float] = {}
    for pair in pairs:
        ends = pair.first, pair.second
        if pair.error:
            apart[ends] = f"({pair.error})"
        if pair.latency is not None:
            delays[ends] = pair.latency
        if pair.rate is None:
            continue
        rates[ends] = pair.rate
        link = min((speed for speed in (speeds[n] for n in ends) if speed), default=0)
        if 8 * pair.rate < LINK_SHARE * link:
            below[ends] = f"{bytes_text(pair.rate)}/s over {link / 1e9:g} Gbit/s"
    rate, delay = (median(values) if values else 0.0 for values in (rates.values(), delays.values()))
    latest = max(LATE * delay, delay + LATE_SECONDS)
    slow = {pair: f"{bytes_text(r)}/s" for pair, r in rates.items() if r < SLOW * rate}
    late = {pair: seconds_text(d) for pair, d in delays.items() if d > latest}
    many = f"{plural(len(apart), 'pair')} of hosts cannot connect: "
    say = partial(_of_pairs, [host.host for host in hosts])
    yield from say(error, "pair-apart", apart, many, OPEN_PORTS)
    yield from say(warning, "pair-below-link", below, "", SEE_LINK)
    yield from say(warning, "pair-slow", slow, f"median {bytes_text(rate)}/s, but ", SEE_LINK)
    yield from say(warning, "pair-late", late, f"latency: median {seconds_text(delay)}, but ", SEE_LINK)


def _of_pairs(
    names: Sequence[str], say: Say, rule: str, found: Mapping[Pair, str], head: str, hint: str
) -> Iterator[Finding]:
    """One finding for all pairs in `found`, each with a text about it; none without any.

    It names the hosts that are in every one of these pairs, since a host that is slow with all
    others is at fault; without such a host, it names all.
    """
    if not found:
        return
    texts = [f"{names[a]} to {names[b]} {text}" for (a, b), text in found.items()]
    common = set.intersection(*map(set, found)) or {host for pair in found for host in pair}
    yield say(rule, "network", head + few_text(texts), hint, [names[host] for host in sorted(common)])


def _link_speed(host: HostReport) -> int | None:
    """Return the bits per second of the interface that ranks use; None if unknown."""
    used = used_interface(host.network) if host.network is not None else None
    return used.speed if used is not None else None


def collective_findings(reports: Sequence[CollectiveReport]) -> Iterator[Finding]:
    for report in reports:
        for rank, words in report.errors.items():
            message = f"rank {rank} of {report.world_size}: {words}"
            hint = "NCCL_DEBUG=INFO or TORCH_CPP_LOG_LEVEL=INFO tells more; see the interfaces"
            yield error("collective-fails", report.backend, message, hint)
