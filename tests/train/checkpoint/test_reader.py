"""A checkpoint continues the same curve under any layout, or names the damaged file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mpctl.core.errors import InputError
from mpctl.records.checkpoint.folder import list_checkpoints
from mpctl.records.checkpoint.verify import find_damage
from mpctl.spec.job import JobSpec
from tests.train.runtime.tiny import column, make_trainer, tiny_job, train

SAME = 1e-6


def _copy(source: Path, run_dir: Path, *steps: int) -> Path:
    for step in steps:
        shutil.copytree(source / f"checkpoints/step-{step}", run_dir / f"checkpoints/step-{step}")
    return run_dir / f"checkpoints/step-{steps[-1]}"


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        pytest.param((2, 1), (1, 1), marks=pytest.mark.slow),
        ((2, 1), (1, 2)),
        pytest.param((2, 1), (4, 1), marks=pytest.mark.slow),
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


@pytest.mark.slow
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


def test_damage_is_found_and_named(runs, tmp_path: Path) -> None:
    runs.get(2, 1)
    for number, (name, harm, words) in enumerate(DAMAGES):
        run = tmp_path / str(number)
        folder = _copy(runs.folder(2, 1, "fp32"), run, 10, 20)
        assert find_damage(folder) == []
        harm(folder / name)
        (issue,) = find_damage(folder)
        assert issue.where == str(folder / name) and words in issue.message
        assert str(folder) in issue.hint
        if harm is not _flip:  # of which tests/run/launch/test_resume.py has the way on
            with pytest.raises(InputError, match=name):  # and not silently the older one
                make_trainer(tiny_job(runs.data), run)


def test_another_model_is_refused(runs, tmp_path: Path) -> None:
    runs.get()
    _copy(runs.folder(1, 1, "fp32"), tmp_path, 10)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"model__layers": 1}, "layers.1"),
        ({"model__layers": 3}, "layers.2"),
        ({"model__hidden": 64}, "word.weight: holds (384, 32), the model needs (384, 64)"),
        ({"model__seq_length": 16}, "embedding.position.weight: holds (32, 32)"),
    ]
    for change, words in changes:
        with pytest.raises(InputError, match="step-10") as caught:
            make_trainer(tiny_job(runs.data, **change), tmp_path)
        assert words in str(caught.value)


class Killed(BaseException):
    """Simulates that the process ends at this point."""


def _die(*_: object, **__: object) -> None:
    raise Killed


def test_dying_while_saving_costs_nothing_saved_before(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, root = make_trainer(tiny_job(data), tmp_path), tmp_path / "checkpoints"
    trainer.step = saved = 2
    trainer.save()
    for where in (
        "train.checkpoint.writer.write_file",
        "records.checkpoint.manifest.write_json",
        "train.checkpoint.writer.sync_folder",
        "train.checkpoint.writer.publish",
    ):
        trainer.step = saved + 1
        with monkeypatch.context() as patched, pytest.raises(Killed):
            patched.setattr(f"mpctl.{where}", _die)
            trainer.save()
        assert list_checkpoints(root)[-1][0] == saved
        assert find_damage(root / f"step-{saved}") == []
        trainer.save()  # over what was left behind
        saved += 1
        names = sorted(path.name for path in root.iterdir())
        assert names == [f"step-{step}" for step in range(2, saved + 1)]


LEFT_OUT: Any = object()


def _bytes_gone(record: dict[str, Any]) -> None:
    del record["bytes"]


def _split(record: dict[str, Any]) -> dict[str, Any]:
    """The first matrix that is split."""
    return next(p for p in record["parameters"].values() if p["cuts"] and len(p["shape"]) > 1)


def _at(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    """Put a value into the record of the first matrix that is split."""
    return lambda record: _split(record).update({key: value})


def _older(**changes: object) -> Callable[[dict[str, Any]], None]:
    """Write the record of the first parameter that is split as older versions did, with a mistake:
    LEFT_OUT leaves something out."""

    def harm(record: dict[str, Any]) -> None:
        place = _split(record)
        ((dim, blocks),) = place.pop("cuts").items()
        place |= {"dim": int(dim), "blocks": blocks, **changes}
        for key in [key for key in changes if changes[key] is LEFT_OUT]:
            del place[key]

    return harm


RECORDS: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (_bytes_gone, "bytes: Field required"),
    (lambda record: record.update(bytes="many"), "bytes: Input should be a valid integer"),
    (lambda record: record.pop("sha256"), "sha256: Field required"),
    (lambda record: record.pop("parameters"), "parameters: Field required"),
    (lambda record: _split(record).pop("cuts"), "has no cuts"),
    (lambda record: _split(record).pop("shape"), "Field required"),
    (lambda record: record.update(parameters=[]), "parameters: Input should be"),
    (lambda record: record.update(frozen=3), "frozen: Input should be"),
    (_at("cuts", {"0": [[-4, 2]]}), "greater than or equal to 0"),
    (_at("cuts", {"0": [[3, 1]]}), "block [3, 1)"),
    (_at("cuts", {"0": [[0, 10**9]]}), "block [0, 1000000000)"),
    (_at("cuts", {"0": [[0, 3], [2, 5]]}), "blocks [0, 3) and [2, 5) of dimension 0 overlap"),
    (_at("cuts", {"0": [[4, 8]], "1": [[0, 1], [0, 1]]}), "of dimension 1 overlap"),
    (_at("cuts", {"0": [[1, 2, 3]]}), "cuts.0.0"),
    (_at("cuts", {"0": 3}), "cuts.0: Input should be"),
    (_at("cuts", {"7": [[0, 1]]}), "dimension 7 of a shape of"),
    (_at("cuts", {"-1": [[0, 1]]}), "greater than or equal to 0"),
    (_at("cuts", {"first": [[0, 1]]}), "Input should be a valid integer"),
    (_at("cuts", [[0, 1]]), "cuts: Input should be"),
    (_at("cuts", None), "has no cuts"),
    (_at("dim", 0), "has cuts and dim"),
    (_older(blocks=[[-4, 2]]), "greater than or equal to 0"),
    (_older(blocks=[[3, 1]]), "block [3, 1)"),
    (_older(blocks=[[0, 10**9]]), "block [0, 1000000000)"),
    (_older(blocks=[[0, 3], [0, 3]]), "of dimension 0 overlap"),
    (_older(dim=7), "dimension 7 of a shape of"),
    (_older(dim=None), "has blocks, but no dimension"),
    (_older(blocks=LEFT_OUT), "has no cuts"),
    (_older(dim=LEFT_OUT), "has no cuts"),
    (_at("shape", "wide"), "shape: Input should be"),
    (_at("updates", -1), "updates: Input should be"),
]


def test_a_damaged_record_is_bad_input(runs, tmp_path: Path) -> None:
    runs.get(2, 1)
    folder = _copy(runs.folder(2, 1, "fp32"), tmp_path, 10)
    path = folder / "shard-1.json"
    text = path.read_text()
    for harm, words in RECORDS:
        harm(record := json.loads(text))
        path.write_text(json.dumps(record))
        (issue,) = find_damage(folder)
        assert issue.where == str(path) and words in issue.message
        assert str(folder) in issue.hint
    with pytest.raises(InputError, match=r"shard-1\.json"):
        make_trainer(tiny_job(runs.data), tmp_path)


# ---------------------------------------------------------------- updates, by parameter


def _go_on(job: JobSpec, run_dir: Path, step: int) -> list[float]:
    """Resume from the checkpoint of `step` alone; the losses until the job's last step."""
    _copy(run_dir, run_dir.with_name(f"from-{step}"), step)
    trainer = make_trainer(job, run_dir.with_name(f"from-{step}"))
    assert trainer.step == step
    return [record["loss"] for record in trainer.run()]


