"""A diagnosis on the terminal or as Markdown: the hosts' resources, the findings, the verdict.

Hosts with the same answer share a line, one row for each topic.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

from mpctl.core.units import bytes_text, few_text, plural, seconds_text
from mpctl.render.console import say
from mpctl.render.parts import Facts, Part, Sentence, Style
from mpctl.render.terminal import print_parts
from mpctl.run.doctor.documents import (
    CollectiveReport,
    Diagnosis,
    Finding,
    Folder,
    Gpus,
    Limits,
    Memory,
    NetworkFacts,
    PairResult,
    Processor,
    Software,
    TorchFacts,
)
from mpctl.run.doctor.host_findings import used_interface

SHOWN_GROUPS, SHOWN_PAIRS = 8, 6
Row = tuple[str, str]


def fact_rows(diagnosis: Diagnosis) -> Iterator[Row]:
    """Every topic of which a host reports something."""
    hosts = diagnosis.hosts
    for topic, part, read, form in TOPICS:
        facts = [(host.host, getattr(host, part)) for host in hosts]
        values = [(name, read(fact)) for name, fact in facts if fact is not None]
        known = [(name, value) for name, value in values if value is not None]
        if known and (text := _spread(known, form) if form else _by_host(known, len(hosts))):
            yield topic, text
    if seconds := diagnosis.connect_seconds:
        names = [host.host for host in hosts]
        late, name = max(zip(seconds, names, strict=True))
        yield "connected in", f"{seconds_text(late)} (the last one: {name})"
    if hosts:
        yield "clock", _clocks(diagnosis)
    yield from _pair_rows(diagnosis)
    for report in diagnosis.collectives:
        if report.timings:
            yield "all-reduce", _collective(report)


def _by_host(said: Sequence[tuple[str, str]], hosts: int) -> str:
    """One text if all hosts have the same, else a line for each group of hosts."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name, text in said:
        groups[text].append(name)
    if len(groups) == 1 and len(said) == hosts:
        return next(iter(groups))
    lines = [f"{few_text(names)}: {text}" for text, names in groups.items()]
    more = [f"and {len(lines) - SHOWN_GROUPS} more"] if len(lines) > SHOWN_GROUPS else []
    return "\n".join([*lines[:SHOWN_GROUPS], *more])


def _spread(said: Sequence[tuple[str, float]], form: Callable[[float], str]) -> str:
    """`1.2 GiB` of one host; of several `1.2 GiB (n3) to 4.5 GiB (n1)`."""
    values = [(value, name) for name, value in said]
    (low, first), (high, last) = min(values), max(values)
    if form(low) == form(high):
        return form(low)
    return f"{form(low)} ({first}) to {form(high)} ({last})"


def _software(s: Software) -> str:
    return f"Python {s.python}, mpctl {s.mpctl}, torch {s.torch or 'missing'}, {s.system}"


def _backends(torch: TorchFacts) -> str:
    version = f"NCCL {torch.nccl}" if torch.nccl else "NCCL"
    return ", ".join(
        [
            _backend("gloo", torch.has_gloo, torch.gloo_error, tried=True),
            _backend(version, torch.has_nccl, torch.nccl_error, tried=torch.gpus > 0),
            "no CUDA" if torch.cuda_built is None else f"CUDA {torch.cuda_built}",
        ]
    )


def _backend(name: str, built: bool, error: str | None, *, tried: bool) -> str:
    if not built:
        return f"no {name}"
    return f"{name} fails" if error else f"{name} works" if tried else f"{name} not tried"


def _processors(p: Processor) -> str:
    parts = [f"{p.cores} of {p.logical} usable" if p.cores != p.logical else f"{p.logical} usable"]
    for count, noun in ((p.physical, "core"), (p.sockets, "socket"), (p.numa_nodes, "NUMA node")):
        if count:
            parts.append(plural(count, noun))
    if p.quota is not None:
        parts.append(f"limited to {p.quota:g}")
    return ", ".join([*parts, p.model] if p.model else parts)


