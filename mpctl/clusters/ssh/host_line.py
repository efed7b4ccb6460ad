"""One line of a hostfile: a host, how many ranks it takes, and the port of its sshd.

    n1 slots=8                 a name that the ssh client understands, an alias of ~/.ssh/config too
    ann@10.0.0.2 slots=8       another user
    fe80::1%eth0 slots=8       an IPv6 address, with or without [brackets]
    n2 slots=8 port=2222       another port than the ssh client would take

A host becomes an argument of ssh, and ssh passes it on to a shell where a ProxyCommand is set.
Names that could be options or shell syntax are therefore refused.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass

from mpctl.errors import Issue

MOST_SLOTS = 4096
LAST_PORT = 65535
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]*")
ZONE = re.compile(r"[A-Za-z0-9_.-]+")
EXAMPLE = "write a line such as `n1 slots=8`"


@dataclass(frozen=True, slots=True)
class SshHost:
    """A host of a launch.

    name: as ssh is given it, without user and brackets; slots: the numbers of its devices that may
    be used, one for each rank, None where the hostfile does not say; where: `FILE:LINE`.
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
