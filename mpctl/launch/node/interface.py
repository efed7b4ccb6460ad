"""Which network interface of this host leads to another.

gloo and NCCL take the first interface that they find, which on hosts with several networks (or a
bridge of containers) may not reach the other hosts. The interface that has the address from which
this host reaches the first node is the one that works.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address

import psutil

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def socket_interfaces(address: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that make gloo and NCCL use the interface towards `address`; a variable that
    the user has set is left alone, and so are all where the interface is not known."""
    name = interface_towards(address)
    if name is None:
        return {}
    return {variable: name for variable in VARIABLES if not environment.get(variable)}


def interface_towards(address: str) -> str | None:
    """The name of the interface from which this host reaches an address; None when it cannot."""
    source = source_address(address)
    return None if source is None else interface_of(source)


def source_address(address: str) -> str | None:
    """The address that this host has on the way to another; None when there is no way."""
    try:
        (family, kind, _, _, target), *_ = socket.getaddrinfo(address, 1, type=socket.SOCK_DGRAM)
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # a datagram socket: nothing is sent
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_of(source: str) -> str | None:
    """The name of the interface that has an address; None when none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == source for entry in addresses):
            return name
    return None


def addresses_towards(names: Sequence[str]) -> list[str]:
    """The addresses that this host has on the way to these; none where one cannot be resolved."""
    addresses = [source_address(name) for name in names]
    known = dict.fromkeys(address for address in addresses if address is not None)
    return list(known) if None not in addresses else []


def every_address() -> set[str]:
    """All addresses of this host, the loopback's among them."""
    return {e.address.partition("%")[0] for found in psutil.net_if_addrs().values() for e in found}


def own_addresses() -> list[str]:
    """The addresses of this host that others may reach: neither of the loopback nor link-local."""
    entries = [entry for addresses in psutil.net_if_addrs().values() for entry in addresses]
    texts = [e.address for e in entries if e.family in (socket.AF_INET, socket.AF_INET6)]
    return [text for text in texts if "%" not in text and _is_reachable(ip_address(text))]


def _is_reachable(address: IPv4Address | IPv6Address) -> bool:
    return not (address.is_loopback or address.is_link_local)
