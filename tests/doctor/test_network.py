"""Files of the kernel and settings of NCCL and gloo, read."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpctl.doctor.documents import Interface
from mpctl.doctor.judge_network import chosen_by, used_interface
from mpctl.doctor.network import (
    default_interface,
    infiniband_ports,
    port_range,
    probe_network,
    resolve,
)
from tests.doctor.synthetic import SECTIONS

ROUTES = """\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask
docker0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF
ens5\t00000000\t010010AC\t0003\t0\t0\t100\t00000000
"""


def test_the_interface_of_the_default_route() -> None:
    assert default_interface(ROUTES) == "ens5"
    assert default_interface("Iface\tDestination\n") is None


@pytest.mark.parametrize(
    ("text", "ports"), [("1024\t65535\n", (1024, 65535)), ("", (32768, 60999))]
)
def test_the_range_of_ephemeral_ports(text: str, ports: tuple[int, int]) -> None:
    assert port_range(text) == ports


def test_rdma_ports(tmp_path: Path) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (port / "link_layer").write_text("InfiniBand\n")
    (tmp_path / "mlx5_1" / "ports" / "1").mkdir(parents=True)
    first, second = infiniband_ports(tmp_path)
    assert (first.device, first.state, first.rate) == ("mlx5_0", "ACTIVE", "400 Gb/sec (4X NDR)")
    assert (second.device, second.state) == ("mlx5_1", "unknown")


@pytest.mark.parametrize(
    ("setting", "chosen"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth0", ["eth0"]),
        ("=eth", []),
        ("eth1,ib", ["eth1", "ib0"]),
        ("^docker,lo", ["eth0", "eth1", "ib0"]),
        ("^=eth0", ["eth1", "ib0", "lo", "docker0"]),
    ],
)
def test_nccl_chooses_interfaces_by_pattern(setting: str, chosen: list[str]) -> None:
    names = ["eth0", "eth1", "ib0", "lo", "docker0"]
    assert [name for name in names if chosen_by(setting, name)] == chosen


def test_the_interface_that_gloo_uses() -> None:
    """That of its setting, or the one that leads to the first host; None where it is not up."""
    network = SECTIONS["network"]
    used = used_interface(network)
    assert used is not None and used.name == "eth0"
    used = used_interface(network.model_copy(update={"gloo_setting": "lo"}))
    assert used is not None and used.name == "lo"
    down = Interface(name="eth0", is_up=False, addresses=["10.0.0.1"], speed=None, mtu=1500)
    assert used_interface(network.model_copy(update={"interfaces": [down]})) is None


def test_a_name_that_does_not_resolve_has_a_reason() -> None:
    addresses, why = resolve("no-such-host.invalid")
    assert addresses == []
    assert why


def test_this_machine_has_a_loopback_interface() -> None:
    network = probe_network()
    assert any("127.0.0.1" in each.addresses and each.is_up for each in network.interfaces)
    assert network.loopback_error is None
    assert 0 <= network.used_ports < network.last_port
