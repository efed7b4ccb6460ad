"""What follows from the reports of all hosts: hosts that differ, pairs that are slow or cannot
connect, and every other finding. Pure functions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from statistics import median
from typing import NamedTuple

from mpctl.doctor.documents import CollectiveReport, Finding, HostReport, PairResult, error, warning
from mpctl.doctor.host_findings import host_findings, used_interface
from mpctl.doctor.job import Needs, job_findings
from mpctl.units import bytes_text, plural, seconds_text

MOST_SKEW = 1.0
SLOW = 0.5
LATE, LATE_SECONDS = 3.0, 100e-6
LINK_SHARE = 0.05
"""One TCP connection reaches 10 to 100 % of a link, the less the faster the link is."""

SHOWN = 4


class Trait(NamedTuple):
    """Something in which hosts should not differ. read: its value on a host, None where unknown."""

    say: Callable[[str, str, str, str, Sequence[str]], Finding]
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
    return [
        first.model_copy(update={"hosts": list(dict.fromkeys(hosts[key]))})
        for key, first in firsts.items()
    ]


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
            texts = [f"{value} on {names_text(names)}" for value, names in by_size]
            others = [name for _, names in by_size[1:] for name in names]
            message = f"differs: {'; '.join(texts)}"
            yield trait.say(trait.rule, trait.where, message, trait.hint, others)


def names_text(names: Sequence[str]) -> str:
    """Up to four names, `a, b, c and 13 more`."""
    if len(names) <= SHOWN:
        return ", ".join(names)
    return f"{', '.join(names[: SHOWN - 1])} and {len(names) - SHOWN + 1} more"


def _minor(host: HostReport) -> str | None:
    return None if host.software is None else ".".join(host.software.python.split(".")[:2])


def _driver(host: HostReport) -> str | None:
    return host.gpus.devices[0].driver if host.gpus and host.gpus.devices else None


def _gpus(host: HostReport) -> str | None:
    """`8 x NVIDIA H100 80GB HBM3`; None where nvidia-smi could not say."""
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
    Trait(
        warning,
        "settings-differ",
        "environment",
        _settings,
        "set NCCL_ and GLOO_ variables alike on all hosts",
    ),
)  # fmt: skip


def clock_findings(hosts: Sequence[HostReport], skew: Sequence[float]) -> Iterator[Finding]:
    for host, seconds in zip(hosts, skew, strict=False):
        if abs(seconds) > MOST_SKEW:
            word = "ahead of" if seconds > 0 else "behind"
            message = f"{seconds_text(abs(seconds))} {word} the launcher's"
            hint = "synchronise it (chrony, systemd-timesyncd): times in logs would mislead"
            yield warning("clock-skew", "clock", message, hint, [host.host])


def pair_findings(hosts: Sequence[HostReport], pairs: Sequence[PairResult]) -> Iterator[Finding]:
    """Pairs that cannot connect, and pairs far slower than the median of all or than their link."""
    names = [host.host for host in hosts]
    yield from _apart(names, [pair for pair in pairs if pair.error])
    yield from _below_link(hosts, pairs)
    rates = {(p.first, p.second): p.rate for p in pairs if p.rate is not None}
    if len(rates) > 1:
        usual = median(rates.values())
        slow = [pair for pair, rate in rates.items() if rate < SLOW * usual]
        if slow:
            texts = [f"{_pair_text(names, p)} {bytes_text(rates[p])}/s" for p in slow]
            message = f"median {bytes_text(usual)}/s, but {_listed(texts)}"
            yield _slow("pair-slow", names, slow, message)
    delays = {(p.first, p.second): p.latency for p in pairs if p.latency is not None}
    if len(delays) > 1:
        usual = median(delays.values())
        late = [p for p, delay in delays.items() if delay > max(LATE * usual, usual + LATE_SECONDS)]
        if late:
            texts = [f"{_pair_text(names, p)} {seconds_text(delays[p])}" for p in late]
            message = f"latency: median {seconds_text(usual)}, but {_listed(texts)}"
            yield _slow("pair-late", names, late, message)


def _apart(names: Sequence[str], broken: Sequence[PairResult]) -> Iterator[Finding]:
    if broken:
        texts = [f"{_pair_text(names, (p.first, p.second))} ({p.error})" for p in broken]
        yield error(
            "pair-apart",
            "network",
            f"{plural(len(broken), 'pair')} of hosts cannot connect: {_listed(texts)}",
            "open all TCP ports between the hosts (firewall, security group), and see that their "
            "names lead to addresses of the network that they share",
            _in_common(names, [(p.first, p.second) for p in broken]),
        )


def _below_link(hosts: Sequence[HostReport], pairs: Sequence[PairResult]) -> Iterator[Finding]:
    """Pairs that reach less than LINK_SHARE of the nominal rate of their network cards."""
    speeds = [_link_speed(host) for host in hosts]
    slow: dict[tuple[int, int], str] = {}
    for pair in pairs:
        ends = [speed for speed in (speeds[pair.first], speeds[pair.second]) if speed]
        if pair.rate is not None and ends and 8 * pair.rate < LINK_SHARE * min(ends):
            link = f"{min(ends) / 1e9:g} Gbit/s"
            slow[pair.first, pair.second] = f"{bytes_text(pair.rate)}/s over {link}"
    if slow:
        names = [host.host for host in hosts]
        texts = [f"{_pair_text(names, pair)} {text}" for pair, text in slow.items()]
        yield _slow("pair-below-link", names, list(slow), _listed(texts))


def _link_speed(host: HostReport) -> int | None:
    """Bits per second of the interface that ranks use; None where it is not known."""
    used = used_interface(host.network) if host.network is not None else None
    return used.speed if used is not None else None


def _slow(
    rule: str, names: Sequence[str], pairs: Sequence[tuple[int, int]], message: str
) -> Finding:
    hint = "see the link of that host: ethtool, cables, other traffic"
    return warning(rule, "network", message, hint, _in_common(names, pairs))


def _in_common(names: Sequence[str], pairs: Sequence[tuple[int, int]]) -> list[str]:
    """The hosts that are in every one of the pairs: one that is slow with all others is to blame.
    Without such a host, all of them."""
    both = set.intersection(*(set(pair) for pair in pairs))
    return [names[host] for host in sorted(both or {host for pair in pairs for host in pair})]


def _pair_text(names: Sequence[str], pair: tuple[int, int]) -> str:
    return f"{names[pair[0]]} to {names[pair[1]]}"


def _listed(texts: Sequence[str]) -> str:
    more = [f"{len(texts) - SHOWN} more"] if len(texts) > SHOWN else []
    return ", ".join([*texts[:SHOWN], *more])


def collective_findings(reports: Sequence[CollectiveReport]) -> Iterator[Finding]:
    for report in reports:
        for rank, words in report.errors.items():
            message = f"rank {rank} of {report.world_size}: {words}"
            hint = "NCCL_DEBUG=INFO or TORCH_CPP_LOG_LEVEL=INFO tells more; see the interfaces"
            yield error("collective-fails", report.backend, message, hint)
