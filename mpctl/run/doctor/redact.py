"""A diagnosis without names, for a public bug report.

Host names become host-1, host-2, ..., IP addresses address-1, ..., the user's name USER and the
home directory ~. Equal names get equal replacements, so that messages about them stay readable.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator

from mpctl.run.doctor.documents import Diagnosis, HostReport

NOT_SECRET = {"root", "user", "users", "localhost"}


def redact(diagnosis: Diagnosis) -> Diagnosis:
    """The same diagnosis with every name replaced, in messages and paths too."""
    words = replacements(diagnosis.hosts)
    if not words:
        return diagnosis
    longest_first = sorted(words, key=len, reverse=True)
    pattern = re.compile(rf"(?<![\w.-])({'|'.join(map(re.escape, longest_first))})(?![\w-])")
    text = diagnosis.model_dump_json(by_alias=True)
    return Diagnosis.model_validate_json(pattern.sub(lambda match: words[match[1]], text))


def replacements(hosts: Iterable[HostReport]) -> dict[str, str]:
    """The replacement of each name."""
    words: dict[str, str] = {}
    for number, host in enumerate(hosts, start=1):
        for name in _names(host):
            words.setdefault(name, f"host-{number}")
    addresses = dict.fromkeys(a for host in hosts for a in _addresses(host) if a not in words)
    words |= {address: f"address-{number}" for number, address in enumerate(addresses, start=1)}
    for host in hosts:
        if host.software is not None:
            words.setdefault(host.software.home, "~")
            if host.software.user not in NOT_SECRET:
                words.setdefault(host.software.user, "USER")
    return words


def _names(host: HostReport) -> Iterator[str]:
    names = [host.host] + ([host.network.host] if host.network else [])
    for name in names:
        yield name
        if not _is_address(name):
            yield name.split(".")[0]


def _addresses(host: HostReport) -> Iterator[str]:
    """The addresses of a host that are not the loopback's, with and without an interface."""
    if host.network is None:
        return
    listed = [a for each in host.network.interfaces for a in each.addresses]
    for address in [*listed, *host.network.host_addresses]:
        plain = address.partition("%")[0]
        if _is_address(plain) and not ipaddress.ip_address(plain).is_loopback:
            yield from dict.fromkeys((address, plain))


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