@pytest.mark.parametrize("frozen", [pytest.param(["layers.0.*"], marks=pytest.mark.slow), ["*.mlp.*", "embedding.*"]])
def test_what_was_unfrozen_mid_run_resumes_to_the_bit(data: Path, tmp_path: Path, frozen: list[str]) -> None:
    """Trained from step 4 on, stopped at 7: its AdamW has seen 3 updates, not 7."""
    every = {"checkpoint__interval": 1, "training__eval_samples": 0}
    before = tiny_job(data, **every, training__steps=4, training__freeze=frozen)
    list(make_trainer(before, tmp_path / "run").run())
    after = tiny_job(data, **every, training__steps=10)
    losses = column([{"records": list(make_trainer(after, tmp_path / "run").run())}])
    assert _go_on(after, tmp_path / "run", 7) == losses[3:]
    record = json.loads((tmp_path / "run/checkpoints/step-7/shard-0.json").read_text())
    counts = {place["updates"] for place in record["parameters"].values()}
    assert counts == {3, 7} and "frozen" not in record


def test_steps_that_fp16_skipped_are_no_updates_of_a_later_bf16(data: Path, tmp_path: Path) -> None:
    often = {
        "checkpoint__interval": 1,
        "training__eval_samples": 0,
        "training__loss_scale": 2.0**23,
        "training__warmup_steps": 0,
    }
    half = tiny_job(data, **often, training__dtype="fp16", training__steps=7)
    skips = [record.get("skipped", False) for record in make_trainer(half, tmp_path / "run").run()]
    assert 0 < sum(skips) < 7
    brain = tiny_job(data, **often, training__dtype="bf16", training__steps=11)
    losses = column([{"records": list(make_trainer(brain, tmp_path / "run").run())}])
    assert "loss_scale" not in (tmp_path / "run/checkpoints/step-9/manifest.json").read_text()
    assert _go_on(brain, tmp_path / "run", 9) == losses[2:]


def test_a_checkpoint_without_updates_by_parameter_is_read(data: Path, tmp_path: Path) -> None:
    """As older versions wrote them: the manifest's count holds for all."""
    job = tiny_job(data, checkpoint__interval=1, training__eval_samples=0, training__steps=4)
    losses = column([{"records": list(make_trainer(job, tmp_path / "run").run())}])
    path = tmp_path / "run/checkpoints/step-2/shard-0.json"
    record = json.loads(path.read_text())
    for place in record["parameters"].values():
        assert place.pop("updates") == 2
    path.write_text(json.dumps(record))
    assert _go_on(job, tmp_path / "run", 2) == losses[2:]
