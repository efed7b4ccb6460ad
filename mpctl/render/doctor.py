"""A diagnosis on the terminal or as Markdown: what the hosts have, what is wrong, the verdict.

Hosts that say the same are named together, one row a topic.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import median

from rich.text import Text

from mpctl.doctor.documents import (
    CollectiveReport,
    Diagnosis,
    Finding,
    Folder,
    Gpus,
    HostReport,
    Limits,
    NetworkFacts,
    PairResult,
    Processor,
    TorchFacts,
)
from mpctl.doctor.findings import names_text
from mpctl.doctor.host_findings import used_interface
from mpctl.render.console import NamedRows, get_console, say
from mpctl.units import bytes_text, plural, seconds_text

SHOWN_GROUPS, SHOWN_PAIRS = 8, 6
Row = tuple[str, str]
Number = Callable[[HostReport], float | None]
ByHosts = Callable[[Sequence[HostReport]], str]


def fact_rows(diagnosis: Diagnosis) -> Iterator[Row]:
    """Every topic of which a host reports something."""
    hosts = diagnosis.hosts
    for topic, read in ROWS:
        if text := read(hosts):
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


def _by_host(hosts: Sequence[HostReport], read: Callable[[HostReport], str | None]) -> str:
    """One text where all hosts say the same, else a line for each group of hosts."""
    groups: dict[str, list[str]] = defaultdict(list)
    for host in hosts:
        if (text := read(host)) is not None:
            groups[text].append(host.host)
    if len(groups) == 1 and sum(map(len, groups.values())) == len(hosts):
        return next(iter(groups))
    lines = [f"{names_text(names)}: {text}" for text, names in groups.items()]
    more = [f"and {len(lines) - SHOWN_GROUPS} more"] if len(lines) > SHOWN_GROUPS else []
    return "\n".join([*lines[:SHOWN_GROUPS], *more])


def _spread(hosts: Sequence[HostReport], number: Number, form: Callable[[float], str]) -> str:
    """`1.2 GiB` of one host; of several `1.2 GiB (n3) to 4.5 GiB (n1)`."""
    values = [(value, host.host) for host in hosts if (value := number(host)) is not None]
    if not values:
        return ""
    low, high = min(values), max(values)
    if form(low[0]) == form(high[0]):
        return form(low[0])
    return f"{form(low[0])} ({low[1]}) to {form(high[0])} ({high[1]})"


def _software(host: HostReport) -> str | None:
    s = host.software
    if s is None:
        return None
    return f"Python {s.python}, mpctl {s.mpctl}, torch {s.torch or 'missing'}, {s.system}"


def _backends(host: HostReport) -> str | None:
    return None if host.torch is None else ", ".join(_backend_words(host.torch))


def _backend_words(torch: TorchFacts) -> Iterator[str]:
    yield _backend("gloo", torch.has_gloo, torch.gloo_error, tried=True)
    version = f"NCCL {torch.nccl}" if torch.nccl else "NCCL"
    yield _backend(version, torch.has_nccl, torch.nccl_error, tried=torch.gpus > 0)
    yield "no CUDA" if torch.cuda_built is None else f"CUDA {torch.cuda_built}"


def _backend(name: str, built: bool, error: str | None, *, tried: bool) -> str:
    if not built:
        return f"no {name}"
    return f"{name} fails" if error else f"{name} works" if tried else f"{name} not tried"


def _processors(host: HostReport) -> str | None:
    return None if host.processor is None else ", ".join(_processor_words(host.processor))


def _processor_words(p: Processor) -> Iterator[str]:
    yield f"{p.cores} of {p.logical} usable" if p.cores != p.logical else f"{p.logical} usable"
    if p.physical:
        yield plural(p.physical, "core")
    if p.sockets:
        yield plural(p.sockets, "socket")
    if p.numa_nodes:
        yield plural(p.numa_nodes, "NUMA node")
    if p.quota is not None:
        yield f"limited to {p.quota:g}"
    if p.model:
        yield p.model


def _gpus(host: HostReport) -> str | None:
    return None if host.gpus is None else "; ".join(_gpu_words(host.gpus))


def _gpu_words(gpus: Gpus) -> Iterator[str]:
    counts = Counter((gpu.name, gpu.memory_total, gpu.driver) for gpu in gpus.devices)
    for (name, memory, driver), count in counts.items():
        yield f"{count} x {name}, {bytes_text(memory)}, driver {driver}"
    if not gpus.devices:
        files = gpus.device_files
        unusable = f"none ({gpus.on_bus} on the PCI bus)" if gpus.on_bus else "none"
        yield f"{plural(files, 'device file')}, no nvidia-smi" if files else unusable
    words = Counter(w for row in gpus.links for w in row if w != "X")
    if words:
        yield "links " + ", ".join(f"{link} ({count // 2})" for link, count in words.most_common())
    if gpus.visible is not None:
        yield f"CUDA_VISIBLE_DEVICES={gpus.visible or 'empty'}"


def _memory(host: HostReport) -> str | None:
    m = host.memory
    if m is None:
        return None
    swap = f", swap {bytes_text(m.swap_total)}" if m.swap_total else ""
    shm = f", /dev/shm {bytes_text(m.shm_total)}" if m.shm_total is not None else ""
    return f"{bytes_text(m.total)}{swap}{shm}"


def _limits(host: HostReport) -> str | None:
    return None if host.limits is None else ", ".join(_limit_words(host.limits))


def _limit_words(limits: Limits) -> Iterator[str]:
    yield f"open files {_limit(limits.open_files)}"
    yield f"processes {_limit(limits.processes)}"
    if limits.group_processes is not None:
        yield f"{limits.group_processes:,} more in the control group"
    locked = limits.locked_memory
    yield f"locked memory {'unlimited' if locked is None else bytes_text(locked)}"


def _limit(value: int | None) -> str:
    return "unlimited" if value is None else f"{value:,}"


def _network(host: HostReport) -> str | None:
    return None if host.network is None else ", ".join(_network_words(host.network))


def _network_words(network: NetworkFacts) -> Iterator[str]:
    """The interfaces that are up and carry an address, the one that gloo would use first."""
    used = used_interface(network)
    up = [each for each in network.interfaces if each.is_up and each.addresses]
    for each in sorted(up, key=lambda each: each is not used):
        speed = f" {each.speed / 1e9:g} Gbit/s" if each.speed else ""
        mark = " (used)" if each is used else ""
        yield f"{each.name} {each.addresses[0]}{speed}{mark}"
    for name, value in (("GLOO", network.gloo_setting), ("NCCL", network.nccl_setting)):
        if value:
            yield f"{name}_SOCKET_IFNAME={value}"


def _rdma(host: HostReport) -> str | None:
    ports = host.network.infiniband if host.network else []
    counts = Counter((port.layer, port.rate, port.state) for port in ports)
    return ", ".join(f"{n} x {' '.join(what)}" for what, n in counts.items()) or None


def _ports(host: HostReport) -> str | None:
    n = host.network
    if n is None:
        return None
    return f"{n.first_port}-{n.last_port}"


def _folder(host: HostReport) -> str | None:
    return None if host.folder is None else ", ".join(_folder_words(host.folder))


def _folder_words(folder: Folder) -> Iterator[str]:
    yield f"{folder.path} on {folder.device}"
    if folder.write_error:
        yield f"not writable: {folder.write_error}"
        return
    yield "locks fail" if folder.lock_error else "locks work"
    if folder.is_shared is False:
        yield "not the launcher's directory"


def _number(read: Number, form: Callable[[float], str]) -> ByHosts:
    """A row of a number: one value where all hosts show the same, else the range."""
    return lambda hosts: _spread(hosts, read, form)


def _words(read: Callable[[HostReport], str | None]) -> ByHosts:
    """A row of words, hosts that say the same together."""
    return lambda hosts: _by_host(hosts, read)


def _rate(value: float) -> str:
    return f"{bytes_text(value)}/s"


ROWS: tuple[tuple[str, ByHosts], ...] = (
    ("software", _words(_software)),
    ("import torch", _number(lambda h: h.torch.import_seconds if h.torch else None, seconds_text)),
    ("backends", _words(_backends)),
    ("GPUs", _words(_gpus)),
    ("processors", _words(_processors)),
    ("load", _number(lambda h: h.processor.load if h.processor else None, "{:.1f}".format)),
    ("memory", _words(_memory)),
    ("free memory", _number(lambda h: h.memory.free if h.memory else None, bytes_text)),
    ("limits", _words(_limits)),
    ("interfaces", _words(_network)),
    ("RDMA", _words(_rdma)),
    ("ports", _words(_ports)),
    ("free ports", _number(lambda h: free_ports(h.network) if h.network else None, "{:,}".format)),
    ("run directory", _words(_folder)),
    ("free disk", _number(lambda h: h.folder.free if h.folder else None, bytes_text)),
    ("disk writes", _number(lambda h: h.folder.write_rate if h.folder else None, _rate)),
    ("disk fsync", _number(lambda h: h.folder.sync_seconds if h.folder else None, seconds_text)),
    ("loopback", _number(lambda h: h.loopback.rate if h.loopback else None, _rate)),
    (
        "loopback latency",
        _number(lambda h: h.loopback.latency if h.loopback else None, seconds_text),
    ),
)


def free_ports(network: NetworkFacts) -> int:
    """Ports of the ephemeral range that nobody uses."""
    return network.last_port - network.first_port + 1 - network.used_ports


def _clocks(diagnosis: Diagnosis) -> str:
    """How far the clocks are apart: measured by pairs where there are any."""
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
    yield (
        "pairs",
        (
            f"{count}: median {bytes_text(median(rates))}/s ({bytes_text(min(rates))}/s to "
            f"{bytes_text(max(rates))}/s), {seconds_text(median(delays))} ("
            f"{seconds_text(min(delays))} to {seconds_text(max(delays))})"
        ),
    )
    yield "slowest pairs", "\n".join(_pair(names, pair) for pair in worst)


def _pair(names: Sequence[str], pair: PairResult) -> str:
    rate = "" if pair.rate is None else f" {bytes_text(pair.rate)}/s"
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


MARKS = {"error": ("✗ ", "bold red"), "warning": ("! ", "bold yellow")}
MOST_OF_A_RULE = 5


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Print a diagnosis on stdout, the findings last."""
    console = get_console()
    console.print(Text(title_text(diagnosis), "bold"), soft_wrap=True)
    console.print(NamedRows(fact_rows(diagnosis)))
    several = len(diagnosis.hosts) > 1
    for finding in shown_findings(diagnosis.findings):
        console.print(_finding_text(finding, several=several), soft_wrap=True)
    style = "bold red" if diagnosis.has_errors else "bold green"
    console.print(Text(verdict_text(diagnosis), style), soft_wrap=True)


