"""Pipelines: stages, chunks and schedules change who computes what and when, never what is
computed; each rank sends what its stage's plan says.

float64, so that equal means 1e-10. Four layers, dropout on, 4 micro batches a step where not said.
"""

from __future__ import annotations

import itertools
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from mpctl.model.pipeline.schedule.orders import Action, peak_in_flight
from mpctl.records.checkpoint.manifest import read_manifest
from mpctl.records.checkpoint.verify import find_damage
from mpctl.run.launch.summary import planned_traffic
from mpctl.spec.load import parse
from mpctl.train.families.implementation import Batch, State
from mpctl.train.kernels.counter_rng import CounterRNG
from mpctl.train.runtime.pipeline import _ProgramRun
from tests.ranks import run_ranks
from tests.run.launch.command import end_all, launch
from tests.train.checkpoint.shards import shard_record
from tests.train.runtime.test_axes import SHAPES, same_copies, same_gradients
from tests.train.runtime.tiny import _train_rank, column, make_trainer, tiny_job, tiny_plan, train

STEPS = 3
SEQUENCE = {"parallel__sequence_parallel": True}
FULL = {"training__recompute": "full"}
THREE = {"training__global_batch_size": 6}  # micro batches
AHEAD = {"model__mtp_layers": 1, "model__position": "rotary"}
COST = {"parallel__stage_balance": "cost"}
T5 = {**SHAPES["t5"], "model__layers": 2, "model__decoder_layers": 2}
# 3 layers each: 2 stages end with the encoder, 3 have the second on both sides
T5_THREES = {**T5, "model__layers": 3, "model__decoder_layers": 3}
MODELS: dict[str, dict[str, Any]] = {
    **{name: {**shape, "model__layers": 4} for name, shape in SHAPES.items() if name != "t5"},
    "t5": T5,
    "t5-threes": T5_THREES,
    "t5-untied": {**T5, "model__tied_embeddings": False},
}


def layout(pp: int, vpp: int = 1, schedule: str = "1f1b", **axes: int) -> dict[str, Any]:
    """axes: tp, cp, dp."""
    sizes = {"tp": 1, "cp": 1, "dp": 1, **axes}
    world = pp * sizes["tp"] * sizes["cp"] * sizes["dp"]
    return {
        "parallel__pp": pp,
        "parallel__vpp": vpp,
        "parallel__schedule": schedule,
        **{f"parallel__{axis}": size for axis, size in sizes.items() if axis in ("cp",)},
        "tp": sizes["tp"],
        "dp": sizes["dp"],
        "cluster__gpus_per_node": world,
    }


