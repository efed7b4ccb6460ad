"""Weights on a grid of tensor-parallel ranks: from Hugging Face, between the modes, and back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from mpctl.core.errors import InputError
from mpctl.core.shard import Shard, covers
from mpctl.core.tensor_grid import TensorGrid
from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.estimate.states import checkpoint_bytes
from mpctl.records.checkpoint.manifest import read_manifest
from mpctl.records.checkpoint.tensor_header import read_header
from mpctl.run.launch.reshard import plan_of_layout, reshard_checkpoint
from mpctl.spec.load import load_job
from mpctl.train.checkpoint.reader import OpenCheckpoint
from mpctl.train.checkpoint.reshard import rank_shards
from mpctl.train.layers.parameters import take
from mpctl.train.weights.extend import fill_tables, vocabulary_tables
from mpctl.train.weights.hub import open_hub
from mpctl.train.weights.origin import open_origin
from mpctl.train.weights.reader import Targets, fill
from mpctl.train.weights.writer import export_weights, import_weights
from tests.train.checkpoint.shards import grid_shard, shard_path, shard_record
from tests.train.runtime.tiny import column, make_trainer, tiny_job, train
from tests.train.weights.hub import VOCAB, Truth
from tests.train.weights.test_extend import ADDED, EXTENSION, SEED, model_of
from tests.train.weights.test_extend import targets_of as whole_tables
from tests.train.weights.test_init_from import hub_job
from tests.train.weights.test_round_trip import save_run

Truths = Callable[[str], Truth]
GRIDS = {
    "1d": TensorGrid.of("1d", 2),
    "2d": TensorGrid.of("2d", 4),
    "2.5d": TensorGrid.of("2.5d", 8, 2),
    "3d": TensorGrid.of("3d", 8),
}
modes = pytest.mark.parametrize("mode", ["2d", "2.5d", "3d"])
FAST = {("2d", "llama31-sharded"), ("2.5d", "llama"), ("3d", "gpt2")}
cases = pytest.mark.parametrize(
    ("mode", "kind"),
    [
        pytest.param(mode, kind, marks=[pytest.mark.slow] * ((mode, kind) not in FAST))
        for mode in ("2d", "2.5d", "3d")
        for kind in ("gpt2", "llama", "llama31-sharded")
    ],
)


def targets_of(folder: Path, grid: TensorGrid, rank: int) -> Targets:
    """A rank's parameters, filled from a Hugging Face directory, over old values."""
    cut = {"parallel.tp": grid.size, "cluster.gpus_per_node": grid.size}
    mode = {"parallel.tensor_mode": grid.mode, "parallel.tensor_depth": grid.axes.get("depth")}
    job = load_job(None, {"model.hf_config": str(folder), "cluster.nodes": 1, **cut, **mode})
    shards = rank_shards(JobLayout.of(job), rank)
    targets = {n: (shard, torch.full(shard.local_shape, torch.nan)) for n, shard in shards.items()}
    fill(open_hub(folder), targets)
    return targets


@cases
def test_each_rank_reads_its_part_of_the_hub(kind: str, mode: str, truths: Truths) -> None:
    grid, folder = GRIDS[mode], truths(kind).folder
    whole = targets_of(folder, TensorGrid(), 0)
    held: dict[str, list[Shard]] = {name: [] for name in whole}
    for rank in range(grid.size):
        for name, (shard, tensor) in targets_of(folder, grid, rank).items():
            full = torch.zeros(shard.shape)  # padded to another height
            rows = min(len(full), len(whole[name][1]))
            full[:rows] = whole[name][1][:rows]
            assert torch.equal(tensor, take(shard, full)), (name, rank)
            held[name].append(shard)
    for name, shards in held.items():
        assert covers(shards[0].shape, shards), name
        per_rank = sum(torch.Size(shard.local_shape).numel() for shard in shards)
        is_matrix = "weight" in name and len(shards[0].shape) == 2 and "position" not in name
        if is_matrix:  # a share of 1/t, of 2.5d at each depth
            copies = grid.axes.get("depth", 1)
            assert per_rank == copies * torch.Size(shards[0].shape).numel(), name


