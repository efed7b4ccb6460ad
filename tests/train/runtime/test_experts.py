"""Layers with experts, trained: a layout changes neither loss, norm, gradients nor biases.

8 experts, 2 a token, one shared expert, the first of four layers dense; dropout, the balance loss
by sequence and the z-loss are on. All in float64, so that equal means 1e-10 and no choice is a near
tie.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from mpctl.core.errors import InputError
from mpctl.records.checkpoint.manifest import read_manifest
from mpctl.records.rundir.summary import expert_summary
from mpctl.run.launch.summary import planned_traffic
from mpctl.spec.job import JobSpec
from mpctl.train.layers.parameters import assemble
from mpctl.train.layers.routing_log import RoutingTotals
from mpctl.train.runtime.routing import StepRouting
from mpctl.train.transport.group import Group
from tests.shards import shard_from
from tests.train.runtime.test_axes import SHAPES, same_copies
from tests.train.runtime.tiny import column, make_trainer, tiny_job, tiny_plan, train

STEPS, TOKENS = 4, 8 * 32
MOE: dict[str, Any] = {
    "model__layers": 4,
    "model__experts": 8,
    "model__experts_per_token": 2,
    "model__expert_ffn": 24,
    "model__shared_expert_ffn": 16,
    "model__dense_layers": 1,
    "model__activation": "swiglu",
    "training__dtype": "fp64",
    "training__steps": STEPS,
    "training__moe_z_loss_coeff": 1e-3,
    "checkpoint__interval": 2,
}
BIASED: dict[str, Any] = {
    "model__router_score": "sigmoid",
    "model__router_bias": True,
    "model__router_scale": 2.5,
    "model__router_groups": 4,
    "model__router_groups_per_token": 2,
    "model__shared_expert_gate": True,
    "training__moe_bias_update_rate": 0.02,
}
GLOBAL: dict[str, Any] = {"training__moe_load_balancing": "global"}
DEEPSEEK: dict[str, Any] = {**BIASED, **SHAPES["latent"], "model__shared_expert_gate": False}
BY_MICRO_BATCH: dict[str, Any] = {"training__moe_load_balancing": "micro_batch"}
MODELS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "biased": BIASED,
    "global": GLOBAL,
    "deepseek": DEEPSEEK,
    "micro-batch": BY_MICRO_BATCH,
}
SP, FULL = {"parallel__sequence_parallel": True}, {"training__recompute": "full"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": {"dp": 2, "parallel__ep": 2},
    "ep2-full": {"dp": 2, "parallel__ep": 2, **FULL},
    "ep2-gloo": {"dp": 2, "parallel__ep": 2, "launch__shared_memory": False},
    "ep4": {"dp": 4, "parallel__ep": 4},
    "dp4-ep2": {"dp": 4, "parallel__ep": 2},
    "tp2-ep2": {"tp": 2, "parallel__ep": 2, **SP},
    "tp2-dp2-ep4-full": {"tp": 2, "dp": 2, "parallel__ep": 4, **SP, **FULL},
    "tp2-dp2-ep2-etp2": {"tp": 2, "dp": 2, "parallel__ep": 2, "parallel__etp": 2, **SP},
    "etp2": {"dp": 2, "parallel__etp": 2},
    "cp2-ep2": {"parallel__cp": 2, "parallel__ep": 2},
    "cp2-tp2": {"tp": 2, "parallel__cp": 2, **SP},
    "cp2-dp2-ep4": {"dp": 2, "parallel__cp": 2, "parallel__ep": 4},
    "pp2-dp2-ep2": {"dp": 2, "parallel__pp": 2, "parallel__ep": 2},
    "interleaved": {
        "dp": 2,
        "parallel__pp": 2,
        "parallel__ep": 2,
        "parallel__vpp": 2,
        "parallel__schedule": "interleaved",
    },
    "zero-bubble": {"dp": 2, "parallel__pp": 2, "parallel__ep": 2, "parallel__schedule": "zero-bubble"},
    "zero1": {"dp": 4, "parallel__ep": 2, "parallel__zero": 1},
    "zero2": {"dp": 4, "parallel__ep": 2, "parallel__zero": 2, "parallel__bucket_bytes": 20_000},
    "zero3": {"dp": 4, "parallel__ep": 2, "parallel__zero": 3, **FULL},
    "zero1-size": {"dp": 4, "parallel__ep": 2, "parallel__zero": 1, "parallel__zero_size": 2},
    "zero3-size": {
        "dp": 8,
        "parallel__ep": 2,
        "parallel__zero": 3,
        "parallel__zero_size": 4,
        "training__micro_batch_size": 1,
    },
    "order": {"tp": 2, "dp": 2, "parallel__ep": 2, "parallel__order": "tp-ep-cp-dp-pp", **SP},
}
QUICK = {("softmax", "ep2-full"), ("biased", "tp2-ep2")}
OF_ALL_MODELS = ("ep2", "tp2-ep2", "pp2-dp2-ep2", "cp2-ep2")
OF_MODEL = {"softmax": tuple(LAYOUTS), "micro-batch": ("tp2-ep2", "cp2-ep2")}
"""With dp another rank has the samples of a micro batch, on which this balance loss depends."""
CASES = [
    pytest.param(model, layout, marks=[pytest.mark.slow] * ((model, layout) not in QUICK))
    for model in MODELS
    for layout in OF_MODEL.get(model, OF_ALL_MODELS)
]


def moe_job(data: Path, model: str = "softmax", layout: dict[str, Any] | None = None) -> JobSpec:
    changes = layout or {}
    sizes = [changes.get(axis, 1) for axis in ("tp", "dp", "parallel__cp", "parallel__pp")]
    ranks = int(torch.tensor(sizes).prod())
    return tiny_job(data, **{**MOE, **MODELS[model], **changes, "cluster__gpus_per_node": ranks})


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory):
    """Trainings of one process by model, and their run directories."""
    done: dict[str, tuple[list[dict[str, Any]], Path]] = {}

    def trained(model: str) -> tuple[list[dict[str, Any]], Path]:
        if model not in done:
            folder = tmp_path_factory.mktemp(model)
            done[model] = train(moe_job(data, model), folder), folder
        return done[model]

    return trained


def put_together(ranks: list[dict[str, Any]], what: str) -> dict[str, torch.Tensor]:
    """Every parameter, or gradient, from the ranks that hold its parts."""
    parts: dict[str, dict[str, Any]] = {}
    for rank in ranks:
        for name, (shard, value) in rank[what].items():
            parts.setdefault(name, {}).setdefault(str(shard), (shard_from(shard), value))
    return {
        name: assemble([shard for shard, _ in held.values()], [value for _, value in held.values()])
        for name, held in parts.items()
    }


def same_gradients(ranks: list[dict[str, Any]], one: list[dict[str, Any]]) -> Collection[str]:
    """Require the gradients of one process to 1e-10 of the largest element; returns their names."""
    found, wanted = (put_together(r, "gradients") for r in (ranks, one))
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        rows = slice(min(len(gradient), len(found[name])))  # of words, padded by tp
        error = (found[name][rows] - gradient[rows]).abs().max() / gradient.abs().max()
        assert error < 1e-10, (name, float(error))
    return found.keys()


def manifest(folder: Path, step: int):
    return read_manifest(folder / f"checkpoints/step-{step}")


@pytest.mark.parametrize(("model", "layout"), CASES)
@pytest.mark.quick(1)
def test_a_layout_changes_nothing_and_the_plan_is_what_runs(data, alone, tmp_path, model: str, layout: str) -> None:
    job = moe_job(data, model, LAYOUTS[layout])
    ranks = train(job, tmp_path, timeout=120)
    one, folder = alone(model)
    for name in ("loss", "grad_norm", "aux_loss", "expert_load"):
        assert column(ranks, name) == pytest.approx(column(one, name), rel=1e-10), name
    assert column(ranks, "near_ties") == [0] * STEPS
    last = [found[0]["records"][-1]["validation_loss"] for found in (ranks, one)]
    assert last[0] == pytest.approx(last[1], rel=1e-10)
    assert all(column([rank]) == column(ranks) for rank in ranks)
    same_copies(ranks)
    same_gradients(ranks, one)
    estimate = tiny_plan(job).estimate
    for rank in ranks:
        stage = rank["coords"]["pp"]
        assert rank["traffic"] == planned_traffic(estimate.messages[stage])
        assert rank["count"] == estimate.memory[stage].parameters
    for step in (2, STEPS):
        saved = manifest(tmp_path, step)
        assert saved.router_bias == manifest(folder, step).router_bias
        assert saved.router_counts == manifest(folder, step).router_counts


def test_what_is_recorded_is_told_apart(alone) -> None:
    """The balance loss is near its factor times the layers; the loss is that of the words."""
    (one,), folder = alone("softmax")
    first = one["records"][0]
    assert 0.03 <= first["aux_loss"] < 0.06 and first["loss"] == pytest.approx(5.71, abs=0.01)
    assert first["expert_load"] > first["rank_load"] == 1.0
    summary = expert_summary(one["records"])
    assert summary is not None and summary["near_ties"] == 0
    assert manifest(folder, 2).router_bias == manifest(folder, 2).router_counts == {}


@pytest.mark.parametrize("layout", [{}, FULL], ids=["kept", "recomputed"])
def test_every_token_of_the_step_is_counted_once(data, tmp_path, layout: dict[str, Any]) -> None:
    """Neither repeated forwards nor validations count."""
    trainer = make_trainer(moe_job(data, "biased", layout), tmp_path)
    trainer.validate()
    trainer.one_step()
    trainer.validate()
    totals = trainer.routing.totals
    assert totals is not None and totals.counts.sum(1).tolist() == [2 * TOKENS] * 3
    counts = totals.counts
    names = [f"layers.{n}.mlp" for n in (1, 2, 3)]
    wanted = {
        name: (torch.sign(2 * TOKENS / 8 - row.double()).float() * 0.02).tolist()
        for name, row in zip(names, counts, strict=True)
    }
    assert trainer.routing.state() == {"router_bias": wanted, "router_counts": {}}
    assert len({value for row in wanted.values() for value in row}) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "saved", "resumed"),
    [
        ("biased", "tp2-ep2", "ep2"),
        ("softmax", "tp2-dp2-ep2-etp2", "pp2-dp2-ep2"),
        ("global", "ep2", "zero3"),
        ("biased", "zero3", "cp2-ep2"),
        ("global", "pp2-dp2-ep2", "tp2-ep2"),
    ],
)
def test_it_goes_on_in_another_layout(data, alone, tmp_path, model: str, saved: str, resumed: str) -> None:
    """Moments, biases and the last step's counts do not depend on who saved them."""
    train(moe_job(data, model, LAYOUTS[saved]), tmp_path / "saved", timeout=120)
    shutil.copytree(tmp_path / "saved/checkpoints/step-2", tmp_path / "run/checkpoints/step-2")
    ranks = train(moe_job(data, model, LAYOUTS[resumed]), tmp_path / "run", timeout=120)
    one, folder = alone(model)
    assert column(ranks, "step") == [3, 4]
    for name in ("loss", "grad_norm", "aux_loss"):
        assert column(ranks, name) == pytest.approx(column(one, name)[2:], rel=1e-10)
    assert manifest(tmp_path / "run", 4).router_bias == manifest(folder, 4).router_bias


