"""Which hosts of a hostfile a launch uses: include and exclude as DeepSpeed writes them.

    n1@n2          two whole hosts
    n1:0,2@n2      slots 0 and 2 of n1, and all of n2

Hosts are separated by `@`, slots by `,`. The order stays that of the hostfile, whatever order
include names them in. A slot is the number of a device of its host; a rank that runs on the GPUs 0
and 2 gets CUDA_VISIBLE_DEVICES=0,2. Include and exclude cannot be given together.

A plan of N nodes takes the first N hosts that remain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from mpctl.clusters.ssh.host_line import SshHost
from mpctl.errors import Issue
from mpctl.units import plural

FORM = "write hosts as n1@n2, or with slots as n1:0,2@n2"


@dataclass(frozen=True)
class Selection:
    """The hosts that a filter or a plan leaves, what is wrong, and what a user should know."""

    hosts: tuple[SshHost, ...]
    issues: tuple[Issue, ...] = ()
    warnings: tuple[str, ...] = ()


def select_hosts(
    hosts: Sequence[SshHost], include: str | None = None, exclude: str | None = None
) -> Selection:
    """The hosts that include names, or those that exclude does not name."""
    if include is not None and exclude is not None:
        message = "include and exclude cannot be given together"
        issue = Issue("hosts-filter", "launch.ssh.include", message, "use one of them")
        return Selection(tuple(hosts), (issue,))
    if include is not None:
        return _filtered(hosts, include, "launch.ssh.include")
    if exclude is not None:
        return _filtered(hosts, exclude, "launch.ssh.exclude")
    return Selection(tuple(hosts))


def first_slots(hosts: Sequence[SshHost], ranks_per_node: int) -> str | None:
    """An include that names the first slots of these hosts, one for each of their ranks; None where
    no host has more slots than that.

    By hand, one rank on each of n1 and n2 with slots 0 to 3: `n1:0@n2:0`.
    """
    if all(host.slots is None or len(host.slots) <= ranks_per_node for host in hosts):
        return None
    return "@".join(_with_slots(host, ranks_per_node) for host in hosts)


def _with_slots(host: SshHost, count: int) -> str:
    name = f"[{host.name}]" if ":" in host.name else host.name
    return f"{name}:{','.join(map(str, host.slots[:count]))}" if host.slots else name


def hosts_of_plan(
    hosts: Sequence[SshHost], nodes: int, ranks_per_node: int, source: str
) -> Selection:
    """The first `nodes` hosts, each with `ranks_per_node` slots. source: the hostfile's name."""
    if len(hosts) < nodes:
        message = f"{plural(len(hosts), 'host')}, but the plan has {plural(nodes, 'node')}"
        way_out = f"add hosts, or plan for fewer: --nodes {len(hosts)}" if hosts else "add hosts"
        return Selection(tuple(hosts), (Issue("too-few-hosts", source, message, way_out),))
    issues = [issue for host in hosts[:nodes] for issue in _slot_issues(host, ranks_per_node)]
    unused = [host.name for host in hosts[nodes:]]
    warnings = []
    if unused:
        names = ", ".join(unused[:3]) + (f" and {len(unused) - 3} more" if len(unused) > 3 else "")
        warnings.append(
            f"the plan has {plural(nodes, 'node')} and takes the first of {len(hosts)} hosts in "
            f"{source}; not used: {names}"
        )
    return Selection(tuple(hosts[:nodes]), tuple(issues), tuple(warnings))


def _slot_issues(host: SshHost, ranks_per_node: int) -> Iterator[Issue]:
    slots = host.slots
    if slots is None or len(slots) == ranks_per_node:
        return
    message = (
        f"{host.name} has {plural(len(slots), 'slot')}, but the plan puts "
        f"{plural(ranks_per_node, 'rank')} on each node"
    )
    hint = f"plan for --gpus-per-node {len(slots)}, or write slots={ranks_per_node}"
    if len(slots) > ranks_per_node:
        chosen = ",".join(map(str, slots[:ranks_per_node]))
        hint += f", or choose slots with --include {host.name}:{chosen}@..."
    yield Issue("slots-match-plan", host.where, message, hint)


