"""Variables of ranks on GPUs: what the user has set stays, the recorder's files lie in the run."""

from __future__ import annotations

import importlib.util
from mmap import ACCESS_READ, mmap
from pathlib import Path

import pytest

from mpctl.launch.node.gpu_variables import ALLOCATOR, allocator_variables, recorder_variables
from mpctl.launch.node.torchrun import rank_environment
from mpctl.rundir.directory import RunDir
from mpctl.spec.load import parse


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
def test_only_ranks_on_gpus_are_told_of_the_allocator(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    job = parse({"launch": {"device": device, "threads_per_rank": 1}})
    assert ("PYTORCH_ALLOC_CONF" in rank_environment(job)) == (device == "cuda")


def test_the_installed_torch_knows_these_names(tmp_path: Path) -> None:
    """They are read by compiled code, which says nothing about a name that it does not know."""
    (root,) = importlib.util.find_spec("torch").submodule_search_locations
    names = {"TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", *ALLOCATOR}
    for library in ("libtorch_cpu.so", "libc10.so"):
        path = Path(root) / "lib" / library
        if not path.exists():
            pytest.skip(f"no {library} in this build of torch")
        with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            names -= {name for name in names if content.find(name.encode()) >= 0}
    assert names == set()