def _gpus(gpus: Gpus) -> str:
    counts = Counter((gpu.name, gpu.memory_total, gpu.driver) for gpu in gpus.devices)
    parts = [
        f"{count} x {name}, {bytes_text(memory)}, driver {driver}" for (name, memory, driver), count in counts.items()
    ]
    if not gpus.devices:
        files = gpus.device_files
        unusable = f"none ({gpus.on_bus} on the PCI bus)" if gpus.on_bus else "none"
        parts.append(f"{plural(files, 'device file')}, no nvidia-smi" if files else unusable)
    links = Counter(word for row in gpus.links for word in row if word != "X")
    if links:
        kinds = ", ".join(f"{link} ({count // 2})" for link, count in links.most_common())
        parts.append(f"links {kinds}")
    if gpus.visible is not None:
        parts.append(f"CUDA_VISIBLE_DEVICES={gpus.visible or 'empty'}")
    return "; ".join(parts)


def _memory(m: Memory) -> str:
    swap = f", swap {bytes_text(m.swap_total)}" if m.swap_total else ""
    shm = f", /dev/shm {bytes_text(m.shm_total)}" if m.shm_total is not None else ""
    return f"{bytes_text(m.total)}{swap}{shm}"


def _limits(limits: Limits) -> str:
    files, processes = (
        "unlimited" if value is None else f"{value:,}" for value in (limits.open_files, limits.processes)
    )
    parts = [f"open files {files}", f"processes {processes}"]
    if limits.group_processes is not None:
        parts.append(f"{limits.group_processes:,} more in the control group")
    locked = limits.locked_memory
    parts.append(f"locked memory {'unlimited' if locked is None else bytes_text(locked)}")
    return ", ".join(parts)


def _interfaces(network: NetworkFacts) -> str:
    """The interfaces that are up and have an address; that of gloo comes first."""
    used, parts = used_interface(network), []
    up = [each for each in network.interfaces if each.is_up and each.addresses]
    for each in sorted(up, key=lambda each: each is not used):
        speed = f" {each.speed / 1e9:g} Gbit/s" if each.speed else ""
        mark = " (used)" if each is used else ""
        parts.append(f"{each.name} {each.addresses[0]}{speed}{mark}")
    for name, value in (("GLOO", network.gloo_setting), ("NCCL", network.nccl_setting)):
        if value:
            parts.append(f"{name}_SOCKET_IFNAME={value}")
    return ", ".join(parts)


def _rdma(network: NetworkFacts) -> str | None:
    counts = Counter((port.layer, port.rate, port.state) for port in network.infiniband)
    return ", ".join(f"{n} x {' '.join(what)}" for what, n in counts.items()) or None


def _folder(folder: Folder) -> str:
    where = f"{folder.path} on {folder.device}"
    if folder.write_error:
        return f"{where}, not writable: {folder.write_error}"
    locks = "locks fail" if folder.lock_error else "locks work"
    elsewhere = ", not the launcher's directory" if folder.is_shared is False else ""
    return f"{where}, {locks}{elsewhere}"


def _rate(value: float) -> str:
    return f"{bytes_text(value)}/s"


def free_ports(network: NetworkFacts) -> int:
    """Ports of the ephemeral range that nobody uses."""
    return network.last_port - network.first_port + 1 - network.used_ports


