"""A checkpoint continues the same curve under any layout, or says which file is damaged."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mpctl.errors import InputError
from mpctl.runtime import checkpoint
from mpctl.shards import checkpoints, damage
from tests.runtime.tiny import column, make_trainer, tiny_job, train

SAME = 1e-6


def _copy(source: Path, run_dir: Path, *steps: int) -> Path:
    for step in steps:
        shutil.copytree(source / f"checkpoints/step-{step}", run_dir / f"checkpoints/step-{step}")
    return run_dir / f"checkpoints/step-{steps[-1]}"


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ((2, 1), (1, 1)),
        ((2, 1), (1, 2)),
        ((2, 1), (4, 1)),
        pytest.param((4, 1), (1, 1), marks=pytest.mark.slow),
    ],
)
def test_any_layout_continues_the_same_curve(
    runs, tmp_path: Path, saved: tuple[int, int], resumed: tuple[int, int]
) -> None:
    runs.get(*saved)
    _copy(runs.folder(*saved, "fp32"), tmp_path, 10)
    ranks = train(tiny_job(runs.data, *resumed), tmp_path)
    assert column(ranks, "step") == list(range(11, 21))
    assert column(ranks) == pytest.approx(column(runs.get())[10:], rel=SAME)


def test_the_same_layout_continues_to_the_bit(runs, tmp_path: Path) -> None:
    runs.get()
    _copy(runs.folder(1, 1, "fp32"), tmp_path, 10)
    assert column(train(tiny_job(runs.data), tmp_path)) == column(runs.get())[10:]


def test_masters_and_moments_of_bfloat16_are_saved_in_float32(runs, tmp_path: Path) -> None:
    runs.get(dtype="bf16")
    _copy(runs.folder(1, 1, "bf16"), tmp_path, 10)
    ranks = train(tiny_job(runs.data, training__dtype="bf16"), tmp_path)
    assert column(ranks) == column(runs.get(dtype="bf16"))[10:]


def test_a_different_padding_is_a_different_height(runs, tmp_path: Path) -> None:
    runs.get(2, 1)
    _copy(runs.folder(2, 1, "fp32"), tmp_path, 10)
    heights = {}
    for divisor in (4, 128):
        job = tiny_job(runs.data, model__vocab_divisor=divisor)
        word = make_trainer(job, tmp_path).model.embedding.word.weight
        heights[divisor] = word.detach()
    assert [len(word) for word in heights.values()] == [300, 384]
    assert torch.equal(heights[4], heights[128][:300])


def _flip(path: Path) -> None:
    held = bytearray(path.read_bytes())
    held[len(held) // 2] ^= 1
    path.write_bytes(held)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


DAMAGES = [
    ("shard-1.safetensors", _flip, "sha256"),
    ("shard-1.safetensors", _truncate, "bytes"),
    ("shard-1.safetensors", Path.unlink, "No such file"),
    ("shard-0.json", Path.unlink, "No such file"),
    ("shard-0.json", _truncate, ""),
    ("manifest.json", Path.unlink, "No such file"),
    ("manifest.json", lambda path: path.write_text("{}"), "schema"),
]


@pytest.mark.parametrize(("name", "harm", "words"), DAMAGES)
def test_damage_is_found_and_named(
    runs, tmp_path: Path, name: str, harm: Callable[[Path], None], words: str
) -> None:
    runs.get(2, 1)
    folder = _copy(runs.folder(2, 1, "fp32"), tmp_path, 10, 20)
    assert damage(folder) == []
    harm(folder / name)
    (issue,) = damage(folder)
    assert issue.where == str(folder / name) and words in issue.message
    assert str(folder) in issue.hint
    with pytest.raises(InputError, match=name):  # and not silently the older one
        make_trainer(tiny_job(runs.data), tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"model__layers": 1}, "layers.1"), ({"model__layers": 3}, "layers.2"),
     ({"model__hidden": 64}, "embedding.word.weight: holds (384, 32), the model needs (384, 64)"),
     ({"model__seq_length": 16}, "embedding.position.weight: holds (32, 32)")],
)  # fmt: skip
def test_another_model_is_refused(runs, tmp_path: Path, change: dict, words: str) -> None:
    runs.get()
    _copy(runs.folder(1, 1, "fp32"), tmp_path, 10)
    with pytest.raises(InputError, match="step-10") as caught:
        make_trainer(tiny_job(runs.data, **change), tmp_path)
    assert words in str(caught.value)


class Killed(BaseException):
    """Stands for the end of the process at this very point."""


def _die(*_: object, **__: object) -> None:
    raise Killed


@pytest.mark.parametrize("where", ["save_file", "sha256", "write_json", "_publish"])
def test_dying_while_saving_costs_nothing_saved_before(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    trainer = make_trainer(tiny_job(data, training__steps=2), tmp_path)
    list(trainer.run())
    trainer.step = 3
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(checkpoint, where, _die)
        trainer.save()
    assert [step for step, _ in checkpoints(tmp_path / "checkpoints")] == [2]
    assert damage(tmp_path / "checkpoints/step-2") == []
    trainer.save()  # over what was left behind
    assert [step for step, _ in checkpoints(tmp_path / "checkpoints")] == [2, 3]
    names = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert sorted(names) == ["step-2", "step-3"]


def test_a_full_disk_fails_the_save_and_leaves_no_checkpoint(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's words reach the reader. Simulated: a save renames over its target, so that a
    device such as /dev/full must never be one."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    trainer = make_trainer(tiny_job(data, training__steps=1), tmp_path)
    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="No space left on device"):
        list(trainer.run())
    assert checkpoints(tmp_path / "checkpoints") == []
