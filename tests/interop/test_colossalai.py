"""Colossal-AI: the plugin's arguments, and the groups of its legacy grids by its own formulas."""

from __future__ import annotations

import pytest

from mpctl.core.errors import InputError
from mpctl.interop.emitted import emit_plan
from tests.interop.jobs import EXAMPLE, MIXTURE, Settings, plan_of
from tests.interop.snippets import assigned_in, calls_in, fields_of
from tests.interop.test_megatron import refusals

LAYOUTS: dict[str, Settings] = {
    "replicas": {},
    "ring": {"parallel.tp": 2, "parallel.cp": 2, "parallel.zero": 2},
    "split": {"parallel.tp": 4, "parallel.sequence_parallel": True, "training.dtype": "bf16"},
    "pipeline": {
        "parallel.tp": 2,
        "parallel.pp": 4,
        "parallel.zero": 1,
        "parallel.first_stage_layers": 2,
        "parallel.last_stage_layers": 4,
    },
    "chunks": {"parallel.pp": 4, "parallel.vpp": 3, "training.dtype": "fp16"},
    "dp outside": {"parallel.tp": 2, "parallel.pp": 4, "parallel.order": "tp-cp-pp-dp"},
}
GRIDS: dict[str, Settings] = {
    "2d": {"parallel.tp": 4, "parallel.tensor_mode": "2d", "parallel.pp": 2},
    "2.5d": {"parallel.tp": 8, "parallel.tensor_mode": "2.5d", "parallel.tensor_depth": 2},
    "3d": {"parallel.tp": 8, "parallel.tensor_mode": "3d"},
}
GRID: Settings = {"training.micro_batch_size": 4, "parallel.order": "tp-cp-pp-dp"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_plugin_has_these_arguments(name: str) -> None:
    plan = plan_of(LAYOUTS[name])
    job = plan.job
    given = calls_in(emit_plan(plan, "colossalai").text)["HybridParallelPlugin"]
    assert set(given) <= fields_of("colossalai", "HybridParallelPlugin")
    size = given["tp_size"] * given["pp_size"] * given.get("sp_size", 1)
    assert job.world_size // size == job.sizes["dp"]
    assert given["dp_outside"] == (name == "dp outside")
    mode = {"ring": "ring_attn", "split": "split_gather"}.get(name)
    assert given.get("sequence_parallelism_mode") == mode
    if name == "pipeline":
        assert given["num_layers_per_stage"] == [2, 3, 3, 4]
    if name == "chunks":
        assert (given["pp_style"], given["num_model_chunks"]) == ("interleaved", 3)


EXPERTS: dict[str, Settings] = {
    "zero": {"parallel.ep": 4, "parallel.zero": 1, "training.dtype": "bf16"},
    "pipeline": {"parallel.ep": 2, "parallel.pp": 4, "training.dtype": "bf16"},
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_have_a_plugin_with_the_plan_s_groups(name: str) -> None:
    """moe_hybrid_parallel_plugin.py: a mesh of pp, moe_dp, ep and tp, the last one fastest."""
    plan = plan_of({**MIXTURE, **EXPERTS[name]})
    job, ours = plan.job, plan.require_legal()
    given = calls_in(emit_plan(plan, "colossalai").text)["MoeHybridParallelPlugin"]
    assert set(given) <= fields_of("colossalai", "MoeHybridParallelPlugin")
    assert (given["moe_dp_outside"], given["overlap_communication"]) == (False, False)
    pp, ep = given["pp_size"], given["ep_size"]
    edp = job.world_size // (pp * ep * given["tp_size"])
    starts = [(stage * edp + n) * ep for stage in range(pp) for n in range(edp)]
    theirs = [list(range(start, start + ep)) for start in starts]
    assert [list(group) for group in ours.groups("ep")] == theirs
    apart = [[(stage * edp + n) * ep + at for n in range(edp)] for stage in range(pp) for at in range(ep)]
    assert [list(group) for group in ours.groups("edp")] == apart


def test_the_example() -> None:
    settings = {"parallel.sequence_parallel": False, "training.recompute": "none"}
    given = calls_in(emit_plan(plan_of(settings, base=EXAMPLE), "colossalai").text)
    wanted = {
        "tp_size": 4,
        "pp_size": 4,
        "sp_size": 2,
        "num_model_chunks": 5,
        "zero_stage": 1,
        "precision": "bf16",
        "dp_outside": False,
        "microbatch_size": 1,
    }
    assert wanted.items() <= given["HybridParallelPlugin"].items()


@pytest.mark.parametrize("name", GRIDS)
def test_a_grid_is_the_legacy_config(name: str) -> None:
    plan = plan_of({**GRIDS[name], **GRID})
    emitted = emit_plan(plan, "colossalai")
    tensor = calls_in(emitted.text)["dict"]
    assert f'tensor=dict(size={plan.job.parallel.tp}, mode="{name}"' in emitted.body
    assert ("depth=2" in emitted.body) == (name == "2.5d")
    assert any("colossalai.legacy" in note for note in emitted.notes)
    assert tensor
    if plan.job.parallel.pp > 1:
        assert assigned_in(emitted.text)["NUM_MICRO_BATCHES"] == plan.job.num_microbatches


@pytest.mark.parametrize("name", GRIDS)
def test_the_legacy_config_has_the_plan_s_groups(name: str) -> None:
    """legacy/context/process_group_initializer of colossalai 0.5.0: data i + j n; pipeline a range
    with the step of a stage; of a grid of side q the fastest axis is i of i + q (j + q k)."""
    plan = plan_of({**GRIDS[name], **GRID})
    job, ours = plan.job, plan.require_legal()
    world, dp, pp, tp = job.world_size, job.sizes["dp"], job.sizes["pp"], job.sizes["tp"]
    apart, stage = world // dp, world // dp // pp
    data = [[i + j * apart for j in range(dp)] for i in range(apart)]
    assert [list(group) for group in ours.groups("dp")] == data
    pipes = [list(range(i * apart + j, (i + 1) * apart, stage)) for i in range(dp) for j in range(stage)]
    assert sorted(map(list, ours.groups("pp"))) == sorted(pipes)
    fastest = {"2d": "col", "2.5d": "col", "3d": "weight"}[name]
    side, depth = 2, tp // 4
    rows = [
        [h * tp + i + side * (j + side * k) for i in range(side)]
        for h in range(world // tp)
        for k in range(depth)
        for j in range(side)
    ]
    assert sorted(map(list, ours.groups(fastest))) == sorted(rows)


@pytest.mark.parametrize(
    ("settings", "rules"),
    [
        ({"parallel.zero": 3}, {"emit-zero"}),
        ({"parallel.zero": 1, "parallel.zero_size": 8}, {"emit-zero-size"}),
        ({"parallel.pp": 2, "parallel.zero": 2}, {"emit-zero"}),
        ({"parallel.tp": 2, "parallel.cp": 2, "parallel.sequence_parallel": True}, {"emit-sequence-parallel"}),
        ({"training.recompute": "selective"}, {"emit-recompute"}),
        (
            {**GRIDS["3d"], "training.micro_batch_size": 4, "training.dtype": "bf16", "parallel.zero": 1},
            {"emit-dtype", "emit-zero"},
        ),
        ({**GRIDS["2d"], "training.micro_batch_size": 2}, {"emit-order"}),
        (
            {
                **MIXTURE,
                "parallel.ep": 8,
                "parallel.tp": 2,
                "parallel.sequence_parallel": True,
                "parallel.cp": 2,
                "parallel.zero": 1,
                "training.dtype": "fp32",
            },
            {"emit-tp", "emit-cp", "emit-ep", "emit-dtype", "emit-sequence-parallel"},
        ),
        (
            {**MIXTURE, "parallel.ep": 4, "model.router_score": "sigmoid", "model.router_bias": True},
            {"emit-zero", "emit-router-bias"},
        ),
    ],
)
def test_what_it_cannot_say(settings: Settings, rules: set[str]) -> None:
    assert set(refusals(settings, "colossalai")) == rules


def test_a_grid_with_context_parallelism_is_no_plan() -> None:
    with pytest.raises(InputError):
        plan_of({**GRIDS["2d"], **GRID, "parallel.cp": 2})
