"""What is wrong with the network of one host: names, interfaces, ports, RDMA devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from mpctl.doctor.diagnosis import Finding
from mpctl.doctor.documents import Interface, Limits, NetworkFacts
from mpctl.units import plural

Status = Literal["error", "warning"]
FEW_PORTS, LEAST_PORTS = 1000, 64
RDMA_BYTES = 1 << 30


def network_findings(network: NetworkFacts, limits: Limits | None) -> Iterator[Finding]:
    """Everything that is wrong with the network of a host, as far as the host sees it."""
    if network.loopback_error:
        yield _finding("error", "loopback-down", network.loopback_error, "ip link set lo up")
    yield from _ports(network)
    yield from _settings(network)
    yield from _rdma(network, limits)


def used_interface(network: NetworkFacts) -> Interface | None:
    """The interface that gloo uses: that of GLOO_SOCKET_IFNAME, or else the one that leads to the
    first host, which a launch sets for its ranks."""
    wanted = (network.gloo_setting or "").split(",")[0] or network.towards
    return next((each for each in network.interfaces if each.is_up and each.name == wanted), None)


def chosen_by(setting: str, name: str) -> bool:
    """Whether NCCL_SOCKET_IFNAME chooses an interface: prefixes by commas, `=eth0` for an exact
    name, `^docker` for all others (NCCL's documentation, environment variables)."""
    is_excluding, words = setting.startswith("^"), setting.lstrip("^")
    is_exact, names = words.startswith("="), words.lstrip("=").split(",")
    matches = any(name == word if is_exact else name.startswith(word) for word in names if word)
    return matches != is_excluding


def _ports(network: NetworkFacts) -> Iterator[Finding]:
    size = network.last_port - network.first_port + 1
    free = size - network.used_ports
    if free >= FEW_PORTS:
        return
    message = (
        f"{plural(max(0, free), 'port')} of {network.first_port}-{network.last_port} free; every "
        "connection between ranks takes one"
    )
    hint = "sysctl net.ipv4.ip_local_port_range='32768 60999', or end what holds them (ss -t)"
    yield _finding("error" if free < LEAST_PORTS else "warning", "few-ports", message, hint)


def _settings(network: NetworkFacts) -> Iterator[Finding]:
    """GLOO_SOCKET_IFNAME takes exact names, NCCL_SOCKET_IFNAME patterns."""
    up = [each.name for each in network.interfaces if each.is_up]
    gloo = [name for name in (network.gloo_setting or "").split(",") if name]
    if missing := [name for name in gloo if name not in up]:
        message = f"GLOO_SOCKET_IFNAME names {', '.join(missing)}, which is not up here"
        yield _finding("error", "interface-missing", message, f"interfaces: {', '.join(up)}")
    nccl = network.nccl_setting
    if nccl and not any(chosen_by(nccl, name) for name in up):
        message = f"NCCL_SOCKET_IFNAME={nccl} chooses none of the interfaces that are up"
        yield _finding("error", "interface-missing", message, f"interfaces: {', '.join(up)}")


def _rdma(network: NetworkFacts, limits: Limits | None) -> Iterator[Finding]:
    active = [port for port in network.infiniband if port.state == "ACTIVE"]
    down = [port for port in network.infiniband if port.state != "ACTIVE"]
    if active and down:
        names = ", ".join(f"{port.device}:{port.port} {port.state}" for port in down)
        message = f"RDMA ports not active: {names}"
        yield _finding("warning", "rdma-port-down", message, "ibstat there; NCCL uses the others")
    locked = None if limits is None else limits.locked_memory
    if active and locked is not None and locked < RDMA_BYTES:
        message = f"{locked >> 20:,} MiB of memory may be locked, which RDMA needs for its buffers"
        yield _finding("warning", "locked-memory", message, "ulimit -l unlimited (limits.conf)")


def _finding(status: Status, rule: str, message: str, hint: str) -> Finding:
    return Finding(status=status, rule=rule, where="network", hosts=[], message=message, hint=hint)
