"""A host checked between two attempts: its run directory, its GPUs, its connections to others."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mpctl.run.hosts import health
from mpctl.run.hosts.health import HealthReport, HealthRequest, check_health, folder_problem, gpu_problem, unreachable
from mpctl.run.hosts.modules import run_module
from mpctl.run.hosts.network import any_free_port
from mpctl.run.hosts.peers import Peer


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key-1"
    path.write_text("secret\n")
    return path


def digest(key: Path) -> str:
    return hashlib.sha256(key.read_bytes()).hexdigest()


def test_this_host_as_a_process(key: Path) -> None:
    request = HealthRequest(key=str(key), digest=digest(key), seconds=20, needs_gpus=False)
    answer = run_module("mpctl.run.hosts.health", request.model_dump_json(), 60)
    assert answer["code"] == 0, answer["errors"]
    report = HealthReport.model_validate_json(answer["output"])
    assert (report.folder, report.gpus, report.unreachable) == ("", "", {})
    assert report.facts is not None and report.facts.machine.cores > 0
    assert abs(report.unix_time - time.time()) < 60
    assert [path.name for path in key.parent.iterdir()] == ["key-1"]


def test_a_run_directory_that_is_absent_or_another_is_a_problem(key: Path) -> None:
    said = digest(key)
    assert folder_problem(key, said) == ""
    key.write_text("of another launch\n")
    assert folder_problem(key, said).startswith("sees another directory than the launcher")
    key.unlink()
    assert folder_problem(key, said).startswith("does not see the run directory")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
@pytest.mark.parametrize(
    ("options", "words"), [("size=64k", "No space left on device"), ("size=1m,ro", "Read-only file system")]
)
def test_a_run_directory_that_cannot_be_written_is_a_problem(tmp_path: Path, options: str, words: str) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "t", disk], check=False)
    if mount.returncode:
        pytest.skip("cannot mount a file system here")
    try:
        key = disk / "key-1"
        key.write_text("secret\n")
        again = ["mount", "-o", f"remount,{options}", disk]
        subprocess.run(again, check=True)
        said = folder_problem(key, digest(key))
        assert said.startswith("cannot write into the run directory") and words in said
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_a_probe_that_hangs_is_a_problem_and_is_not_waited_for(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "folder_problem", lambda *_: time.sleep(30) or "")
    request = HealthRequest(key=str(key), digest="", seconds=0.3, needs_gpus=False)
    began = time.monotonic()
    report = check_health(request)
    assert report.folder == "no answer within 0.3 s" and time.monotonic() - began < 10


GPU, FREE = "echo '", ", NVIDIA H100, 81559, 4, 550.54, Disabled, "


@pytest.mark.parametrize(
    ("script", "problem", "skipped"),
    [
        (f"{GPU}0, a{FREE}0'; {GPU}1, b{FREE}[N/A]'", "", False),
        (f"{GPU}0, a{FREE}0'; {GPU}1, b{FREE}3'", "uncorrected ECC errors: 3 on GPU 1", False),
        ("echo 'GPU 0000:3B:00.0 is lost' >&2; exit 15", "nvidia-smi fails: GPU 0000:3B", False),
        (None, "", True),
    ],
)
def test_what_nvidia_smi_says_of_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, problem: str, skipped: bool
) -> None:
    if script is not None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if script else str(tmp_path))
    found, why_not = gpu_problem()
    assert found.startswith(problem) and bool(found) == bool(problem)
    assert bool(why_not) == skipped


# ---------------------------------------------------------------- connections


def requests(hosts: int, *, seconds: float = 5.0, token: str = "t") -> list[HealthRequest]:
    peers = {host: Peer(address="127.0.0.1", port=any_free_port()) for host in range(hosts)}
    return [
        HealthRequest(key="", digest="", seconds=seconds, needs_gpus=False, me=me, peers=peers, token=token)
        for me in range(hosts)
    ]


def all_at_once(asked: list[HealthRequest]) -> list[dict[int, str] | None]:
    """What each host could not reach, all of them threads of this process."""
    found: list[dict[int, str] | None] = [None] * len(asked)

    def work(place: int) -> Callable[[], None]:
        def run() -> None:
            found[place] = unreachable(asked[place])

        return run

    threads = [threading.Thread(target=work(place)) for place in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_all_hosts_reach_each_other() -> None:
    assert all_at_once(requests(4)) == [{}, {}, {}, {}]


def test_a_host_that_is_not_there_is_unreachable() -> None:
    first, second, third = requests(3, seconds=0.5)
    found = all_at_once([first, third])
    assert found[1] == {} and found[0] is not None
    assert list(found[0]) == [1] and "Connection refused" in found[0][1]
    assert all_at_once([second]) == [
        {2: found[0][1].replace(f"port {second.peers[1].port}", f"port {second.peers[2].port}")}
    ]


def test_a_host_of_another_launch_is_not_taken_for_one_of_this() -> None:
    first, second = requests(2, seconds=1.0)
    other = second.model_copy(update={"token": "other"})
    (found, _) = all_at_once([first, other])
    assert found == {1: f"127.0.0.1 port {first.peers[1].port}: another program answers there"}


def test_strangers_do_not_end_the_check() -> None:
    first, second = requests(2, seconds=5.0)
    found: list[dict[int, str]] = []
    served = threading.Thread(target=lambda: found.append(unreachable(second)))
    served.start()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(("127.0.0.1", first.peers[1].port), 1) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 4)
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    assert unreachable(first) == {}
    served.join(10)
    assert found == [{}]