def title_text(diagnosis: Diagnosis) -> str:
    """`2 hosts (ssh): n1, n2, for demo`; without hosts, `hosts (ssh) could not be looked at`."""
    names = [host.host for host in diagnosis.hosts]
    job = "" if diagnosis.job is None else f", for {diagnosis.job}"
    if not names:
        return f"hosts ({diagnosis.backend}) could not be looked at{job}"
    return f"{plural(len(names), 'host')} ({diagnosis.backend}): {names_text(names)}{job}"


def verdict_text(diagnosis: Diagnosis) -> str:
    """Whether a launch would get through, and how many warnings there are."""
    errors = sum(finding.status == "error" for finding in diagnosis.findings)
    warnings = len(diagnosis.findings) - errors
    what = f"a launch of {diagnosis.job}" if diagnosis.job else "a launch"
    counts = f" ({plural(warnings, 'warning')})" if warnings else ""
    if errors:
        return f"✗ {plural(errors, 'error')} would break {what}{counts}"
    return f"✓ nothing found that would break {what}{counts}"


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


def _finding_text(finding: Finding, *, several: bool) -> Text:
    """`✗ n2 network: message  [rule]`, and the way out in a line of its own."""
    hosts = f"{names_text(finding.hosts)} " if several and finding.hosts else ""
    text = Text.assemble(MARKS[finding.status], (f"{hosts}{finding.where}", "bold"),
                         f": {finding.message}", (f"  [{finding.rule}]", "dim"))  # fmt: skip
    return text.append("\n  → ", "cyan").append(finding.hint) if finding.hint else text


