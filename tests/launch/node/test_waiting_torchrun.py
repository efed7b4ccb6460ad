"""A torchrun that is started before it is known what it will run."""

from __future__ import annotations

from pathlib import Path

from mpctl.launch.node.address import free_port
from mpctl.launch.node.waiting_torchrun import WaitingTorchrun


def test_it_runs_what_it_is_told_and_writes_to_the_log(tmp_path: Path) -> None:
    waiting = WaitingTorchrun(tmp_path)
    assert waiting.is_waiting and str(tmp_path) in waiting.process.args
    log = tmp_path / "torchrun.log"
    program = ["--no-python", "sh", "-c", "echo rank $RANK says $WORD"]
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    place = ["--nproc-per-node=1", "--rdzv-backend=mpctl", endpoint, "--rdzv-conf=rank=0"]
    assert waiting.order([*place, *program], {"WORD": "yes"}, log)
    assert waiting.process.wait(120) == 0 and not waiting.is_waiting
    assert "rank 0 says yes" in log.read_text()
    waiting.end()  # nothing is left to end


def test_one_that_is_not_needed_ends(tmp_path: Path) -> None:
    waiting = WaitingTorchrun(tmp_path)
    waiting.end()
    assert waiting.process.poll() is not None and not waiting.is_waiting


def test_one_that_has_died_takes_no_order(tmp_path: Path) -> None:
    waiting = WaitingTorchrun(tmp_path)
    waiting.process.kill()
    waiting.process.wait()
    assert not waiting.order([], {}, tmp_path / "log")
