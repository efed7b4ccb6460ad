"""The hosts of a launch over ssh: a hostfile, the filters on it, and which of them a plan uses.

A hostfile has a line for each host, as DeepSpeed and Open MPI write them. Text from `#` to the end
of a line is a comment. The order of the lines is that of the plan's nodes, and a plan of N nodes
takes the first N hosts that remain after the filters.

    n1 slots=8                 a name that the ssh client understands, an alias of ~/.ssh/config too
    ann@10.0.0.2 slots=8       another user
    fe80::1%eth0 slots=8       an IPv6 address, with or without [brackets]
    n2 slots=8 port=2222       another port than the ssh client would take

Include and exclude are as DeepSpeed writes them: `n1:0,2@n2` names slots 0 and 2 of n1 and all of
n2. A slot is the number of a device of its host; a rank that runs on the GPUs 0 and 2 gets
CUDA_VISIBLE_DEVICES=0,2.

A host becomes an argument of ssh, and ssh passes it on to a shell where a ProxyCommand is set.
Names that could be options or shell syntax are therefore refused.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from mpctl.core.errors import Issue
from mpctl.core.units import plural

MOST_SLOTS = 4096
LAST_PORT = 65535
MOST_BYTES = 16 * 2**20
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]*")
ZONE = re.compile(r"[A-Za-z0-9_.-]+")
EXAMPLE = "write a line such as `n1 slots=8`"


@dataclass(frozen=True, slots=True)
class SshHost:
    """A host of a launch.

    name: as an argument of ssh, without user and brackets; slots: the numbers of its devices that
    may be used, one for each rank, None where the hostfile has none; where: `FILE:LINE`.
    """

    name: str
    slots: tuple[int, ...] | None = None
    user: str | None = None
    port: int | None = None
    where: str = ""

    @property
    def destination(self) -> str:
        """The host as an argument of ssh: `user@name`."""
        return self.name if self.user is None else f"{self.user}@{self.name}"


@dataclass(frozen=True)
class HostList:
    """Hosts of a hostfile, all or after a filter or for a plan, with its issues and warnings."""

    hosts: tuple[SshHost, ...]
    issues: tuple[Issue, ...] = ()
    warnings: tuple[str, ...] = ()


def parse_host(line: str, where: str) -> SshHost | list[Issue]:
    """The host of a line that is not empty, or everything that is wrong with the line.

    where: `FILE:LINE`, which issues begin with.
    """
    address, *words = line.split()
    user, _, name = address.rpartition("@")
    name = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    issues = [*_address_issues(address, user, name, where), *_word_issues(words, where)]
    if issues:
        return issues
    settings = dict(word.split("=") for word in words)
    slots = tuple(range(int(settings["slots"]))) if "slots" in settings else None
    port = int(settings["port"]) if "port" in settings else None
    return SshHost(name, slots, user or None, port, where)


def is_host_name(name: str) -> bool:
    """Whether it is a host name or an IP address, and neither an option nor shell syntax."""
    return NAME.fullmatch(name) is not None or _is_ipv6(name)


def _is_ipv6(name: str) -> bool:
    address, has_zone, zone = name.partition("%")
    if has_zone and not ZONE.fullmatch(zone):
        return False
    try:
        return ipaddress.ip_address(address).version == 6
    except ValueError:
        return False


def _address_issues(address: str, user: str, name: str, where: str) -> Iterator[Issue]:
    host, colon, number = name.rpartition(":")
    if colon and number.isdecimal() and NAME.fullmatch(host):
        hint = f"write `{host} slots={number}`, or `{host} port={number}` for a port"
        yield Issue("hostfile-host", where, f"{address!r} is not a host name", hint)
    elif not is_host_name(name):
        message = f"{name!r} is neither a host name nor an IP address"
        yield Issue("hostfile-host", where, message, EXAMPLE)
    if (user and not USER.fullmatch(user)) or address.startswith("@"):
        message = f"{user!r} in {address!r} is not a user name"
        yield Issue("hostfile-host", where, message, "write `user@host slots=8`")


def _word_issues(words: list[str], where: str) -> Iterator[Issue]:
    bounds = {"slots": MOST_SLOTS, "port": LAST_PORT}
    seen: set[str] = set()
    for word in words:
        key, _, value = word.partition("=")
        if key not in bounds:
            message = f"{word!r} is not known"
            hint = "a line is `HOST [slots=N] [port=N]`; a comment begins with #"
            yield Issue("hostfile-word", where, message, hint)
            continue
        if key in seen:
            message = f"{key} is given more than once"
            yield Issue("hostfile-word", where, message, "leave all but one out")
        seen.add(key)
        if not (value.isascii() and value.isdecimal() and 1 <= int(value) <= bounds[key]):
            message = f"{key}={value!s} is not a number from 1 to {bounds[key]}"
            hint = f"write {key}=N" + (", the ranks of the host" if key == "slots" else "")
            yield Issue(f"hostfile-{key}", where, message, hint)


def read_hostfile(path: Path) -> HostList:
    """Read and parse a hostfile; a file that cannot be read is an issue like any other."""
    hint = EXAMPLE
    try:
        with path.open("rb") as stream:
            data = stream.read(MOST_BYTES + 1)
        if len(data) <= MOST_BYTES:
            return parse_hostfile(data.decode("utf-8-sig"), str(path))
        message = f"has more than {MOST_BYTES // 2**20} MiB, which no list of hosts has"
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
        hint = f"name a file with --hostfile; {EXAMPLE} for each host"
    except UnicodeDecodeError:
        message = "is not a text file in UTF-8"
    return HostList((), (Issue("hostfile", str(path), message, hint),))


def parse_hostfile(text: str, path: str) -> HostList:
    """Parse the text of a hostfile. path: the name of the file, for the issues' `FILE:LINE`."""
    hosts: list[SshHost] = []
    issues: list[Issue] = []
    first_lines: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        host = parse_host(line, f"{path}:{number}")
        if isinstance(host, list):
            issues += host
            continue
        first = first_lines.setdefault(host.name.lower(), host.where)
        if first == host.where:
            hosts.append(host)
            continue
        message = f"{host.name} is already in line {first.rpartition(':')[2]}"
        hint = "name each host once, with all its slots in one line"
        issues.append(Issue("hostfile-doubled", host.where, message, hint))
    if not hosts and not issues:
        issues.append(Issue("hostfile", path, "names no host", EXAMPLE))
    return HostList(tuple(hosts), tuple(issues))