def print_markdown(diagnosis: Diagnosis) -> None:
    """Print a diagnosis as Markdown on stdout."""
    say("\n".join(markdown_lines(diagnosis)))


def markdown_lines(diagnosis: Diagnosis) -> Iterator[str]:
    """A heading, the verdict, the findings as a list, the facts as a table that can be unfolded."""
    yield f"### mpctl doctor ({diagnosis.mpctl}): {_escaped(title_text(diagnosis))}"
    yield ""
    yield _escaped(verdict_text(diagnosis))
    yield ""
    for finding in shown_findings(diagnosis.findings):
        yield _finding_line(finding)
    yield from ("", "<details><summary>hosts</summary>", "", "| what | value |", "|---|---|")
    for topic, text in fact_rows(diagnosis):
        yield f"| {topic} | {'<br>'.join(map(_escaped, text.splitlines()))} |"
    for host in diagnosis.hosts:
        for name, value in host.software.environment.items() if host.software else ():
            yield f"| {_escaped(host.host)}: `{_escaped(name)}` | {_escaped(value)} |"
    yield from ("", "</details>")


def _finding_line(finding: Finding) -> str:
    hosts = f" on {names_text(finding.hosts)}" if finding.hosts else ""
    words = f"{finding.where}{hosts}: {finding.message} [{finding.rule}]"
    hint = f" → {_escaped(finding.hint)}" if finding.hint else ""
    return f"- **{finding.status}** {_escaped(words)}{hint}"


def _escaped(text: str) -> str:
    """Text in which Markdown and HTML find nothing to obey."""
    for mark in "\\`*_|[]<":
        text = text.replace(mark, f"\\{mark}" if mark != "<" else "&lt;")
    return " ".join(text.split())