@modes
@pytest.mark.slow
def test_training_starts_from_weights_of_transformers(mode: str, truths: Truths, data: Path, tmp_path: Path) -> None:
    """With the losses and the first gradients of one process."""
    tp, usual = GRIDS[mode].size, {"training__dtype": "fp64", "training__micro_batch_size": 4}
    cut = {"parallel__tp": tp, "parallel__tensor_mode": mode, "cluster__gpus_per_node": tp}
    folder = truths("llama").folder
    alone = train(hub_job(data, folder, **usual), tmp_path / "alone")
    ranks = train(hub_job(data, folder, **usual, **cut), tmp_path / "grid", timeout=200)
    for name in ("initial_validation_loss", "loss", "grad_norm", "validation_loss"):
        assert column(ranks, name) == pytest.approx(column(alone, name), rel=1e-10), name


# ---------------------------------------------------------------- between the modes

SETTINGS: dict[str, Any] = {
    "training__steps": 1,
    "checkpoint__interval": 1,
    "training__eval_samples": 0,
    "training__micro_batch_size": 4,
    "model__vocab_divisor": 2,
}
LLAMA: dict[str, Any] = {
    "model__norm": "rmsnorm",
    "model__position": "rotary",
    "model__bias": False,
    "model__activation": "swiglu",
    "model__ffn": 48,
    "model__kv_heads": 2,
    "model__tied_embeddings": False,
}


def trained(data: Path, run: Path, changes: dict[str, Any]) -> Path:
    """A checkpoint after one step of one process, with moments that are not zero."""
    job = tiny_job(data, **{**SETTINGS, **changes})
    run.mkdir()
    (run / "job.json").write_text(job.model_dump_json())
    list(make_trainer(job, run).run())
    return run / "checkpoints/step-1"


def reshard(source: Path, out: Path, mode: str, *, pp: int = 1) -> Path:
    """The checkpoint for the grid of a mode."""
    grid = GRIDS[mode]
    depth = [f"tensor_depth={grid.axes['depth']}"] if "depth" in grid.axes else []
    settings = [f"tensor_mode={mode}", *depth]
    reshard_checkpoint(source, out, tp=grid.size, pp=pp, settings=settings, on_progress=lambda *_: None)
    return out / "checkpoints" / source.name


def hashes(folder: Path) -> list[str]:
    return [shard_record(folder, k).sha256 for k in range(len(read_manifest(folder).shards))]