FORM = "write hosts as n1@n2, or with slots as n1:0,2@n2"


def select_hosts(hosts: Sequence[SshHost], include: str | None = None, exclude: str | None = None) -> HostList:
    """The hosts that include names, or those that exclude does not name."""
    if include is not None and exclude is not None:
        message = "include and exclude cannot be given together"
        issue = Issue("hosts-filter", "launch.ssh.include", message, "use one of them")
        return HostList(tuple(hosts), (issue,))
    if include is not None:
        return _filtered(hosts, include, is_include=True)
    if exclude is not None:
        return _filtered(hosts, exclude, is_include=False)
    return HostList(tuple(hosts))


def first_slots(hosts: Sequence[SshHost], ranks_per_node: int) -> str | None:
    """Return an include of the first slots of these hosts, one for each of their ranks; None if no host has more slots
    than that.

    By hand, one rank on each of n1 and n2 with slots 0 to 3: `n1:0@n2:0`.
    """
    if all(host.slots is None or len(host.slots) <= ranks_per_node for host in hosts):
        return None
    parts = []
    for host in hosts:
        name = f"[{host.name}]" if ":" in host.name else host.name
        slots = ",".join(map(str, (host.slots or ())[:ranks_per_node]))
        parts.append(f"{name}:{slots}" if slots else name)
    return "@".join(parts)


