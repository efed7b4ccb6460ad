"""How much disk checkpoints need: in the plan, before the start, and reported when it runs out."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
from collections import namedtuple
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from mpctl.cli.app import run as mpctl
from mpctl.core.units import bytes_text
from mpctl.plan.estimate.states import most_at_once
from mpctl.records.checkpoint.folder import prunable
from mpctl.records.rundir.directory import RunDir
from mpctl.run.launch.attempt import AttemptState, NodeState
from mpctl.run.launch.diagnose import AttemptEvidence, find_failure, full_disk_text
from mpctl.run.launch.supervise import SaveMonitor
from mpctl.spec.job import CheckpointSpec
from mpctl.spec.load import load_job
from mpctl.train.runtime.process import failure_record
from tests.run.launch.attempts import Saying
from tests.run.launch.command import arguments, end_all, endless, launch
from tests.train.runtime.tiny import make_trainer, tiny_job, tiny_plan, train

Usage = namedtuple("Usage", "total used free")


def data_bytes(checkpoint: Path) -> int:
    """Bytes of all tensors in its shards: each file but for its header."""
    total = 0
    for path in checkpoint.glob("shard-*.safetensors"):
        with path.open("rb") as stream:
            header = int.from_bytes(stream.read(8), "little")
        assert header < 200 * len(json.loads(path.read_bytes()[8 : 8 + header]))
        total += path.stat().st_size - 8 - header
    return total


ONE = {"training__steps": 1, "training__eval_samples": 0}
CASES: list[dict[str, Any]] = [
    {},
    {"training__dtype": "bf16", "training__freeze": ["embedding.*", "layers.0.*"]},
    {"training__dtype": "fp64", "model__tied_embeddings": False, "training__freeze": ["*norm*"]},
    {"training__dtype": "fp16"},
]


@pytest.mark.parametrize("changes", CASES)
def test_a_checkpoint_has_the_planned_size(data: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    job = tiny_job(data, **ONE, **changes)
    trainer = make_trainer(job, tmp_path)
    trainer.step = 1
    trainer.save()
    estimate = tiny_plan(job).estimate
    assert estimate is not None
    assert data_bytes(tmp_path / "checkpoints/step-1") == estimate.checkpoint_bytes


@pytest.mark.parametrize(
    ("tp", "dp", "changes"),
    [
        pytest.param(2, 2, {"parallel__zero": 3, "training__freeze": ["layers.1.mlp.*"]}, marks=pytest.mark.slow),
        pytest.param(
            1, 1, {"parallel__pp": 2, "cluster__gpus_per_node": 2, "training__dtype": "bf16"}, marks=pytest.mark.slow
        ),
        pytest.param(
            2,
            1,
            {"parallel__pp": 2, "cluster__gpus_per_node": 4, "parallel__vpp": 1, "parallel__sequence_parallel": True},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_so_it_has_of_several_ranks(data: Path, tmp_path: Path, tp: int, dp: int, changes: dict[str, Any]) -> None:
    """Each tp rank writes what is not split; a table that two stages hold is written once."""
    job = tiny_job(data, tp, dp, **ONE, **changes)
    train(job, tmp_path)
    estimate = tiny_plan(job).estimate
    assert estimate is not None
    assert data_bytes(tmp_path / "checkpoints/step-1") == estimate.checkpoint_bytes


def test_the_most_checkpoints_at_once() -> None:
    """Compared with a run played step by step."""
    cases = product([0, 1, 2, 5], [0, 20, 30], [True, False], [1, 9, 10, 95, 100])
    for last, every, end, steps in cases:
        saving = CheckpointSpec(interval=10, at_end=end, keep_last=last, keep_every=every)
        there: list[int] = []
        most = 1  # a stop saves, if nothing else does
        for step in range(1, steps + 1):
            if step % 10 == 0 or (end and step == steps):
                there.append(step)
                most = max(most, len(there))
                there = [s for s in there if s not in prunable(there, last=last, every=every)]
        assert most_at_once(saving, steps) == most, saving


def test_the_most_by_hand() -> None:
    saving = CheckpointSpec(interval=10)
    assert most_at_once(saving, 100) == 10 and most_at_once(saving, 100, done=75) == 3
    few = saving.model_copy(update={"keep_last": 2})
    assert most_at_once(few, 100) == 3
    assert most_at_once(few.model_copy(update={"keep_every": 20}), 100) == 6
    assert most_at_once(CheckpointSpec(), 100) == 1
    endless = CheckpointSpec(interval=1, keep_last=3, keep_every=10**6)
    assert most_at_once(endless, 2**31 - 1) == 2147 + 3 + 1  # in no time: nothing of that length is made


def test_a_disk_that_is_too_small_is_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 steps, saved after 10 and 20: two checkpoints."""
    estimate = tiny_plan(tiny_job(data)).estimate
    assert estimate is not None
    one = estimate.checkpoint_bytes
    free = 2 * one - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, free))
    argv = arguments(data, tmp_path / "run", "--dry-run")
    assert mpctl(argv) == 2
    said = capsys.readouterr().err
    for words in (
        f"2 checkpoints of {bytes_text(one)}",
        f"{bytes_text(free)} are free",
        "disk-holds-checkpoints",
        "checkpoint.interval",
    ):
        assert words in said
    assert mpctl([*argv, "--set", "checkpoint.interval=0"]) == 0
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, 2 * one))
    assert mpctl(argv) == 0
    more = ["--set", "checkpoint.interval=1"]
    assert mpctl([*argv, *more]) == 2
    assert "use checkpoint.keep_last 1, a larger" in capsys.readouterr().err
    assert mpctl([*argv, *more, "--set", "checkpoint.keep_last=1"]) == 0


