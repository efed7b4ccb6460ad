"""Addresses of this host: the rendezvous of its ranks, and the interface towards other hosts.

The ranks of one host connect at a free TCP port of the loopback address 127.0.0.1. If the loopback
interface is down, or no port is free for their connections, the ranks would wait for minutes.
Opening as many connections as they need shows that at once.

gloo and NCCL take the first interface that they find, which on hosts with several networks (or a
bridge of containers) may not reach the other hosts. The interface that has the address from which
this host reaches the first node is the one that works.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from ipaddress import ip_address

import psutil

from mpctl.core.errors import RunFailed

HOST = "127.0.0.1"
MOST_CONNECTIONS = 256
HINT = "check that the loopback interface is up and net.ipv4.ip_local_port_range leaves ports free"
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def free_port(ranks: int = 1) -> int:
    """A port that nothing listens on now; another process may still take it before the ranks do.

    Raises RunFailed with address and reason when so many ranks could not connect there.
    """
    with ExitStack() as opened:
        listener = opened.enter_context(socket.socket())
        try:
            listener.bind((HOST, 0))
            listener.listen(MOST_CONNECTIONS)
            listener.settimeout(5)
        except OSError as error:
            message = f"cannot listen at {HOST}, where ranks meet: {error.strerror}"
            raise RunFailed(f"{message}; {HINT}") from None
        port = int(listener.getsockname()[1])
        needed = min(2 * ranks + 2, MOST_CONNECTIONS)  # two for each rank, two for torchrun
        for number in range(needed):
            try:
                peer = opened.enter_context(socket.create_connection((HOST, port), timeout=5))
                # Accepted, since the queue of pending ones may be short: net.core.somaxconn
                opened.enter_context(listener.accept()[0])
                # Closed by a reset: the port it came from is free again at once.
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            except OSError as error:
                why = error.strerror or error
                opened_text = f"{number} of {needed} connections to {HOST}:{port}"
                message = f"only {opened_text}, where ranks meet, could be opened: {why}"
                raise RunFailed(f"{message}; {HINT}") from None
    return port


def socket_interfaces(address: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that make gloo and NCCL use the interface towards `address`; variables that the
    user has set are left out, and all if the interface is not known."""
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
    """Return this host's addresses on the way to these; empty if one cannot be resolved."""
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
    known = [ip_address(text) for text in texts if "%" not in text]
    return [str(ip) for ip in known if not (ip.is_loopback or ip.is_link_local)]


def any_free_port() -> int:
    """A TCP port at which nothing listens on this host now, at any of its addresses."""
    with socket.create_server(("", 0)) as listener:
        return int(listener.getsockname()[1])
