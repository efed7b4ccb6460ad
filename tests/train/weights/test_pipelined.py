"""Weights of a run cut into stages: taken out, and started from, as if one stage had saved them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mpctl.core.errors import InputError
from mpctl.records.checkpoint.manifest import read_manifest, sha256
from mpctl.records.checkpoint.saved_model import SavedModel
from mpctl.records.checkpoint.verify import find_damage
from mpctl.spec.job import JobSpec
from mpctl.spec.load import parse
from mpctl.train.weights.extend import row_reader, vocabulary_tables
from mpctl.train.weights.origin import open_origin
from mpctl.train.weights.writer import export_weights
from tests.cli.calls import assert_refused, caller
from tests.ranks import run_ranks
from tests.train.checkpoint.shards import shard_path
from tests.train.runtime.test_axes import SHAPES
from tests.train.runtime.tiny import _train_rank, make_trainer, tiny_job

UNTIED = {"model__tied_embeddings": False}
# 3 layers a stage: the decoder's first is in stage 0, so that both stages add its table of places.
T5 = {**SHAPES["t5"], "model__layers": 2, "model__decoder_layers": 4}
RUNS: dict[str, tuple[int, dict[str, Any]]] = {  # tp, and the model
    "gpt": (2, {}),
    "gpt-untied": (1, UNTIED),
    "t5": (1, T5),
    "gpt-tp1": (1, {}),
    "gpt-untied-tp2": (2, UNTIED),
    "t5-tp2": (2, T5),
}
# Ranks take a second to start, so those of one group train one after another.
GROUPS = [["gpt"], ["gpt-untied", "t5"], ["gpt-tp1"], ["gpt-untied-tp2", "t5-tp2"]]
SLOW = {*GROUPS[2], *GROUPS[3]}
every = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in RUNS]
)


@dataclass(frozen=True)
class Run:
    """A finished run at pp 2, and the same weights as one rank saves them."""

    folder: Path
    alone: Path
    model: dict[str, Any]
    loss: float  # its last of validation

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoints" / "step-2"


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    done: dict[str, Run] = {}

    def get(name: str) -> Run:
        if name not in done:
            (group,) = (group for group in GROUPS if name in group)
            done.update(_finish(data, tmp_path_factory.mktemp(name), group))
        return done[name]

    return get


def _finish(data: Path, root: Path, group: list[str]) -> dict[str, Run]:
    tp = RUNS[group[0]][0]
    jobs = {name: job(data, tp, RUNS[name][1], pp=2) for name in group}
    asked = {str(root / name): job.model_dump(mode="json") for name, job in jobs.items()}
    ranks = run_ranks(_train, 2 * tp, asked)
    for number, name in enumerate(group):
        (root / name / "job.json").write_text(jobs[name].model_dump_json())
        _save_alone(data, root / name, root / f"{name}-alone", [rank[number] for rank in ranks])
    losses = [one["records"][-1]["validation_loss"] for one in ranks[0]]
    return {
        name: Run(root / name, root / f"{name}-alone", RUNS[name][1], loss)
        for name, loss in zip(group, losses, strict=True)
    }


def job(data: Path, tp: int, model: dict[str, Any], *, pp: int = 1, **changes: Any) -> JobSpec:
    usual = {"training__dtype": "fp64", "training__steps": 2, **model, **changes}
    return tiny_job(data, tp, parallel__pp=pp, cluster__gpus_per_node=pp * tp, **usual)


def _train(rank: int, size: int, jobs: dict[str, Any]) -> list[dict[str, Any]]:
    return [_train_rank(rank, size, raw, folder) for folder, raw in jobs.items()]


def _save_alone(data: Path, run: Path, alone: Path, ranks: list[dict[str, Any]]) -> None:
    shutil.copytree(run, alone)
    one = job(data, 1, RUNS[run.name][1])
    trainer = make_trainer(one, alone)
    for name, parameter in trainer.model.named_parameters():
        for rank in ranks:
            _is_part(parameter.data, rank["weights"].get(name))
    trainer.saver.saved.clear()
    trainer.save()
    (alone / "job.json").write_text(one.model_dump_json())


def _is_part(whole: Tensor, held: Any) -> None:
    """A trained rank holds what the one rank resumed, so the oracle is independent."""
    if held is None:
        return
    (_, cuts), value = held
    for dim, blocks in cuts:
        ids = [i for start, stop in blocks for i in range(start, stop) if i < whole.shape[dim]]
        whole, value = whole.index_select(dim, torch.tensor(ids)), value.narrow(dim, 0, len(ids))
    assert torch.equal(whole, value)


@every
@pytest.mark.quick(1)
def test_an_export_is_that_of_one_stage(name: str, finished: Callable[[str], Run], tmp_path: Path) -> None:
    run = finished(name)
    one, cut = read_manifest(run.alone / "checkpoints/step-2"), read_manifest(run.checkpoint)
    assert (len(one.shards), one.size("tp")) == (1, 1)
    assert (len(cut.shards), cut.size("tp")) == (2 * RUNS[name][0], RUNS[name][0])
    for at in ("folder", "alone"):
        export_weights(getattr(run, at), tmp_path / at)
    found, expected = (load_file(tmp_path / at / "model.safetensors") for at in ("folder", "alone"))
    assert found.keys() == expected.keys()
    for tensor in expected:
        assert found[tensor].dtype == torch.float64
        assert torch.equal(found[tensor], expected[tensor]), tensor
    configs = [(tmp_path / at / "config.json").read_text() for at in ("folder", "alone")]
    assert configs[0] == configs[1]


@pytest.mark.parametrize(
    "names",
    [[name for name in RUNS if name not in SLOW], pytest.param(sorted(SLOW), marks=pytest.mark.slow)],
    ids=["usual", "slow"],
)
def test_another_run_starts_with_its_loss(
    names: list[str], finished: Callable[[str], Run], data: Path, tmp_path: Path
) -> None:
    """On one rank, at tp 2, and cut again: then both stages take the table that the first saved."""
    losses, asked = [], []
    for run in map(finished, names):
        start = {"training__init_from": str(run.folder)}
        alone = make_trainer(job(data, 1, run.model, **start), tmp_path)
        assert alone.step == 0
        assert alone.validate()[0] == pytest.approx(run.loss, rel=1e-12)
        for tp, pp in ((2, 1), (1, 2)):
            asked.append(job(data, tp, run.model, pp=pp, **start).model_dump(mode="json"))
            losses.append(run.loss)
    for found in run_ranks(_first_losses, 2, asked, str(tmp_path)):
        assert found == pytest.approx(losses, rel=1e-12)


def _first_losses(rank: int, size: int, jobs: list[dict[str, Any]], folder: str) -> list[float]:
    """Of each job, validation before its first step."""
    trainers = (make_trainer(parse(raw), Path(folder), rank) for raw in jobs)
    return [trainer.validate()[0] for trainer in trainers]


@every
def test_rows_are_read_from_the_stage_that_has_them(name: str, finished: Callable[[str], Run]) -> None:
    run, ids = finished(name), [0, 5, 6, 255, 256, 299]
    cut, alone = open_origin(run.folder), open_origin(run.alone)
    assert isinstance(cut, SavedModel)
    for table in vocabulary_tables(cut.model):
        holders = [shard for shard in cut.shards if table in shard.parts]
        assert len(holders) == RUNS[name][0] < len(cut.shards)
        assert torch.equal(row_reader(cut, table)(ids), row_reader(alone, table)(ids))


# ---------------------------------------------------------------- errors


@pytest.fixture
def spoilt(finished: Callable[[str], Run], tmp_path: Path) -> Run:
    """A copy of the tied run at pp 2, tp 2, to be spoilt."""
    run = finished("gpt")
    shutil.copytree(run.folder, tmp_path / "run")
    return Run(tmp_path / "run", run.alone, run.model, run.loss)


def issues_of(run: Run) -> list[str]:
    with pytest.raises(InputError) as caught:
        open_origin(run.folder)
    assert {issue.rule for issue in caught.value.issues} == {"checkpoint-damaged"}
    return [f"{Path(issue.where).name} {issue.message}" for issue in caught.value.issues]


def rewrite(run: Run, index: int, change: Callable[[dict[str, Tensor], Any], None]) -> None:
    """Change the tensors of a shard and their places, and renew its checksums."""
    path = shard_path(run.checkpoint, index)
    tensors, record = load_file(path), json.loads(path.with_suffix(".json").read_text())
    change(tensors, record["parameters"])
    save_file(tensors, path)
    signed = {**record, "bytes": path.stat().st_size, "sha256": sha256(path)}
    path.with_suffix(".json").write_text(json.dumps(signed))


def take_out(name: str) -> Callable[[dict[str, Tensor], Any], None]:
    def change(tensors: dict[str, Tensor], places: Any) -> None:
        del places[name]
        for tensor in [t for t in tensors if t.startswith(f"{name}/")]:
            del tensors[tensor]

    return change


@pytest.mark.parametrize(("index", "suffix"), [(0, ".safetensors"), (1, ".json"), (2, ".json"), (3, ".safetensors")])
def test_a_shard_that_is_gone_is_named_before_a_rank_starts(
    index: int, suffix: str, spoilt: Run, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = shard_path(spoilt.checkpoint, index).with_suffix(suffix)
    path.unlink()
    mpctl, gone = caller(capsys), {str(path)}
    start = [
        "launch",
        spoilt.folder / "job.json",
        "--set",
        f"data.path={data}",
        "--set",
        f"training.init_from={spoilt.folder}",
        "--run-dir",
        tmp_path / "new",
    ]
    for arguments in (["weights", "export", spoilt.folder, tmp_path / "out"], start):
        said = mpctl(*arguments, "--json")
        assert_refused(said, wants_json=True)
        assert {issue["where"] for issue in said.document["issues"]} == gone
    assert not (tmp_path / "out").exists() and not (tmp_path / "new").exists()


def test_a_name_that_one_rank_of_a_stage_lacks(spoilt: Run) -> None:
    rewrite(spoilt, 3, take_out("layers.1.mlp.up.weight"))
    name = "layers.1.mlp.up.weight"
    assert issues_of(spoilt) == [f"step-2 {name}: not all of it is in shard-2"]


def test_a_name_that_no_stage_has(spoilt: Run) -> None:
    for index in (2, 3):
        rewrite(spoilt, index, take_out("final_norm.weight"))
    assert issues_of(spoilt) == ["step-2 final_norm.weight [32] is in no shard, the model has it"]


def test_another_stage_in_its_place(spoilt: Run) -> None:
    """All of a stage under the numbers of another: doubled and missing parameters are named."""
    for index in (2, 3):
        for suffix in (".safetensors", ".json"):
            source = shard_path(spoilt.checkpoint, index - 2).with_suffix(suffix)
            shutil.copyfile(source, shard_path(spoilt.checkpoint, index).with_suffix(suffix))
    said = issues_of(spoilt)
    twice = "embedding.word.weight: shard-0 holds it too, as another stage"
    assert {f"shard-{index}.safetensors {twice}" for index in (2, 3)} <= set(said)
    assert "step-2 final_norm.weight [32] is in no shard, the model has it" in said


@pytest.mark.parametrize(("copied", "lost"), [(2, 3), (3, 2)])
def test_the_rows_of_another_rank(copied: int, lost: int, spoilt: Run) -> None:
    for suffix in (".safetensors", ".json"):
        source = shard_path(spoilt.checkpoint, copied).with_suffix(suffix)
        shutil.copyfile(source, shard_path(spoilt.checkpoint, lost).with_suffix(suffix))
    assert find_damage(spoilt.checkpoint) == []
    said = issues_of(spoilt)
    parts = "not all of it is in shard-2, shard-3"
    assert f"step-2 layers.1.mlp.up.weight: {parts}" in said
    assert all(line.endswith(parts) for line in said)
    assert not any("norm" in line for line in said)  # whole on each rank


def test_a_wrong_shape_and_a_part_that_is_not_what_its_record_says(spoilt: Run) -> None:
    def narrow(tensors: dict[str, Tensor], places: Any) -> None:
        places["layers.1.mlp.up.weight"]["shape"] = [128, 31]
        short = tensors["layers.1.mlp.down.weight/value"][:, :-1]
        tensors["layers.1.mlp.down.weight/value"] = short.clone()

    rewrite(spoilt, 2, narrow)
    assert issues_of(spoilt) == [
        "shard-2.safetensors layers.1.mlp.down.weight: is (32, 63), but its record says (32, 64)",
        "shard-2.safetensors layers.1.mlp.up.weight: holds (128, 31), the model needs (128, 32)",
    ]
