"""One host measured for real, and probes that fail, hang or crash."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

import mpctl
from mpctl.run.doctor.documents import HostReport, Interface, Limits, ProbeRequest, TorchFacts
from mpctl.run.doctor.host_findings import chosen_by, used_interface
from mpctl.run.doctor.probe import (
    default_interface,
    infiniband_ports,
    parse_links,
    port_range,
    probe_gpus,
    probe_torch,
    relevant_variables,
    resolve,
)
from mpctl.run.hosts.probes import NoAnswer, RunningProbe, parse_gpus, run_here
from tests.run.doctor.synthetic import SECTIONS, answer


@pytest.mark.slow
def test_this_host(tmp_path: Path) -> None:
    """The whole process, torch and two processes over the loopback included."""
    request = ProbeRequest(run_dir=str(tmp_path / "run"))
    report = run_here("mpctl.run.doctor.probe", request.model_dump_json(), 60).read(HostReport)
    assert report.failures == []
    assert report.software and report.software.mpctl == mpctl.__version__
    assert report.software.executable == sys.executable
    assert report.torch and report.torch.version == torch.__version__
    assert report.torch.has_gloo and report.torch.gloo_error is None
    assert report.processor and report.processor.logical == psutil.cpu_count()
    assert report.memory and 0 < report.memory.free <= report.memory.total
    assert report.loopback and report.loopback.rate and report.loopback.rate > 1e6
    assert report.folder and report.folder.probed == str(tmp_path)
    assert abs(report.unix_time - time.time()) < 60
    assert set(report.seconds) == {
        "processor",
        "software",
        "memory",
        "limits",
        "gpus",
        "network",
        "folder",
        "torch",
        "loopback",
    }


def test_a_probe_that_hangs_times_out() -> None:
    probe = RunningProbe("slow", lambda: time.sleep(30) or Limits(), 0.1).start()  # type: ignore
    began = time.monotonic()
    probe.wait()
    assert time.monotonic() - began < 20
    assert probe.error == "no answer within 0.1 s"


def test_a_probe_that_fails_reports_why() -> None:
    def fail() -> Limits:
        raise PermissionError(13, "Permission denied", "/proc")

    probe = RunningProbe("broken", fail, 5).start()
    probe.wait()
    assert probe.result is None
    assert probe.error is not None and "Permission denied" in probe.error


@pytest.mark.parametrize(
    ("body", "seconds", "words"),
    [
        ("raise ImportError('libcudart.so.12: cannot open shared object file')", 60.0, "libcudart"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 60.0, "ended by signal 11"),
        ("import time; time.sleep(30)", 1.5, "no answer within 1.5 s"),
    ],
    ids=["import fails", "crashes", "hangs"],
)
def test_a_torch_that_cannot_be_used_is_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, seconds: float, words: str
) -> None:
    (tmp_path / "torch.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=words):
        probe_torch(seconds)


def test_answers_that_are_none() -> None:
    for given, words in (
        (answer("", code=None, errors="no answer within 3 s"), "no answer within 3 s"),
        (answer("", code=1, errors="Traceback\nNo module named mpctl\n"), "No module named mpctl"),
        (answer("", code=-9), "ended by signal 9"),
        (answer('{"host": 3}'), "another form"),
    ):
        with pytest.raises(NoAnswer, match=words):
            given.read(HostReport)


def test_keys_of_a_newer_version_are_ignored() -> None:
    facts = answer('noise\n{"host": "n1", "unix_time": 1.0, "invented": []}')
    assert facts.read(HostReport).host == "n1"


def test_the_torch_process_and_its_model_agree() -> None:
    """runtime/ cannot import the model, so that both list the keys."""
    from mpctl.train.runtime.probes.torch_report import TorchReport

    assert set(TorchReport.__annotations__) == set(TorchFacts.model_fields)


def test_only_variables_that_change_runs_are_reported() -> None:
    environment = {"NCCL_DEBUG": "INFO", "AWS_SECRET_ACCESS_KEY": "x", "OMP_NUM_THREADS": "4"}
    assert list(relevant_variables(environment)) == ["NCCL_DEBUG", "OMP_NUM_THREADS"]


LISTING = """\
0, GPU-aaaa, NVIDIA H100 80GB HBM3, 81559, 4, 570.86.15, Disabled, 0
1, GPU-bbbb, NVIDIA H100 80GB HBM3, 81559, 61023, 570.86.15, Enabled, 2
2, GPU-cccc, NVIDIA T400, 2048, 1, 570.86.15, [N/A], [N/A]
"""
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-51,104-155\t0\t\tN/A
GPU1\tNV18\t X \tSYS\tNODE\t0-51,104-155\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tSYS\t52-103\t1\t\tN/A
NIC0\tPIX\tNODE\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""


def test_a_listing_of_gpus() -> None:
    gpus = parse_gpus(LISTING, "GPU-bbbb\nGPU-bbbb\n")
    assert [gpu.index for gpu in gpus] == [0, 1, 2]
    assert gpus[0].memory_total == 81559 << 20
    assert [gpu.processes for gpu in gpus] == [0, 2, 0]
    assert [gpu.uncorrected_errors for gpu in gpus] == [0, 2, None]
    assert [gpu.mig for gpu in gpus] == [False, True, False]
    assert gpus[2].name == "NVIDIA T400"
    assert parse_gpus("No devices were found\n", "") == []


def test_the_matrix_of_links() -> None:
    links = [["X", "NV18", "SYS"], ["NV18", "X", "SYS"], ["SYS", "SYS", "X"]]
    assert parse_links(TOPOLOGY, 3) == links


@pytest.mark.parametrize("text", ["", "No devices were found", TOPOLOGY[:90]])
def test_a_matrix_that_is_incomplete_is_none(text: str) -> None:
    assert parse_links(text, 3) == []


def test_a_tool_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'Failed to initialize NVML' >&2\nexit 18\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    gpus = probe_gpus()
    assert (gpus.tool, gpus.error, gpus.devices) == ("nvidia-smi", "Failed to initialize NVML", [])


ROUTES = """\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask
docker0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF
ens5\t00000000\t010010AC\t0003\t0\t0\t100\t00000000
"""


def test_the_interface_of_the_default_route() -> None:
    assert default_interface(ROUTES) == "ens5"
    assert default_interface("Iface\tDestination\n") is None


@pytest.mark.parametrize(("text", "ports"), [("1024\t65535\n", (1024, 65535)), ("", (32768, 60999))])
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