def tensors(folder: Path) -> dict[str, Tensor]:
    """Every full tensor of a checkpoint, `NAME/FIELD`, without padding rows."""
    checkpoint, whole = OpenCheckpoint.of(folder), {}
    for name in checkpoint.names:
        shape = checkpoint.shape_of(name)
        for field in checkpoint.fields(name):
            full = checkpoint.part(name, field, Shard(shape))
            whole[f"{name}/{field}"] = full[:300] if len(full) in (300, 304) else full
    return whole


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("changes", [{}, LLAMA], ids=["gpt", "llama"])
@pytest.mark.quick(1)
def test_a_checkpoint_goes_through_every_mode_unchanged(data: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    """1d -> 2d -> 2.5d -> 3d over two stages -> 1d: the same files, and each of the size that the
    plan says."""
    source = reshard(trained(data, tmp_path / "run", changes), tmp_path / "1d", "1d")
    expected, step = tensors(source), source
    assert any(t.abs().max() > 0 for name, t in expected.items() if name.endswith("/exp_avg_sq"))
    for mode, pp in (("2d", 1), ("2.5d", 1), ("3d", 2)):
        step = reshard(step, tmp_path / mode, mode, pp=pp)
        manifest = read_manifest(step)
        parts = pp * GRIDS[mode].size
        assert (manifest.size("tp"), len(manifest.shards)) == (GRIDS[mode].size, parts)
        same(tensors(step), expected)
        headers = [read_header(shard_path(step, k)) for k in range(len(manifest.shards))]
        written = sum(header.bytes for file in headers for header in file.values())
        job = plan_of_layout(step, None, None).job
        assert (job.parallel.tensor_mode, job.parallel.pp) == (mode, pp)
        assert written == checkpoint_bytes(JobLayout.of(job))
    assert hashes(reshard(step, tmp_path / "back", "1d")) == hashes(source)


def test_a_grid_that_cannot_be_is_refused(data: Path, tmp_path: Path) -> None:
    source = trained(data, tmp_path / "run", {"training__micro_batch_size": 1})
    with pytest.raises(InputError, match="2d needs") as caught:
        plan_of_layout(source, 6, 1, ["tensor_mode=2d"])
    (issue,) = caught.value.issues
    assert "tp 4 with" in issue.hint and "tp 9" not in issue.hint  # 3 divides no head of this model
    with pytest.raises(InputError, match="2 does not divide 1"):
        plan_of_layout(source, 4, 1, ["tensor_mode=2d"])
    more = ["tensor_mode=2d", "micro_batch_size=2"]
    assert plan_of_layout(source, 4, 1, more).job.training.micro_batch_size == 2


# ---------------------------------------------------------------- and back


def imported(hub: Path, folder: Path, mode: str) -> Path:
    """A run with the weights of a Hugging Face directory, cut for the grid of a mode."""
    import_weights(hub, folder / "ours")
    batch = {"training.micro_batch_size": 4, "training.global_batch_size": 4}
    save_run(folder / "run", folder / "ours", **{"model.hf_config": str(hub)}, **batch)
    reshard(folder / "run/checkpoints/step-0", folder / "cut", mode)
    return folder / "cut"


@cases
def test_a_checkpoint_of_a_mode_is_exported_to_the_bit(kind: str, mode: str, truths: Truths, tmp_path: Path) -> None:
    hub = truths(kind).folder
    export_weights(imported(hub, tmp_path, mode), tmp_path / "theirs")
    before, after = open_hub(hub), open_hub(tmp_path / "theirs")
    assert after.model == before.model
    for name, kept in before.tensors.items():
        with safe_open(kept.path, "pt") as one, safe_open(after.tensors[name].path, "pt") as two:
            assert torch.equal(one.get_tensor(name), two.get_tensor(name)), name


def test_ranks_that_claim_the_same_columns_leave_a_gap(truths: Truths, tmp_path: Path) -> None:
    run, name = imported(truths("gpt2").folder, tmp_path, "2d"), "layers.0.mlp.down.weight"
    paths = [shard_path(run / "checkpoints/step-0", k).with_suffix(".json") for k in range(2)]
    one, other = (json.loads(path.read_text()) for path in paths)
    assert one["parameters"][name]["cuts"].keys() == {"0", "1"}
    assert other["parameters"][name] != one["parameters"][name]
    other["parameters"][name] = one["parameters"][name]
    paths[1].write_text(json.dumps(other))
    gap = "not all of it is in shard-0, shard-1, .., shard-3"
    with pytest.raises(InputError, match=f"{name}: {gap}"):
        export_weights(run, tmp_path / "theirs")


# ---------------------------------------------------------------- more words


@pytest.mark.parametrize(("saved", "mode"), [("hub", "2d"), ("3d", "2d"), ("1d", "3d")])
def test_rows_are_added_to_tables_cut_both_ways(saved: str, mode: str, truths: Truths, tmp_path: Path) -> None:
    """Each rank has its columns of the rows that one rank would have."""
    folder, grid = truths("llama").folder, GRIDS[mode]
    if saved != "hub":
        folder = imported(folder, tmp_path, saved)
    origin = open_origin(folder)
    model = model_of(origin, VOCAB + ADDED)
    alone = whole_tables(model, tp=1, rank=0)
    fill_tables(origin, model, alone, EXTENSION)
    for name in vocabulary_tables(model):
        for rank in range(grid.size):
            shard = grid_shard(grid, rank, (512, 32), ("vocab", "hidden"))
            tensor = torch.full(shard.local_shape, SEED)
            fill_tables(origin, model, {name: (shard, tensor)}, EXTENSION)
            full = torch.full(shard.shape, SEED)
            full[: VOCAB + ADDED] = alone[name][1][: VOCAB + ADDED]
            assert torch.equal(tensor, take(shard, full)), name