@pytest.mark.slow
def test_a_save_that_fails_ends_with_words(data: Path, tmp_path: Path) -> None:
    """No file of this launch may exceed 100,000 bytes: exit code 1, no traceback, nothing half."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        run = launch(data, tmp_path / "run", "--set", "training.steps=1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert run.ended().process.returncode == 1
    failure = run.summary["failure"]
    assert failure["rank"] == 0 and failure["doing"].startswith("saving step 1")
    for words in (
        "the checkpoint could not be saved",
        "shard-0.safetensors: File too large",
        "97.7 KiB could be written",
        "none was saved before",
    ):
        assert words in failure["error"] and words in run.stderr.replace("\n", " ")
    assert "Traceback" not in run.stderr
    assert list((run.run_dir / "checkpoints").iterdir()) == []


# ---------------------------------------------------------------- saves as the launcher sees them


def test_a_save_that_makes_progress_is_reported_and_waited_for(tmp_path: Path) -> None:
    """One poll a second: 20 s of writing, then 5 s without progress, then training again."""
    reports: list[tuple[float, str]] = []
    now = 0.0
    said = {0: "step 4", 1: "step 4"}
    saves = SaveMonitor(lambda words: reports.append((now, words)), clock=lambda: now)
    moved = {}
    for second in range(40):
        now = float(second)
        if 10 <= second < 30:
            said = {0: "saving step 4", 1: f"saving step 4: {second - 10} GiB of 20 GiB written"}
        elif second >= 35:
            said = {0: "step 5", 1: "step 5"}
        saves.poll(Saying(*said.values()))
        moved[second] = saves.last_progress
    assert [moved[s] for s in (9, 10, 20, 29, 34, 39)] == [float("-inf"), 10, 20, 29, 29, 29]
    assert [at for at, _ in reports] == [12.0, 27.0]
    assert reports[0][1] == "saving step 4: 2 GiB of 20 GiB written"


# ---------------------------------------------------------------- a disk that is full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A run directory on a separate disk of 8 MiB."""
    folder = tmp_path / "run"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        yield folder
    finally:
        end_all()
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> None:
    handle = os.open(disk / "filler", os.O_WRONLY | os.O_CREAT)
    with suppress(OSError):
        while os.write(handle, bytes(4096)):
            pass
    os.close(handle)


@pytest.mark.slow
def test_a_full_disk_is_what_a_failure_names(data: Path, small_disk: Path) -> None:
    """Training goes on without records until its log is full as well. torchrun can write no log; a
    rank may still report it, through the memory of its host."""
    run = endless(data, small_disk, "--dp", "2", "--set", "launch.max_restarts=3").at_step(3)
    fill(small_disk)
    run.ended()
    said = run.stderr.replace("\n", " ")
    assert run.process.returncode == 1 and "Traceback" not in said, said
    lines = [line for line in run.stderr.splitlines() if line.startswith(("!", "✗"))]
    notes = f"{small_disk}/metrics.jsonl cannot be written: No space", " times as long as ", " no longer slow "
    failures = [line for line in lines if not any(note in line for note in notes)]
    assert any(notes[0] in line for line in lines), run.stderr
    full = f"the disk of {small_disk} is full: No space left on device"
    unwritten = f"{small_disk}/summary.json could not be written: No space left on device"
    assert failures[-1][2:].startswith(full), run.stderr
    assert all(full in line or unwritten in line for line in failures), run.stderr
    assert not run.left_behind(3)


def test_a_recorded_error_of_a_full_disk_comes_before_others(tmp_path: Path) -> None:
    """A cache on a local disk of a host may be full, while there is room for the run."""
    run, number = RunDir(tmp_path), errno.ENOSPC
    errors = ValueError("half a file"), OSError(number, os.strerror(number), "/tmp/cache")
    records = [
        failure_record(error, rank=rank, coords={"dp": rank}, doing="step 3") for rank, error in enumerate(errors)
    ]
    evidence = AttemptEvidence(state=AttemptState([NodeState(code=1, failures=records)]))
    failure = find_failure(run, load_job(None, {"parallel.dp": 2}), evidence)
    assert failure.rank == 1 and "No space left on device" in failure.error
    assert full_disk_text(tmp_path) == "" and list(tmp_path.glob(".*")) == []