TOPICS: tuple[tuple[str, str, Callable[[Any], Any], Callable[[float], str] | None], ...] = (
    ("software", "software", _software, None),
    ("import torch", "torch", lambda torch: torch.import_seconds, seconds_text),
    ("backends", "torch", _backends, None),
    ("GPUs", "gpus", _gpus, None),
    ("processors", "processor", _processors, None),
    ("load", "processor", lambda processor: processor.load, "{:.1f}".format),
    ("memory", "memory", _memory, None),
    ("free memory", "memory", lambda memory: memory.free, bytes_text),
    ("limits", "limits", _limits, None),
    ("interfaces", "network", _interfaces, None),
    ("RDMA", "network", _rdma, None),
    ("ports", "network", lambda network: f"{network.first_port}-{network.last_port}", None),
    ("free ports", "network", free_ports, "{:,}".format),
    ("run directory", "folder", _folder, None),
    ("free disk", "folder", lambda folder: folder.free, bytes_text),
    ("disk writes", "folder", lambda folder: folder.write_rate, _rate),
    ("disk fsync", "folder", lambda folder: folder.sync_seconds, seconds_text),
    ("loopback", "loopback", lambda loopback: loopback.rate, _rate),
    ("loopback latency", "loopback", lambda loopback: loopback.latency, seconds_text),
)
"""A topic, the part of a host's report that has it, and what is said of it: words, of which hosts
that say the same stand together, or a number and how it is written, of which the range is shown."""


def _clocks(diagnosis: Diagnosis) -> str:
    """Differences between the clocks, measured by pairs of hosts if there are any."""
    offsets = [abs(pair.offset) for pair in diagnosis.pairs if pair.offset is not None]
    if offsets:
        return f"at most {seconds_text(max(offsets))} between two hosts"
    late = max((abs(seconds) for seconds in diagnosis.skew), default=0.0)
    return f"{seconds_text(late)} off the launcher's" if late else "as the launcher's"


def _pair_rows(diagnosis: Diagnosis) -> Iterator[Row]:
    names = [host.host for host in diagnosis.hosts]
    done = [pair for pair in diagnosis.pairs if pair.error is None]
    rates = [pair.rate for pair in done if pair.rate is not None]
    delays = [pair.latency for pair in done if pair.latency is not None]
    if not rates or not delays:
        return
    count = f"{len(diagnosis.pairs)} of {plural(diagnosis.all_pairs, 'pair')} of hosts"
    if len(done) <= SHOWN_PAIRS:
        yield "pairs", "\n".join(_pair(names, pair) for pair in done)
        return
    worst = sorted(done, key=lambda pair: pair.rate or 0.0)[:3]
    rate = f"median {_rate(median(rates))} ({_rate(min(rates))} to {_rate(max(rates))})"
    span = f"{seconds_text(min(delays))} to {seconds_text(max(delays))}"
    yield "pairs", f"{count}: {rate}, {seconds_text(median(delays))} ({span})"
    yield "slowest pairs", "\n".join(_pair(names, pair) for pair in worst)


def _pair(names: Sequence[str], pair: PairResult) -> str:
    rate = "" if pair.rate is None else f" {_rate(pair.rate)}"
    delay = "" if pair.latency is None else f", {seconds_text(pair.latency)}"
    connect = pair.connect_seconds
    opened = "" if connect is None else f", connected in {seconds_text(connect)}"
    return f"{names[pair.first]} to {names[pair.second]}:{rate}{delay}{opened}"


def _collective(report: CollectiveReport) -> str:
    small, large = report.timings[0], report.timings[-1]
    where = "one host" if report.hosts == 1 else f"{report.hosts} hosts"
    return (
        f"{report.backend}, {report.world_size} ranks on {where}: {bytes_text(large.bus_rate)}/s "
        f"(bus rate at {bytes_text(large.size)}), {seconds_text(small.seconds)} "
        f"at {bytes_text(small.size)}"
    )


