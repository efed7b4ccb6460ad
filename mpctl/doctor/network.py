"""Probe of the network of this host: interfaces, its own name, ports, RDMA devices."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import psutil

from mpctl.doctor.documents import InfiniBandPort, Interface, NetworkFacts
from mpctl.errors import RunFailed
from mpctl.hosts.network import free_port, interface_towards

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
DEFAULT_RANGE = (32768, 60999)  # Linux's own
INFINIBAND = Path("/sys/class/infiniband")
MBIT = 1_000_000


def probe_network(towards: str | None = None) -> NetworkFacts:
    """Interfaces with their addresses, what the host's name resolves to, free ports. towards: the
    address of the first host."""
    host = socket.gethostname()
    addresses, host_error = resolve(host)
    first, last = port_range(_text(RANGE))
    return NetworkFacts(
        host=host,
        host_addresses=addresses,
        host_error=host_error,
        interfaces=_interfaces(),
        default_interface=default_interface(_text(Path("/proc/net/route"))),
        towards=None if towards is None else interface_towards(towards),
        infiniband=infiniband_ports(INFINIBAND),
        gloo_setting=os.environ.get("GLOO_SOCKET_IFNAME"),
        nccl_setting=os.environ.get("NCCL_SOCKET_IFNAME"),
        first_port=first,
        last_port=last,
        used_ports=_used_ports(first, last),
        loopback_error=_loopback_error(),
    )


def resolve(host: str) -> tuple[list[str], str | None]:
    """The addresses of a host name, IPv4 and IPv6, and the reason where there is none."""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return [], error.strerror or str(error)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries)), None


def port_range(text: str) -> tuple[int, int]:
    """First and last ephemeral port in the kernel's words, `32768	60999`."""
    words = text.split()
    if len(words) != 2 or not all(word.isdecimal() for word in words):
        return DEFAULT_RANGE
    return int(words[0]), int(words[1])


def default_interface(routes: str) -> str | None:
    """The interface of the default route in /proc/net/route: its destination is 00000000."""
    rows = (line.split() for line in routes.splitlines())
    return next((row[0] for row in rows if len(row) > 1 and row[1] == "00000000"), None)


def infiniband_ports(root: Path) -> list[InfiniBandPort]:
    """The ports of all RDMA devices; their files say `4: ACTIVE` and `400 Gb/sec (4X NDR)`."""
    ports = sorted(root.glob("*/ports/[0-9]*"))
    return [
        InfiniBandPort(
            device=port.parent.parent.name,
            port=int(port.name),
            state=_text(port / "state").rpartition(":")[2].strip() or "unknown",
            rate=_text(port / "rate").strip() or "unknown",
            layer=_text(port / "link_layer").strip() or "unknown",
        )
        for port in ports
    ]


def _interfaces() -> list[Interface]:
    status = psutil.net_if_stats()
    internet = (socket.AF_INET, socket.AF_INET6)
    return [
        Interface(
            name=name,
            is_up=name in status and status[name].isup,
            addresses=[entry.address for entry in entries if entry.family in internet],
            speed=(status[name].speed * MBIT or None) if name in status else None,
            mtu=status[name].mtu if name in status else 0,
        )
        for name, entries in sorted(psutil.net_if_addrs().items())
    ]


def _used_ports(first: int, last: int) -> int:
    """Local TCP ports of the range that a socket of this host uses, whoever owns it."""
    text = "".join(_text(Path(f"/proc/net/{name}")) for name in ("tcp", "tcp6"))
    words = (line.split() for line in text.splitlines())
    local = {row[1].rpartition(":")[2] for row in words if len(row) > 3 and ":" in row[1]}
    return sum(first <= int(port, 16) <= last for port in local)


def _loopback_error() -> str | None:
    try:
        free_port(2)
    except RunFailed as error:
        return str(error)
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""