ZERO = "zero-bubble"
V = {name: layout(2, 2, name) for name in ("zbv", "v-half", "v-min", "dualpipev")}
FIRST_OF_FOUR = {"training__freeze": ["embedding.*", "layers.[012].*"]}  # all of stage 0
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("gpt", layout(2, tp=2), {**SEQUENCE, **FULL}),
    ("llama", layout(2), FIRST_OF_FOUR),
    ("bert", layout(2, schedule=ZERO), THREE),
    ("gpt", layout(2, 2, "interleaved", dp=2), {"training__micro_batch_size": 1, "parallel__zero": 3}),
    ("gpt", V["zbv"], THREE),
    ("llama", V["dualpipev"], FULL),
]
SLOW_CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", V["zbv"], {**FULL, **THREE}),
    ("gpt", V["v-half"], {}),
    ("gpt", V["v-min"], THREE),
    ("gpt", V["dualpipev"], {"model__tied_embeddings": False}),
    ("gpt", layout(3, 2, "v-half"), {"model__layers": 6, "training__global_batch_size": 14}),
    ("gpt", layout(3, 2, "v-min", dp=2), {"model__layers": 6, "parallel__zero": 2, "training__micro_batch_size": 1}),
    ("gpt", layout(2, 2, "dualpipev", dp=2), {"training__micro_batch_size": 1, "parallel__zero": 1}),
    ("gpt", layout(2, 2, "dualpipev", dp=2), {"training__micro_batch_size": 1, "parallel__zero": 2}),
    ("gpt", layout(2, 2, "dualpipev", dp=2), {"training__micro_batch_size": 1, "parallel__zero": 3}),
    ("gpt", layout(2, 2, "zbv", dp=2), {"training__micro_batch_size": 1, "parallel__zero": 3}),
    ("llama", V["zbv"], {**AHEAD, "model__mtp_layers": 2}),
    ("gpt", layout(2, 2, "dualpipev", dp=2), {**AHEAD, "training__micro_batch_size": 1, "parallel__zero": 3}),
    ("gpt", layout(2, 2, "v-half", tp=2), {**AHEAD, **SEQUENCE, **FULL, **THREE, **COST, "model__layers": 6}),
    ("llama", layout(2, 2, "zbv", tp=2), {**SEQUENCE, **FULL}),
    ("gpt", layout(2, 2, "v-half", cp=2), {}),
    ("gpt", layout(2, 2, "zbv", dp=2), {"training__freeze": ["*.mlp.*", "layers.0.*"]}),
    ("llama", layout(2, 2, "zbv"), {**COST, "model__layers": 7}),
    ("bert", layout(2, 2, "zbv"), {}),
    ("t5", layout(2, 2, "dualpipev"), {}),
    ("glm", layout(2, 2), {**COST, "model__layers": 7}),  # 4 and 3 with the head
    ("t5-threes", layout(3, schedule="gpipe"), THREE),
    ("gpt", layout(2), {}),
    ("gpt", layout(4), THREE),
    ("gpt", layout(2, 2, "interleaved"), {}),
    ("llama", layout(2, schedule=ZERO), THREE),
    ("gpt", layout(2, 2, "interleaved"), {"launch__shared_memory": False}),
    ("gpt", layout(2, 2, "interleaved", tp=2), SEQUENCE),
    ("gpt", layout(2, schedule="gpipe", dp=2), FULL),
    ("gpt", layout(2, cp=2), {"parallel__order": "pp-cp-dp-tp"}),
    ("gpt", layout(4), {"training__freeze": ["embedding.*", "layers.[01].*"]}),
    ("gpt", layout(2, 2), {"training__freeze": ["*.weight"]}),
    ("gpt", layout(4), {"parallel__first_stage_layers": 1, "parallel__last_stage_layers": 1}),
    ("gpt", layout(2, 2), {"model__layers": 2, "parallel__embedding_is_layer": True, "parallel__loss_is_layer": True}),
    ("gpt", layout(3, schedule=ZERO, tp=2), {**COST, **SEQUENCE, "model__layers": 5}),
    ("llama", layout(4), {**COST, **FULL, "model__layers": 6}),
    ("llama", layout(2, 2), {**COST, **FIRST_OF_FOUR, "model__layers": 9}),
    ("bert", layout(2, 2, cp=2), {**COST, "model__layers": 5}),
    ("glm", layout(4, dp=2), {**COST, "model__layers": 7}),
    ("t5-threes", layout(2, 2, tp=2), {**COST, **SEQUENCE}),
    ("t5-threes", layout(4), {**COST, "model__decoder_layers": 4}),
    ("gpt", layout(2, dp=3), {"training__global_batch_size": 12, "launch__shared_memory": False}),
    ("gpt", layout(2, schedule=ZERO, tp=2), SEQUENCE),
    ("gpt", layout(4, schedule=ZERO, tp=2), FULL),
    ("gpt", layout(2, schedule=ZERO, dp=2), {"training__freeze": ["*.mlp.*", "layers.0.*"]}),
    ("llama", layout(4, schedule="gpipe"), THREE),
    ("llama", layout(2, cp=2), FIRST_OF_FOUR),
    ("llama", layout(2, tp=2, dp=2), {**SEQUENCE, "training__global_batch_size": 12}),
    ("llama", layout(4, tp=2), {**FULL, "training__partition_activations": True}),
    ("llama", layout(2, schedule=ZERO, tp=2), {**FULL, **SEQUENCE}),
    ("bert", layout(2, tp=2), {**SEQUENCE, **THREE}),
    ("bert", layout(4, cp=2), {"training__freeze": ["[!pn]*"]}),
    ("bert", layout(2, schedule=ZERO, cp=2), {}),
    ("bert-pre", layout(2, 2, cp=2), FULL),
    ("glm", layout(2, tp=2), {**SEQUENCE, **FULL}),
    ("glm", layout(2, 2), {}),
    ("glm", layout(4, cp=2), {}),
    ("glm", layout(4, schedule=ZERO), THREE),
    ("t5", layout(4), {}),
    ("t5", layout(2, 2, tp=2), {}),
    ("t5", layout(2), {"training__freeze": ["embedding.*", "encoder.*"]}),
    ("t5", layout(4), {"training__freeze": ["embedding.*", "decoder.*"]}),
    ("t5", layout(2, schedule=ZERO, tp=2), {}),
    ("t5-untied", layout(2, 2, dp=2, tp=2), SEQUENCE),
    ("t5-untied", layout(4, schedule=ZERO), {"training__recompute": "selective"}),
    ("t5-threes", layout(2, cp=2), {}),
    ("t5-threes", layout(3, 2), {**THREE, "launch__shared_memory": False}),
]


