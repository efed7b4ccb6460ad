"""ZeRO 1 to 3: what is shared out changes nothing that is computed, each rank sends and holds what
the plan says, and a checkpoint does not tell the stage that wrote it.

float64, so that equal means 1e-10. Small buckets, so that there are several of them.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from mpctl.core.topology import Topology
from mpctl.run.launch.summary import planned_traffic
from mpctl.spec.load import load_job, parse
from mpctl.train.rehearsal.worker import rehearse_rank
from tests.ranks import run_ranks
from tests.run.launch.command import end_all, endless
from tests.train.runtime.test_axes import same_copies, same_gradients
from tests.train.runtime.test_pipeline import FULL, MODELS, SEQUENCE, ZERO, ident, layout, pipeline_job, whole_pipelines
from tests.train.runtime.tiny import (
    _train_rank,
    column,
    make_trainer,
    settings,
    tiny_job,
    tiny_plan,
    train,
    whole_weights,
)


def name(value: Any) -> str:
    return f"zero{value}" if isinstance(value, int) else ident(value)


BOTTOM = {"training__freeze": ["embedding.*", "layers.0.*"]}
SMALL = {"parallel__bucket_bytes": 40_000}
LIGHT = {"model__layers": 2, "training__steps": 2}
PAIRS, NO_OVERLAP = {"parallel__zero_size": 2}, {"parallel__overlap_gradients": False}
CASES: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("gpt", 1, layout(1, dp=2), LIGHT),
    ("t5", 2, layout(1, dp=2), {**LIGHT, "model__decoder_layers": 1}),
    ("bert", 3, layout(1, cp=2), {**LIGHT, **FULL}),
    ("gpt", 1, layout(1, dp=4), {**LIGHT, **PAIRS, "launch__shared_memory": False}),
    ("gpt", 3, layout(1, cp=2, dp=2), {**LIGHT, **PAIRS}),
]
SLOW_LAYOUTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("gpt", layout(1, dp=2, tp=2), SEQUENCE),
    ("gpt", layout(2, dp=2), {}),
    ("gpt", layout(1, dp=2), BOTTOM),
    ("gpt", layout(1, dp=3), {"training__global_batch_size": 12}),
    ("gpt", layout(1, dp=2), {"launch__shared_memory": False}),
    ("gpt", layout(2, dp=2, schedule="gpipe"), NO_OVERLAP),
    ("llama", layout(1, cp=2, dp=2), FULL),
    ("bert", layout(2, schedule=ZERO, dp=2), {}),
    ("bert", layout(1, cp=2), {}),
    ("glm", layout(2, dp=2, tp=2), {**SEQUENCE, **FULL}),
    ("t5", layout(2, 2, dp=2), {}),
    ("t5", layout(1, cp=2), {"training__freeze": ["embedding.*", "encoder.*"]}),
    ("gpt", layout(1, tp=2, dp=4), {**SEQUENCE, **PAIRS}),
    ("gpt", layout(2, dp=4), {**PAIRS, "launch__shared_memory": False}),
    ("bert", layout(2, schedule=ZERO, dp=4), PAIRS),
    ("t5", layout(1, dp=4), {"training__freeze": ["embedding.*"], **PAIRS, **NO_OVERLAP}),
]
SLOW_CASES = [(model, zero, how, changes) for zero in (1, 2, 3) for model, how, changes in SLOW_LAYOUTS]
SLOW_CASES += [("gpt", 0, *SLOW_LAYOUTS[i][1:]) for i in (1, 4, 5)]


@pytest.mark.parametrize(
    ("model", "zero", "how", "changes"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)],
    ids=name,
)
@pytest.mark.quick(3)
def test_the_loss_does_not_tell_and_the_plan_is_what_runs(
    data, tmp_path, model: str, zero: int, how: dict[str, Any], changes: dict[str, Any]
) -> None:
    job = pipeline_job(data, model, how, {**SMALL, **changes, "parallel__zero": zero})
    ranks, one = train(job, tmp_path / "ranks"), pipeline_job(data, model, {}, alone(changes))
    single = [_train_rank(0, 1, one.model_dump(mode="json"), str(tmp_path / "one"))]
    for name in ("loss", "grad_norm"):
        assert column(ranks, name) == pytest.approx(column(single, name), rel=1e-10)
    assert job.model is not None
    whole = whole_pipelines(ranks)
    same_gradients(whole, single, vocab=job.model.vocab)
    same_copies(ranks)
    found, expected = (whole_weights(r, vocab=job.model.vocab) for r in (whole, single))
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-10, atol=1e-12, msg=name)
    estimate = tiny_plan(job).estimate
    for rank in ranks:
        stage = rank["coords"]["pp"]
        assert rank["count"] == estimate.memory[stage].parameters
        assert rank["traffic"] == planned_traffic(estimate.messages[stage])


def alone(changes: dict[str, Any]) -> dict[str, Any]:
    """What matters to a curve."""
    return {k: v for k, v in changes.items() if k.startswith("model") or k in CURVE}


CURVE = ("training__freeze", "training__global_batch_size", "training__steps")


# ---------------------------------------------------------------- what is held


SHARED = layout(2, 2, cp=2, dp=2)
QUICK = {("gpt", 2, "fp16")}


@pytest.mark.parametrize(
    ("model", "how", "zero", "dtype"),
    [
        pytest.param(
            model, how, zero, dtype, marks=[pytest.mark.slow] * ((model, zero, dtype) not in QUICK or how["dp"] == 5)
        )
        for model, how in (
            ("gpt", layout(2, tp=2, dp=3)),
            ("t5", SHARED),
            ("gpt", {**layout(1, dp=5), **BOTTOM}),
            ("gpt", {**layout(1, dp=6), **PAIRS}),
        )
        for zero in range(4)
        for dtype in ("fp32", "bf16", "fp16")
    ],
    ids=name,
)
@pytest.mark.quick(1)
def test_a_rehearsal_holds_and_sends_what_is_planned(model: str, how: dict[str, Any], zero: int, dtype: str) -> None:
    changes = {"parallel__zero": zero, "training__dtype": dtype, "launch__device": "cuda", **SMALL}
    batch = {"training__global_batch_size": 8 * how["dp"]}
    job = load_job(None, settings(**{**MODELS[model], **how, **changes, **batch}))
    account = rehearse_rank(job, Topology.of(job.sizes), job.world_size - 1)
    assert account["failure"] is None, "".join(account["failure"]["traceback"])
    estimate = tiny_plan(job).estimate
    assert account["step_traffic"] == planned_traffic(estimate.messages[-1])
    memory = estimate.memory[-1]
    assert account["state_bytes"] == {
        "parameters": memory.parameter_bytes,
        "gradients": memory.gradient_bytes,
        "optimizer": memory.optimizer_bytes,
    }


@pytest.mark.slow
def test_zero_3_never_holds_all_parameters() -> None:
    """Of 8 layers the ends and two: the one that is computed and the next."""
    many = {"model__layers": 8, "training__global_batch_size": 4, "parallel__dp": 2}
    held = []
    for zero in (2, 3):
        job = load_job(None, settings(**many, cluster__gpus_per_node=2, parallel__zero=zero))
        account = rehearse_rank(job, Topology.of(job.sizes), 0)
        assert account["failure"] is None
        held.append(account["peak_bytes"])
    h, v, s, width = 32, 384, 32, 4
    layer, ends = (12 * h * h + 13 * h) * width, (v * h + s * h + 2 * h) * width
    assert held[0] - held[1] >= (8 * layer + ends) / 2 - 2 * layer - ends


@pytest.mark.slow
def test_a_stage_is_never_built_whole() -> None:
    """Over 4 replicas at ZeRO 3: a bucket at a time, whole as drawn and as laid flat."""
    layers = {"model__layers": 8, "training__global_batch_size": 4}
    job = load_job(None, settings(**layers, parallel__dp=4, cluster__gpus_per_node=4, parallel__zero=3))
    account = rehearse_rank(job, Topology.of(job.sizes), 0)
    assert account["failure"] is None
    h, v, s, width = 32, 384, 32, 4
    layer, ends = (12 * h * h + 13 * h) * width, (v * h + s * h + 2 * h) * width
    parts = 2 * (8 * layer + ends) / 4  # values and gradients
    assert account["building_bytes"] <= parts + 2 * max(layer, ends) < 2 * (8 * layer + ends)
    assert account["building_bytes"] >= parts


# ---------------------------------------------------------------- checkpoints


def _saved_again(rank: int, size: int, jobs: list[dict[str, Any]], root: str) -> list[list[float]]:
    """The first job trains and saves; each of the others loads that, saves it elsewhere, goes on.
    Losses of each."""
    losses = []
    for number, raw in enumerate(jobs):
        folder = Path(root) / str(number)
        if number and rank == 0:
            shutil.copytree(Path(root) / "0/checkpoints/step-2", folder / "checkpoints/step-2")
        dist.barrier()
        trainer = make_trainer(parse(raw), folder, rank)
        if number:
            trainer.saver.writer.root, trainer.saver.saved = folder / "again", set()
            trainer.save()
        losses.append([record["loss"] for record in trainer.run()])
    return losses


@pytest.mark.parametrize(
    ("dtype", "dp", "stages", "freeze"),
    [
        ("bf16", 2, (1, 3, 0), ["embedding.word.*", "layers.0.*"]),
        ("fp64", 4, ((2, 2), 3, (3, 2)), ["layers.0.*"]),
        pytest.param("fp64", 2, (2, 1, 0), [], marks=pytest.mark.slow),
        pytest.param("fp16", 2, (3, 2, 1), [], marks=pytest.mark.slow),
        pytest.param("fp32", 2, (0, 3, 2), [], marks=pytest.mark.slow),
        pytest.param("fp32", 4, (1, (1, 2), (3, 2)), [], marks=pytest.mark.slow),
    ],
)
@pytest.mark.quick(1)
def test_a_checkpoint_of_any_stage_is_read_to_the_bit_by_any_other(
    data: Path, tmp_path: Path, dtype: str, dp: int, stages: tuple[int | tuple[int, int], ...], freeze: list[str]
) -> None:
    """By these replicas and, the last, by one; a stage, or one with its zero_size."""
    changes = {
        "training__dtype": dtype,
        "training__steps": 4,
        "checkpoint__interval": 2,
        "training__eval_samples": 0,
        "training__freeze": freeze,
        "checkpoint__at_end": False,
        **SMALL,
    }
    both = [stage if isinstance(stage, tuple) else (stage, None) for stage in stages]
    jobs = [
        tiny_job(data, dp=dp, **changes, parallel__zero=zero, parallel__zero_size=size).model_dump(mode="json")
        for zero, size in both
    ]
    losses, *_ = run_ranks(_saved_again, dp, jobs, str(tmp_path))
    for number in (1, 2):
        near = 2e-3 if dtype in ("bf16", "fp16") else 1e-5 if dtype == "fp32" else 1e-10
        assert losses[number] == pytest.approx(losses[0][2:], rel=near)
    single = tmp_path / "single"
    shutil.copytree(tmp_path / "0/checkpoints/step-2", single / "checkpoints/step-2")
    trainer = make_trainer(tiny_job(data, **changes, parallel__zero=3), single)
    trainer.saver.writer.root, trainer.saver.saved = single / "again", set()
    trainer.save()
    (only,) = (tmp_path / "0/checkpoints/step-2").glob("*.safetensors")  # no copies of slices
    first = load_file(only)
    for folder in ("1/again", "2/again", "single/again"):
        again = load_file(tmp_path / folder / "step-2/shard-0.safetensors")
        assert first.keys() == again.keys()
        assert all(torch.equal(first[name], again[name]) for name in first), folder
    assert any(tensor.abs().max() > 0 for name, tensor in first.items() if name.endswith("exp_avg"))


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 3])
def test_weights_of_another_run_are_a_start(data: Path, tmp_path: Path, zero: int) -> None:
    """Read whole, and each replica keeps its slice."""
    changes = {"training__steps": 2, "training__eval_samples": 0, "training__dtype": "fp64"}
    first = tiny_job(data, **changes)
    list(make_trainer(first, tmp_path / "first").run())
    (tmp_path / "first/job.json").write_text(first.model_dump_json())
    origin = {"training__init_from": str(tmp_path / "first"), **changes}
    sliced = train(tiny_job(data, dp=2, parallel__zero=zero, **origin, **SMALL), tmp_path / "two")
    whole = [{"records": list(make_trainer(tiny_job(data, **origin), tmp_path / "one").run())}]
    assert column(sliced) == pytest.approx(column(whole), rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("zero", ["0", "2", "3"])
def test_a_lost_replica_leaves_nobody_waiting(data: Path, tmp_path: Path, zero: str) -> None:
    sets = ("cluster.gpus_per_node=2", "launch.timeout_seconds=4", "parallel.bucket_bytes=40000")
    more = [part for one in sets for part in ("--set", one)]
    try:
        run = endless(data, tmp_path / "run", "--dp", "2", "--zero", zero, *more)
        run.at_step(3).worker(1).kill()
        run.ended(30)
        assert run.process.returncode == 1 and run.summary["failure"]["rank"] == 1
        assert not run.left_behind(3)
    finally:
        end_all()
