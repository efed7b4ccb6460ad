"""Variables of ranks on GPUs: the user's settings stay, the recorder's files are in the run.

And a torchrun process that is started before its arguments are known.
"""

from __future__ import annotations

import importlib.util
import signal
from mmap import ACCESS_READ, mmap
from pathlib import Path

import psutil
import pytest

from mpctl.records.rundir.directory import RunDir
from mpctl.run.hosts.network import free_port
from mpctl.run.launch.node.torchrun import (
    ALLOCATOR,
    QUEUES,
    WaitingTorchrun,
    allocator_variables,
    rank_environment,
    recorder_variables,
)
from mpctl.spec.load import parse
from tests.run.launch.control.peers import until


def test_the_allocator_grows_segments_unless_the_user_has_settings() -> None:
    assert allocator_variables({}) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in ALLOCATOR:
        assert allocator_variables({name: ""}) == {}


def test_the_recorder_writes_into_the_run(tmp_path: Path) -> None:
    variables = recorder_variables(RunDir(tmp_path / "r"), {"TORCH_FR_BUFFER_SIZE": "7"})
    prefix = variables.pop("TORCH_FR_DUMP_TEMP_FILE")
    assert Path(f"{prefix}3") == (tmp_path / "r" / "logs" / "nccl_trace_rank_3").resolve()
    assert variables == {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_ranks_on_gpus_get_settings_of_the_allocator(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    job = parse({"launch": {"device": device, "threads_per_rank": 1}})
    assert ("PYTORCH_ALLOC_CONF" in rank_environment(job)) == (device == "cuda")


@pytest.mark.parametrize(
    ("device", "pp", "own", "expected"),
    [("cuda", 2, None, "32"), ("cuda", 2, "1", None), ("cuda", 1, None, None), ("cpu", 2, None, None)],
)
def test_stages_on_gpus_have_a_queue_for_each_stream_unless_the_user_says_otherwise(
    device: str, pp: int, own: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(QUEUES, raising=False)
    if own is not None:
        monkeypatch.setenv(QUEUES, own)
    job = parse({"launch": {"device": device, "threads_per_rank": 1}, "parallel": {"pp": pp}})
    assert rank_environment(job).get(QUEUES) == expected


def test_the_installed_torch_knows_these_names(tmp_path: Path) -> None:
    """They are read by compiled code, which silently ignores a name that it does not know."""
    (root,) = importlib.util.find_spec("torch").submodule_search_locations
    names = {"TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", *ALLOCATOR}
    for library in ("libtorch_cpu.so", "libc10.so"):
        path = Path(root) / "lib" / library
        if not path.exists():
            pytest.skip(f"no {library} in this build of torch")
        with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            names -= {name for name in names if content.find(name.encode()) >= 0}
    assert names == set()


def test_it_runs_its_arguments_and_writes_to_the_log(tmp_path: Path) -> None:
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


def test_one_that_was_stopped_is_continued_for_its_order(tmp_path: Path) -> None:
    waiting = WaitingTorchrun(tmp_path)
    waiting.process.send_signal(signal.SIGSTOP)
    process = psutil.Process(waiting.process.pid)
    assert until(lambda: process.status() == psutil.STATUS_STOPPED)
    assert waiting.order([], {}, tmp_path / "log")
    assert until(lambda: process.status() != psutil.STATUS_STOPPED)
    waiting.process.kill()
    waiting.process.wait()


def test_one_that_has_died_takes_no_order(tmp_path: Path) -> None:
    waiting = WaitingTorchrun(tmp_path)
    waiting.process.kill()
    waiting.process.wait()
    assert not waiting.order([], {}, tmp_path / "log")