def ident(value: Any) -> str:
    """What is unusual, in short."""
    if isinstance(value, str):
        return value
    usual = (1, "1f1b")
    return (
        "-".join(
            f"{k.split('__')[-1]}={v}" for k, v in value.items() if v not in usual and k != "cluster__gpus_per_node"
        )
        or "-"
    )


def pipeline_job(data: Path, model: str, how: dict[str, Any], changes: dict[str, Any]):
    usual = {
        "training__dtype": "fp64",
        "training__steps": STEPS,
        "checkpoint__interval": 0,
        "checkpoint__at_end": False,
    }
    return tiny_job(data, **{**usual, **MODELS[model], **how, **changes})


@pytest.fixture(scope="module")
def one_process(data, tmp_path_factory):
    """Trainings of one process, by what changes the curve."""
    done: dict[str, list[dict[str, Any]]] = {}

    def trained(model: str, changes: dict[str, Any]) -> list[dict[str, Any]]:
        kept = {k: v for k, v in changes.items() if k.startswith("model") or k in CURVE}
        key = f"{model} {sorted(kept.items())}"
        if key not in done:
            job = pipeline_job(data, model, {}, kept)
            folder = tmp_path_factory.mktemp("one")
            done[key] = [_train_rank(0, 1, job.model_dump(mode="json"), str(folder))]
        return done[key]

    return trained


CURVE = ("training__freeze", "training__global_batch_size")


@pytest.mark.parametrize(
    ("model", "how", "changes"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)],
    ids=ident,
)
@pytest.mark.quick(3)
def test_the_loss_does_not_tell_and_the_plan_is_what_runs(
    data, one_process, tmp_path, model: str, how: dict[str, Any], changes: dict[str, Any]
) -> None:
    job = pipeline_job(data, model, how, changes)
    ranks, alone = train(job, tmp_path), one_process(model, changes)
    for name in ("loss", "grad_norm"):
        assert column(ranks, name) == pytest.approx(column(alone, name), rel=1e-10)
    last = [r[0]["records"][-1]["validation_loss"] for r in (ranks, alone)]
    assert last[0] == pytest.approx(last[1], rel=1e-10)
    same_gradients(whole_pipelines(ranks), alone, vocab=job.model.vocab)
    same_copies(ranks)
    estimate = tiny_plan(job).estimate
    for rank in ranks:
        stage = rank["coords"]["pp"]
        assert rank["count"] == estimate.memory[stage].parameters
        assert rank["traffic"] == planned_traffic(estimate.messages[stage])