STYLE: dict[str, Style] = {"error": "refused", "warning": "warning"}
MOST_OF_A_RULE = 5


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Print a diagnosis on stdout, the findings last."""
    print_parts(diagnosis_parts(diagnosis))


def diagnosis_parts(diagnosis: Diagnosis) -> Iterator[Part]:
    """The hosts, their resources, the findings, the verdict."""
    yield Sentence(title_text(diagnosis), "title")
    yield Facts(list(fact_rows(diagnosis)))
    for finding in shown_findings(diagnosis.findings):
        is_named = len(diagnosis.hosts) > 1 and finding.hosts
        hosts = f"{few_text(finding.hosts)} " if is_named else ""
        hint = f"\n  → {finding.hint}" if finding.hint else ""
        text = f"{hosts}{finding.where}: {finding.message}  [{finding.rule}]{hint}"
        yield Sentence(text, STYLE[finding.status])
    yield Sentence(verdict_text(diagnosis), "failed" if diagnosis.has_errors else "passed")


def title_text(diagnosis: Diagnosis) -> str:
    """`2 hosts (ssh): n1, n2, for demo`; without hosts, `hosts (ssh) could not be looked at`."""
    names = [host.host for host in diagnosis.hosts]
    job = "" if diagnosis.job is None else f", for {diagnosis.job}"
    if not names:
        return f"hosts ({diagnosis.backend}) could not be looked at{job}"
    return f"{plural(len(names), 'host')} ({diagnosis.backend}): {few_text(names)}{job}"


def verdict_text(diagnosis: Diagnosis) -> str:
    """Whether a launch would get through, and how many warnings there are."""
    errors = sum(finding.status == "error" for finding in diagnosis.findings)
    warnings = len(diagnosis.findings) - errors
    what = f"a launch of {diagnosis.job}" if diagnosis.job else "a launch"
    counts = f" ({plural(warnings, 'warning')})" if warnings else ""
    if errors:
        return f"{plural(errors, 'error')} would break {what}{counts}"
    return f"nothing found that would break {what}{counts}"


def shown_findings(findings: list[Finding]) -> list[Finding]:
    """At most five of each rule; the last one shown counts the others."""
    shown: list[Finding] = []
    for finding in findings:
        alike = [other for other in findings if other.rule == finding.rule]
        place = alike.index(finding)
        if place == MOST_OF_A_RULE - 1 and len(alike) > MOST_OF_A_RULE:
            more = f"{finding.message} (and {len(alike) - MOST_OF_A_RULE:,} more like this)"
            shown.append(finding.model_copy(update={"message": more}))
        elif place < MOST_OF_A_RULE:
            shown.append(finding)
    return shown


def print_markdown(diagnosis: Diagnosis) -> None:
    """Print a diagnosis as Markdown on stdout."""
    say("\n".join(markdown_lines(diagnosis)))


def markdown_lines(diagnosis: Diagnosis) -> Iterator[str]:
    """A heading, the verdict, the findings as a list, the facts as a table that can be unfolded."""
    yield f"### mpctl doctor ({diagnosis.mpctl}): {_escaped(title_text(diagnosis))}"
    mark = "✗" if diagnosis.has_errors else "✓"
    yield from ("", f"{mark} {_escaped(verdict_text(diagnosis))}", "")
    for finding in shown_findings(diagnosis.findings):
        hosts = f" on {few_text(finding.hosts)}" if finding.hosts else ""
        words = f"{finding.where}{hosts}: {finding.message} [{finding.rule}]"
        hint = f" → {_escaped(finding.hint)}" if finding.hint else ""
        yield f"- **{finding.status}** {_escaped(words)}{hint}"
    yield from ("", "<details><summary>hosts</summary>", "", "| what | value |", "|---|---|")
    for topic, text in fact_rows(diagnosis):
        yield f"| {topic} | {'<br>'.join(map(_escaped, text.splitlines()))} |"
    for host in diagnosis.hosts:
        for name, value in host.software.environment.items() if host.software else ():
            yield f"| {_escaped(host.host)}: `{_escaped(name)}` | {_escaped(value)} |"
    yield from ("", "</details>")


def _escaped(text: str) -> str:
    """Text without Markdown and HTML syntax."""
    for mark in "\\`*_|[]<":
        text = text.replace(mark, f"\\{mark}" if mark != "<" else "&lt;")
    return " ".join(text.split())
