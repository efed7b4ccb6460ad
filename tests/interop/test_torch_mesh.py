"""The device mesh of the snippet, made by torch on the fake backend, against the plan's
topology."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from mpctl.core.errors import InputError
from mpctl.interop.emitted import emit_plan
from mpctl.interop.megatron_flags import NARROW_FLAGS
from tests.interop.jobs import EXAMPLE, GRID, LAYOUTS, MIXTURE, Settings, plan_of

ORDERS: dict[str, Settings] = {
    "default": {"parallel.tp": 2, "parallel.cp": 2, "parallel.pp": 2},
    "pp before dp": {"parallel.tp": 2, "parallel.pp": 2, "parallel.order": "tp-cp-pp-dp"},
    "dp first": {
        "parallel.tp": 2,
        "parallel.cp": 2,
        "parallel.pp": 2,
        "parallel.order": "dp-tp-pp-cp",
        "parallel.allow_tp_across_nodes": True,
    },
    "short": {"parallel.tp": 4, "parallel.order": "tp-dp"},
}


def assigned(text: str) -> dict[str, Any]:
    """The literals that the snippet assigns, and the arguments of the mesh."""
    values: dict[str, Any] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if isinstance(node.value, ast.Constant):
                values[node.targets[0].id] = ast.literal_eval(node.value)
            elif isinstance(node.value, ast.List):
                values[node.targets[0].id] = [ranges(row) for row in node.value.elts]
            elif isinstance(node.value, ast.Call) and node.targets[0].id == "mesh":
                values["shape"] = ast.literal_eval(node.value.args[1])
                values["names"] = ast.literal_eval(node.value.keywords[0].value)
            elif isinstance(node.value, ast.Call) and node.targets[0].id == "dp_cp":
                part = node.value.func.value.slice  # type: ignore[attr-defined]
                values["dp_cp"] = ast.literal_eval(part)
    return values


def ranges(row: ast.expr) -> list[range]:
    """A list of calls of range, as torch_mesh writes the layers of a stage."""
    assert isinstance(row, ast.List)
    return [range(*map(ast.literal_eval, call.args)) for call in row.elts]  # type: ignore[attr-defined]


def fake_ranks(world: int) -> Iterator[int]:
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            yield rank
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize("name", ORDERS)
def test_torch_builds_the_groups_of_the_plan(name: str) -> None:
    plan = plan_of(ORDERS[name])
    topology = plan.require_legal()
    values = assigned(emit_plan(plan, "torch").text)
    for rank in fake_ranks(topology.world_size):
        mesh = init_device_mesh("cpu", values["shape"], mesh_dim_names=values["names"])
        for axis in values["names"]:
            members = dist.get_process_group_ranks(mesh.get_group(axis))
            assert members == list(topology.group(rank, axis))
        both = mesh[values["dp_cp"]]._flatten("dp_cp").get_group()
        assert dist.get_process_group_ranks(both) == list(topology.group(rank, "dp", "cp"))


@pytest.mark.parametrize("name", ["experts", "experts of parts", "experts of another order", "latents and experts"])
def test_torch_builds_the_groups_of_experts(name: str) -> None:
    plan = plan_of(LAYOUTS[name])
    topology, text = plan.require_legal(), emit_plan(plan, "torch").text
    call = calls_of(text, "experts")
    for rank in fake_ranks(topology.world_size):
        mesh = init_device_mesh("cpu", call["shape"], mesh_dim_names=call["names"])
        for axis in call["names"]:
            members = dist.get_process_group_ranks(mesh.get_group(axis))
            assert members == list(topology.group(rank, axis))
        both = mesh[calls_of(text, "etp_ep")["axes"]]._flatten("etp_ep").get_group()
        assert dist.get_process_group_ranks(both) == list(topology.group(rank, "etp", "ep"))


@pytest.mark.parametrize("name", ["hybrid", "hybrid 3", "hybrid experts"])
def test_torch_builds_the_groups_that_share_states(name: str) -> None:
    of_experts = {**MIXTURE, "parallel.ep": 2, "parallel.zero": 3, "parallel.zero_size": 8}
    plan = plan_of(LAYOUTS.get(name, of_experts))
    topology, text = plan.require_legal(), emit_plan(plan, "torch").text.replace("cuda", "cpu")
    for rank in fake_ranks(topology.world_size):
        made: dict[str, Any] = {}
        exec(text, made)
        groups = [made["hybrid"].get_group(0), made["zero"].get_group()]
        found = [dist.get_process_group_ranks(group) for group in groups]
        assert found == [list(topology.group(rank, n)) for n in ("zero_replicas", "zero")]
        if name == "hybrid experts":
            shared = dist.get_process_group_ranks(made["experts"].get_group("edp_shard"))
            assert shared == list(topology.group(rank, "edp_zero"))


def calls_of(text: str, name: str) -> dict[str, Any]:
    """The shape and the names of a mesh by its variable, or the axes of one that is flattened."""
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.Assign)]
    (call,) = [node.value for node in nodes if ast.unparse(node.targets[0]) == name]
    assert isinstance(call, ast.Call)
    if not call.keywords:
        return {"axes": ast.literal_eval(call.func.value.slice)}  # type: ignore[attr-defined]
    return {"shape": ast.literal_eval(call.args[1]), "names": ast.literal_eval(call.keywords[0].value)}


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in NARROW_FLAGS])
def test_the_snippet_says_batch_and_stages(name: str) -> None:
    plan = plan_of(LAYOUTS[name])
    job = plan.job
    values = assigned(emit_plan(plan, "torch").text)
    assert values["micro_batch_size"] * values["num_microbatches"] * job.sizes["dp"] == (values["global_batch_size"])
    if job.parallel.pp > 1:
        from torch.distributed.pipelining import schedules  # imports the compiler

        schedule = schedules.get_schedule_class(values["schedule"])
        is_single = issubclass(schedule, schedules.PipelineScheduleSingle)
        assert is_single == (job.parallel.vpp == 1)
        stages = [[range(*span) for span in chunks] for chunks in plan.stages or ()]
        assert values["layers_of_stage"] == stages


def test_the_example_has_the_groups_of_rank_0() -> None:
    values = assigned(emit_plan(plan_of({}, base=EXAMPLE), "torch").text)
    assert (values["shape"], values["names"]) == ((4, 2, 2, 4), ("pp", "dp", "cp", "tp"))
    assert values["schedule"] == "Interleaved1F1B"
    assert values["layers_of_stage"][0] == [range(n, n + 4) for n in (0, 16, 32, 48, 64)]


def test_a_grid_of_tensor_parallel_ranks_is_refused() -> None:
    with pytest.raises(InputError, match="2d, and torch has no such tensor mode"):
        emit_plan(plan_of(GRID), "torch")


@pytest.mark.parametrize(("kind", "name"), [("cuda", "cuda"), ("rocm", "cuda"), ("xpu", "xpu"), ("tpu", "xla")])
def test_any_kind_of_accelerator_is_planned_and_named_as_torch_does(kind: str, name: str) -> None:
    workspace = {"cluster.device.blas_workspace": 2**20}  # the one figure that is a kind's own
    settings = {**EXAMPLE, "cluster.device": "a100-80gb", **workspace}
    known = plan_of(settings, base={}).estimate
    plan = plan_of({**settings, "cluster.device.kind": kind}, base={})
    assert plan.estimate is not None and known is not None
    assert plan.estimate.step_seconds == known.step_seconds
    assert plan.estimate.memory == known.memory
    assert f'init_device_mesh("{name}",' in emit_plan(plan, "torch").text