def hosts_of_plan(
    hosts: Sequence[SshHost], nodes: int, ranks_per_node: int, source: str, *, spares: int = 0
) -> HostList:
    """The first `nodes` hosts and at most `spares` after them, each with `ranks_per_node` slots.
    source: the hostfile's name."""
    if len(hosts) < nodes:
        message = f"{plural(len(hosts), 'host')}, but the plan has {plural(nodes, 'node')}"
        way_out = f"add hosts, or plan for fewer: --nodes {len(hosts)}" if hosts else "add hosts"
        return HostList(tuple(hosts), (Issue("too-few-hosts", source, message, way_out),))
    chosen = hosts[: nodes + spares]
    issues = [issue for host in chosen for issue in _slot_issues(host, ranks_per_node)]
    unused = [host.name for host in hosts[len(chosen) :]]
    warnings = []
    if len(chosen) < nodes + spares:
        there = plural(len(chosen) - nodes, "spare host")
        warnings.append(f"launch.spare_nodes is {spares}, but {source} has {there}")
    if unused:
        names = ", ".join(unused[:3]) + (f" and {len(unused) - 3} more" if len(unused) > 3 else "")
        warnings.append(
            f"the plan has {plural(nodes, 'node')} and takes the first of {len(hosts)} hosts in "
            f"{source}; not used: {names}"
        )
    return HostList(tuple(chosen), tuple(issues), tuple(warnings))


def _slot_issues(host: SshHost, ranks_per_node: int) -> Iterator[Issue]:
    slots = host.slots
    if slots is None or len(slots) == ranks_per_node:
        return
    message = (
        f"{host.name} has {plural(len(slots), 'slot')}, but the plan puts {plural(ranks_per_node, 'rank')} on each node"
    )
    hint = f"plan for --gpus-per-node {len(slots)}, or write slots={ranks_per_node}"
    if len(slots) > ranks_per_node:
        chosen = ",".join(map(str, slots[:ranks_per_node]))
        hint += f", or choose slots with --include {host.name}:{chosen}@..."
    yield Issue("slots-match-plan", host.where, message, hint)


def _filtered(hosts: Sequence[SshHost], text: str, *, is_include: bool) -> HostList:
    """The hosts that an include or an exclude leaves; all hosts where it has issues."""
    setting = f"launch.ssh.{'include' if is_include else 'exclude'}"
    named, issues = _parse_filter(text, setting)
    issues += _unknown(named, {host.name: host for host in hosts}, setting, is_include=is_include)
    if issues:
        return HostList(tuple(hosts), tuple(issues))
    chosen = []
    for host in hosts:
        slots = named.get(host.name)  # of the filter: None where it does not name the host
        rest = tuple(slot for slot in host.slots or () if slot not in (slots or ()))
        if is_include and slots is not None:
            chosen.append(replace(host, slots=slots) if slots else host)
        elif not is_include and slots is None:
            chosen.append(host)
        elif not is_include and slots and rest:
            chosen.append(replace(host, slots=rest))
    if not chosen:
        message = f"{text!r} leaves no host"
        issues.append(Issue("hosts-filter", setting, message, "name fewer hosts"))
    return HostList(tuple(chosen), tuple(issues))


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
    named: dict[str, tuple[int, ...]], hosts: dict[str, SshHost], setting: str, *, is_include: bool
) -> Iterator[Issue]:
    """Yield the hosts and slots that the hostfile does not have. If the hostfile leaves a host's number of slots open,
    include may choose any of its slots."""
    for name, slots in named.items():
        host = hosts.get(name)
        if host is None:
            near = get_close_matches(name, hosts, n=3) or list(hosts)[:3]
            hint = f"the hostfile has {', '.join(near)}" + (", ..." * (len(hosts) > len(near)))
            message = f"{name!r} is not in the hostfile"
        elif host.slots is None and slots and not is_include:
            message = f"slots of {name} cannot be excluded, since {host.where} does not say slots="
            hint = f"write `{name} slots=N` there"
        elif absent := [slot for slot in slots if slot not in (host.slots or slots)]:
            numbers, last = ", ".join(map(str, absent)), len(host.slots or ()) - 1
            message = f"{name} has no slot {numbers}, only 0 to {last} ({host.where})"
            hint = "name slots that it has"
        else:
            continue
        yield Issue("hosts-filter", setting, message, hint)