def _filtered(hosts: Sequence[SshHost], text: str, setting: str) -> Selection:
    """The hosts with the filter of this setting applied; all hosts where it has issues."""
    named, issues = _parse_filter(text, setting)
    by_name = {host.name: host for host in hosts}
    issues += _unknown(named, by_name, setting)
    if issues:
        return Selection(tuple(hosts), tuple(issues))
    pick = _included if setting.endswith("include") else _excluded
    chosen = [part for host in hosts if (part := pick(host, named)) is not None]
    if not chosen:
        message = f"{text!r} leaves no host"
        issues.append(Issue("hosts-filter", setting, message, "name fewer hosts"))
    return Selection(tuple(chosen), tuple(issues))


def _included(host: SshHost, named: dict[str, tuple[int, ...]]) -> SshHost | None:
    if host.name not in named:
        return None
    return replace(host, slots=named[host.name]) if named[host.name] else host


def _excluded(host: SshHost, named: dict[str, tuple[int, ...]]) -> SshHost | None:
    if host.name not in named:
        return host
    rest = tuple(slot for slot in host.slots or () if slot not in named[host.name])
    return replace(host, slots=rest) if named[host.name] and rest else None


def _parse_filter(text: str, setting: str) -> tuple[dict[str, tuple[int, ...]], list[Issue]]:
    """The slots of each host that a filter names, () for all of a host, and what is wrong."""
    named: dict[str, tuple[int, ...]] = {}
    issues: list[Issue] = []
    for part in text.split("@"):
        name, numbers = _name_and_slots(part.strip())
        words = numbers.split(",") if numbers is not None else []
        is_valid = all(word.isascii() and word.isdecimal() for word in words)
        slots = tuple(int(word) for word in words) if is_valid else ()
        if not name or not is_valid:
            message = f"{part!r} does not name a host" if not name else f"{part!r} has no slots"
            issues.append(Issue("hosts-filter", setting, message, FORM))
        elif name in named or len(set(slots)) < len(slots):
            what = f"{name} is named twice" if name in named else f"{part!r} names a slot twice"
            issues.append(Issue("hosts-filter", setting, what, FORM))
        else:
            named[name] = slots
    return named, issues


def _name_and_slots(part: str) -> tuple[str, str | None]:
    """`n1:0,2` -> ("n1", "0,2"), `n1` -> ("n1", None), `[::1]:0` -> ("::1", "0"); an IPv6 address
    without brackets has no slots."""
    if part.startswith("["):
        name, _, rest = part[1:].partition("]")
        return name, rest[1:] if rest.startswith(":") else None
    if part.count(":") > 1:
        return part, None
    name, colon, numbers = part.partition(":")
    return name, numbers if colon else None


def _unknown(
    named: dict[str, tuple[int, ...]], hosts: dict[str, SshHost], setting: str
) -> list[Issue]:
    issues = []
    for name, slots in named.items():
        host = hosts.get(name)
        if host is None:
            near = get_close_matches(name, hosts, n=3) or list(hosts)[:3]
            hint = f"the hostfile has {', '.join(near)}" + (", ..." * (len(hosts) > len(near)))
            message = f"{name!r} is not in the hostfile"
            issues.append(Issue("hosts-filter", setting, message, hint))
        elif unknown := [slot for slot in slots if host.slots is None or slot not in host.slots]:
            issues += _unknown_slots(host, unknown, setting)
    return issues


def _unknown_slots(host: SshHost, unknown: list[int], setting: str) -> list[Issue]:
    """An issue for slots that the host does not have; include may choose any slot of a host whose
    number of slots the hostfile leaves open."""
    if host.slots is None:
        if setting.endswith("include"):
            return []
        message = f"slots of {host.name} cannot be excluded, since {host.where} does not say slots="
        return [Issue("hosts-filter", setting, message, f"write `{host.name} slots=N` there")]
    numbers = ", ".join(map(str, unknown))
    message = f"{host.name} has no slot {numbers}, only 0 to {len(host.slots) - 1} ({host.where})"
    return [Issue("hosts-filter", setting, message, "name slots that it has")]