def whole_pipelines(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The ranks of the last stages, with what those of the stages before hold besides."""
    found: dict[str, dict[str, Any]] = {}
    for rank in ranks:
        coords = {axis: index for axis, index in rank["coords"].items() if axis != "pp"}
        whole = found.setdefault(str(coords), {"coords": coords, "weights": {}, "gradients": {}})
        for what in ("weights", "gradients"):
            whole[what] |= rank[what]
    return list(found.values())


@pytest.mark.parametrize(
    ("dtype", "how"),
    [("fp32", layout(2)), pytest.param("bf16", layout(2, schedule=ZERO), marks=pytest.mark.slow)],
    ids=ident,
)
def test_shorter_floats_follow_too(data, tmp_path, dtype: str, how: dict[str, Any]) -> None:
    """16 bits round what is handed over just as they round what stays."""
    job = tiny_job(data, **{"training__dtype": dtype, "training__steps": STEPS, **how})
    one = {"training__dtype": dtype, "training__steps": STEPS}
    alone = [_train_rank(0, 1, tiny_job(data, **one).model_dump(mode="json"), str(tmp_path / "one"))]
    assert column(train(job, tmp_path / "two")) == pytest.approx(column(alone), rel=1e-5 if dtype == "fp32" else 2e-3)


# ---------------------------------------------------------------- what is held


SCHEDULES = {"gpipe": (1, 6), "1f1b": (1, 6), "interleaved": (2, 8), ZERO: (1, 6)}  # vpp, samples


def test_a_stage_holds_as_many_micro_batches_as_its_schedule_says(data, tmp_path) -> None:
    jobs = [
        pipeline_job(
            data,
            "gpt",
            layout(2, vpp, schedule),
            {"training__global_batch_size": size, "training__steps": 1, "training__eval_samples": 0},
        )
        for schedule, (vpp, size) in SCHEDULES.items()
    ]
    held = run_ranks(_most_held, 2, [job.model_dump(mode="json") for job in jobs], str(tmp_path))
    for stage in range(2):
        assert held[stage] == [
            peak_in_flight(schedule, stage=stage, stages=2, microbatches=size // 2, chunks=vpp)
            for schedule, (vpp, size) in SCHEDULES.items()
        ]


def _most_held(rank: int, size: int, jobs: list[dict[str, Any]], run_dir: str) -> list[int]:
    """Of each job, the most whose gradients are not all there."""
    compute, found = _ProgramRun._compute, []

    def watched(run: _ProgramRun, action: Action) -> None:
        compute(run, action)
        held.append(len(run.graphs) + sum(map(bool, run.deferred.values())))

    _ProgramRun._compute = watched  # type: ignore[method-assign]
    for number, raw in enumerate(jobs):
        held: list[int] = []
        list(make_trainer(parse(raw), Path(run_dir) / str(number), rank).run())
        assert held[-1] == 0
        found.append(max(held))
    return found


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    ("model", "saved", "resumed"),
    [
        ("gpt", layout(2), layout(1)),
        ("gpt", layout(1), layout(2, 2)),
        pytest.param("t5-threes", {**layout(4), **COST}, layout(3), marks=pytest.mark.slow),
        pytest.param("bert", layout(2), {**layout(3), **COST}, marks=pytest.mark.slow),
        pytest.param("t5", layout(2, 2, tp=2), layout(4), marks=pytest.mark.slow),
        pytest.param("t5-threes", layout(3), layout(2, tp=2), marks=pytest.mark.slow),
        pytest.param("bert", layout(4), layout(2, dp=2), marks=pytest.mark.slow),
        pytest.param("gpt", layout(2, tp=2), layout(2, tp=2), marks=pytest.mark.slow),
    ],
    ids=ident,
)
@pytest.mark.parametrize("freeze", [[], pytest.param(["embedding.*"], marks=pytest.mark.slow)])
@pytest.mark.quick(1)
def test_a_checkpoint_of_any_cut_goes_on_under_any_other(
    data, one_process, tmp_path, model: str, saved, resumed, freeze: list[str]
) -> None:
    """Moments included, or the losses after the first would tell."""
    changes = {"training__freeze": freeze}
    save = {**changes, "checkpoint__interval": 1, "checkpoint__at_end": True}
    train(pipeline_job(data, model, saved, save), tmp_path / "saved")
    _each_is_saved_once(tmp_path / "saved/checkpoints/step-1")
    shutil.copytree(tmp_path / "saved/checkpoints/step-1", tmp_path / "run/checkpoints/step-1")
    ranks = train(pipeline_job(data, model, resumed, changes), tmp_path / "run")
    alone = one_process(model, changes)
    assert column(ranks, "step") == [2, 3]
    assert column(ranks) == pytest.approx(column(alone)[1:], rel=1e-10)
    same_gradients(whole_pipelines(ranks), alone, vocab=310 if model[0] != "g" else 300)
    same_copies(ranks)


def _each_is_saved_once(step: Path) -> None:
    assert find_damage(step) == []
    seen: set[str] = set()
    for index in range(len(read_manifest(step).shards)):
        places = shard_record(step, index).parameters.items()
        own = {f"{name} {place.shard.cuts}" for name, place in places if place.shard.cuts}
        assert own and not own & seen
        seen |= own


# ---------------------------------------------------------------- failures


def test_a_stage_that_fails_says_where(data, tmp_path) -> None:
    job = pipeline_job(data, "gpt", layout(2), {})
    doing = "step 2, stage 1, forward of micro batch 1: layers on fire"
    with pytest.raises(AssertionError, match=f"rank 1 of 2[^$]*{doing}"):
        run_ranks(_failing, 2, job.model_dump(mode="json"), str(tmp_path))


def _failing(rank: int, size: int, raw: dict[str, Any], run_dir: str) -> None:
    """Stage 1 fails in the second forward of step 2."""
    trainer, calls = make_trainer(parse(raw), Path(run_dir), rank), itertools.count(1)
    (chunk,) = trainer.pipeline.chunks
    stage_forward = chunk.stage_forward

    def burning(state: State, batch: Batch, rng: CounterRNG | None) -> State:
        if rank == 1 and rng is not None and next(calls) == 6:
            raise RuntimeError("layers on fire")
        return stage_forward(state, batch, rng)

    chunk.stage_forward = burning  # type: ignore[method-assign]
    try:
        list(trainer.run())
    except RuntimeError as error:
        time.sleep(10 * (rank == 0))  # the first to end is the one that is blamed
        raise RuntimeError(f"{trainer.doing}: {error}") from error


# ---------------------------------------------------------------- as people type it


@pytest.mark.slow
def test_launch_runs_a_pipeline_as_it_was_planned(data, tmp_path) -> None:
    sets = ("training.dtype=fp64", "training.steps=4", "checkpoint.interval=2")
    more = [part for one in sets for part in ("--set", one)]
    two = ["--pp", "2", "--tp", "2", "--set", "cluster.gpus_per_node=4"]
    one = ["--set", "cluster.gpus_per_node=1"]
    try:
        losses = {}
        for name, flags in (("one", one), ("two", two)):
            ended = launch(data, tmp_path / name, *more, *flags).ended()
            assert ended.process.returncode == 0, ended.stderr
            assert all(rank["agrees"] for rank in ended.summary["plan_beside_run"])
            losses[name] = ended.losses
        assert losses["two"] == pytest.approx(losses["one"], rel=1e-10)
    finally:
        end_all()