def test_a_skipped_step_leaves_the_biases(data, tmp_path) -> None:
    changes = {"training__dtype": "fp16", "training__loss_scale": 2.0**40, "training__steps": 1}
    trainer = make_trainer(moe_job(data, "biased", changes), tmp_path)
    (record,) = trainer.run()
    assert record["skipped"] and record["aux_loss"] > 0
    assert not trainer.routing.log.row("layers.2.mlp").bias.any()
    assert trainer.routing.totals is not None and trainer.routing.totals.counts.any()


def test_biases_of_another_model_are_refused(data, alone, tmp_path) -> None:
    _, folder = alone("biased")
    shutil.copytree(folder / "checkpoints", tmp_path / "checkpoints")
    path = tmp_path / "checkpoints/step-4/manifest.json"
    document = json.loads(path.read_text())
    document["router_bias"]["layers.1.mlp"] = [0.5]
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"layers.1.mlp: a state of 1 experts for 8"):
        make_trainer(moe_job(data, "biased"), tmp_path)


def test_loads_by_hand() -> None:
    routing = StepRouting(world=Group(), samples=4, ranks=2)
    assert routing.shares() == routing.loads() == [] and routing.figures((), ()) == {}
    counts = torch.tensor([[3, 1, 2, 2], [8, 0, 0, 0], [0, 0, 0, 0]])
    losses, near = torch.tensor([[0.5, 0.25], [0.25, 0.0], [0.0, 0.0]]), torch.tensor([1, 0, 2])
    routing.totals = RoutingTotals(counts, near, losses.double())
    sums, known = ([float(one) for one in each] for each in (routing.shares(), routing.loads()))
    assert routing.figures(sums, known) == {
        "aux_loss": 0.25,
        "near_ties": 3,
        "expert_load": (1.5 + 4 + 1) / 3,
        "rank_load": (1 + 2 + 1) / 3,
    }
    assert "aux_loss" not in routing.figures([float("nan"), 0.0], known)
