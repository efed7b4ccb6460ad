"""Rank groups against the output of others: texts, fifteen layouts, Megatron-Core, DeviceMesh."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mpctl.core.axes import AXIS_NAMES, DEFAULT_ORDER, GROUP_KINDS
from mpctl.core.errors import InputError
from mpctl.core.tensor_grid import TensorGrid
from mpctl.core.topology import Topology
from mpctl.model.layout.topology import job_topology
from mpctl.plan.planning.document import group_summary, plan_document, rank_document
from mpctl.plan.planning.plan import make_plan
from mpctl.render.plan_layout import groups_parts, ranks_table
from mpctl.render.terminal import print_parts
from mpctl.spec.job import JobSpec, complete
from mpctl.spec.parallel import ParallelSpec
from tests.cli.calls import Mpctl, caller
from tests.jobs import job_of

RECORDED = json.loads((Path(__file__).parent / "recorded" / "rank_groups.json").read_text("utf-8"))

# Megatron-LM, parallel_state.py, docstring of initialize_model_parallel: 16 GPUs g0 .. g15, 2 nodes
# of 8, 2-way tensor, 4-way pipeline. The docstring lists tp, pp and dp; mp and embedding are what
# its code makes of them. (A widely copied text has g8 for g11 in the first mp group: a typo.)
TWO_NODES = {
    "tp": [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]],
    "cp": [[rank] for rank in range(16)],
    "dp": [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]],
    "pp": [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]],
    "dp_cp": [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]],
    "mp": [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]],
    "embedding": [[0, 12], [1, 13], [2, 14], [3, 15]],
    "position_embedding": [[0], [1], [2], [3]],
}
# tp, cp, dp, pp, order: layouts that differ in which axes are neighbours.
LAYOUTS = [
    (2, 1, 2, 4, "tp-cp-dp-pp"),
    (2, 2, 2, 2, "tp-cp-dp-pp"),
    (2, 1, 2, 4, "tp-cp-pp-dp"),
    (2, 1, 2, 3, "dp-tp-pp-cp"),
    (3, 2, 2, 1, "cp-pp-tp-dp"),
    (2, 2, 3, 2, "pp-dp-cp-tp"),
]


def lists(topology: Topology, *axes: str) -> list[list[int]]:
    return [list(group) for group in topology.groups(*axes)]


def test_two_nodes_of_eight_as_every_text_prints_them() -> None:
    topology = Topology.of({"tp": 2, "pp": 4, "dp": 2}, gpus_per_node=8)
    assert set(TWO_NODES) == set(GROUP_KINDS)
    for kind, groups in TWO_NODES.items():
        assert [list(group) for group in topology.kind_groups(kind)] == groups, kind
    assert [topology.node(rank) for rank in range(16)] == [0] * 8 + [1] * 8


@pytest.mark.parametrize(
    "case", RECORDED["cases"], ids=lambda c: f"{c['order']}-{c['tp']}.{c['cp']}.{c['dp']}.{c['pp']}"
)
def test_recorded_layouts(case: dict[str, Any]) -> None:
    topology = Topology.of({axis: case[axis] for axis in AXIS_NAMES}, order=case["order"])
    assert topology.world_size == case["world_size"]
    for kind, groups in case["groups"].items():
        found = topology.kind_groups(kind) if kind in GROUP_KINDS else topology.groups(*kind.split("-"))
        assert [list(group) for group in found] == groups, kind


def test_the_record_holds_several_orders_and_says_where_it_is_from() -> None:
    assert "Megatron-Core" in RECORDED["source"]
    assert len(RECORDED["cases"]) == 15
    assert len({case["order"] for case in RECORDED["cases"]}) >= 4


def test_a_split_pipeline_embeds_at_the_first_the_split_and_the_last_stage() -> None:
    """Megatron's encoder-decoder rule: embedding [first, split, last], position [first, split]."""
    topology = Topology.of({"tp": 2, "pp": 4}, split_stage=2)
    assert [list(g) for g in topology.kind_groups("embedding")] == [[0, 4, 6], [1, 5, 7]]
    assert [list(g) for g in topology.kind_groups("position_embedding")] == [[0, 4], [1, 5]]


@pytest.mark.parametrize(("tp", "cp", "dp", "pp", "order"), LAYOUTS)
def test_device_mesh_has_the_same_groups(tp: int, cp: int, dp: int, pp: int, order: str) -> None:
    """torch's mesh of shape (slowest, ..., fastest) on the fake backend, asked rank by rank."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    topology = Topology.of({"tp": tp, "cp": cp, "dp": dp, "pp": pp}, order=order)
    slowest_first = tuple(reversed(topology.order))
    shape = tuple(topology.sizes[axis] for axis in slowest_first)
    replica = tuple(axis for axis in slowest_first if axis in ("tp", "pp"))
    for rank in range(topology.world_size):
        dist.init_process_group("fake", rank=rank, world_size=topology.world_size, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=slowest_first)
            for axis in AXIS_NAMES:
                members = dist.get_process_group_ranks(mesh.get_group(axis))
                assert list(topology.group(rank, axis)) == members
            both = mesh[replica]._flatten("mp").get_group()
            assert list(topology.group(rank, "tp", "pp")) == dist.get_process_group_ranks(both)
            at = mesh.get_coordinate()
            assert topology.coords(rank) == dict(zip(slowest_first, at, strict=True))
        finally:
            dist.destroy_process_group()


def test_megatron_core_has_the_same_groups() -> None:
    state = pytest.importorskip("megatron.core.parallel_state", reason="megatron-core is not installed")
    for tp, cp, dp, pp, order in LAYOUTS:
        generator = state.RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
        topology = Topology.of({"tp": tp, "cp": cp, "dp": dp, "pp": pp}, order=order)
        for kind in (*AXIS_NAMES, "tp-pp", "tp-cp", "dp-cp", "tp-dp-cp"):
            assert lists(topology, *kind.split("-")) == generator.get_ranks(kind), (order, kind)


EXPERTS = json.loads((Path(__file__).parent / "recorded" / "expert_groups.json").read_text("utf-8"))
DENSE, EXPERT = ("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp")


def both_views(case: dict[str, Any]) -> tuple[Topology, Topology]:
    """Megatron's second order: the dense one without cp, with etp, ep and edp for tp and dp."""
    order = case["order"].split("-")
    dense = Topology.of(
        {axis: case[axis] for axis in DENSE},
        order="-".join(a for a in order if a != "ep"),
        gpus_per_node=case["world_size"] // 2,
    )
    names = {"tp": "etp", "dp": "edp"}
    experts = dense.view(
        {axis: case[axis] for axis in EXPERT}, order="-".join(names.get(axis, axis) for axis in order if axis != "cp")
    )
    return dense, experts


@pytest.mark.parametrize("case", EXPERTS["cases"], ids=lambda case: case["order"])
def test_experts_are_a_view_of_the_same_ranks(case: dict[str, Any]) -> None:
    dense, experts = both_views(case)
    for kind, groups in case["groups"].items():
        axes = kind.split("-")
        of_experts = bool({"etp", "ep", "edp"} & set(axes))
        assert lists(experts if of_experts else dense, *axes) == groups, kind


def listed_by_plan(call: Mpctl, case: dict[str, Any]) -> dict[str, Any]:
    """The JSON of `mpctl plan` for a layout, its dp left open."""
    sizes = [word for axis in ("tp", "cp", "pp", "ep", "etp") for word in (f"--{axis}", case[axis])]
    said = call(
        "plan",
        "--nodes",
        2,
        "--gpus-per-node",
        case["world_size"] // 2,
        *sizes,
        "--order",
        case["order"],
        "--allow-tp-across-nodes",
        "--json",
    )
    assert said.code == 0, said.out
    document: dict[str, Any] = said.document
    return document


@pytest.mark.parametrize("case", EXPERTS["cases"], ids=lambda case: case["order"])
def test_the_command_lists_the_groups_of_both_views(case: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    found = listed_by_plan(caller(capsys), case)
    assert found["sizes"] == {axis: case[axis] for axis in DENSE}
    assert found["expert_sizes"] == {axis: case[axis] for axis in EXPERT}
    for kind, groups in case["groups"].items():
        name = kind.replace("-", "_")
        assert found["groups"].get(name, groups) == groups, kind
    assert {*DENSE, *EXPERT, "dp_cp", "mp", "etp_ep"} <= set(found["groups"])


def by_coordinates(case: dict[str, Any], order: list[str], kind: str) -> list[list[int]]:
    """Groups by the rank law read as a sentence: ranks with the same coordinates along every other
    axis, of which the first of the order varies fastest."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(case["world_size"]):
        rest, others = rank, []
        for axis in order:
            rest, at = divmod(rest, case[axis])
            others += [at] if axis not in kind.split("_") else []
        groups.setdefault(tuple(others), []).append(rank)
    return sorted(groups.values())


ORDERS = [
    # tp, cp, dp, pp, etp, ep, edp, order
    (2, 1, 8, 1, 1, 8, 2, "tp-ep-dp-pp"),
    (2, 1, 4, 2, 2, 2, 2, "tp-ep-dp-pp"),
    (2, 2, 2, 2, 2, 2, 2, "tp-cp-ep-pp-dp"),
    (4, 1, 2, 2, 4, 2, 1, "tp-cp-pp-ep-dp"),
    (1, 1, 8, 2, 1, 4, 2, "ep-dp-pp"),
    (2, 2, 4, 1, 1, 2, 8, "dp-ep-cp-tp"),
    (1, 2, 2, 4, 1, 4, 1, "cp-dp-pp"),
    (2, 2, 2, 2, 4, 1, 2, "pp-tp-cp-dp"),
]


@pytest.mark.parametrize("row", ORDERS, ids=lambda row: row[-1])
def test_ep_may_stand_anywhere_in_the_order(row: tuple[Any, ...], capsys: pytest.CaptureFixture[str]) -> None:
    case = dict(zip(("tp", "cp", "dp", "pp", "etp", "ep", "edp", "order"), row, strict=True))
    case["world_size"] = 16
    named = case["order"].split("-")
    dense = [*(a for a in named if a != "ep"), *(a for a in DENSE if a not in named)]
    names = {"tp": "etp", "dp": "edp"}
    whole = [*named, *(a for a in DENSE if a not in named)]
    if "ep" not in named:
        whole.insert(whole.index("cp"), "ep")
    experts = [names.get(axis, axis) for axis in whole if axis != "cp"]
    found = listed_by_plan(caller(capsys), case)
    assert found["expert_order"].split("-") == experts
    for kind in (*DENSE, "dp_cp"):
        assert found["groups"][kind] == by_coordinates(case, dense, kind), kind
    for kind in ("etp", "ep", "edp", "etp_ep"):
        assert found["groups"][kind] == by_coordinates(case, experts, kind), kind
    for rank in found["ranks"]:
        coords = rank["coords"]
        for axis in (*DENSE, "etp", "ep", "edp"):
            (group,) = [g for g in found["groups"][axis] if rank["rank"] in g]
            assert group.index(rank["rank"]) == coords[axis], axis


def test_a_view_holds_every_rank_once() -> None:
    dense = Topology.of({"tp": 2, "dp": 4})
    with pytest.raises(InputError, match="ep 3 x edp 2 is 6, and the world has 8 ranks"):
        dense.view({"ep": 3, "edp": 2}, order="ep-edp")
    with pytest.raises(InputError, match="unknown dp"):
        dense.view({"ep": 4, "edp": 2}, order="ep-dp")


@pytest.mark.parametrize("case", EXPERTS["cases"], ids=lambda case: case["order"])
def test_a_view_answers_for_its_groups_as_any_topology_does(case: dict[str, Any]) -> None:
    """Its axes, and the unions whose groups are those of the dense view: the embeddings', over pp,
    which both views number alike."""
    dense, experts = both_views(case)
    kinds = (*EXPERT, "embedding", "position_embedding")
    assert tuple(experts.kinds) == kinds
    for kind in kinds:
        listed = [list(group) for group in experts.kind_groups(kind)]
        assert listed == case["groups"].get(kind, listed)
        whole = dense if kind not in EXPERT else experts
        assert listed == [list(group) for group in whole.kind_groups(kind)]
        for rank in range(case["world_size"]):
            (holding,) = [g for g in listed if rank in g] or [None]
            found = experts.find_group(kind, rank)
            assert (found if found is None else list(found)) == holding
        summary = group_summary(experts, kind)
        assert (summary["count"], summary["size"]) == (len(listed), len(listed[0]))
        assert (summary["first"], summary["last"]) == (listed[0], listed[-1])


@pytest.mark.parametrize("case", EXPERTS["cases"], ids=lambda case: case["order"])
def test_a_view_is_listed_printed_and_drawn(case: dict[str, Any]) -> None:
    parallel = {axis: case[axis] for axis in DENSE}
    job = job_of({"parallel": parallel, "cluster.nodes": 2, "cluster.gpus_per_node": case["world_size"] // 2})
    plan, (_, experts) = make_plan(complete(job)), both_views(case)
    document = plan_document(plan, experts, kinds=None, ranks=True)
    for kind in EXPERT:
        assert document["groups"][kind] == case["groups"][kind]
        members = rank_document(plan, experts, 5)["groups"][kind]
        assert [members] == [group for group in case["groups"][kind] if 5 in group]
    assert document["ranks"][5]["coords"] == experts.coords(5)
    console = Console(width=200, record=True, file=StringIO())
    print_parts([*groups_parts(plan, experts, None, full=True), ranks_table(plan, experts)], console=console)
    (row,) = [line for line in console.export_text().splitlines() if line.startswith("ep ")]
    assert row.split()[1:3] == [str(case["world_size"] // case["ep"]), str(case["ep"])]


def test_a_view_without_a_pipeline_has_no_embedding_groups() -> None:
    view = Topology.of({"tp": 2, "dp": 4}).view({"ep": 4, "edp": 2}, order="ep-edp")
    assert tuple(view.kinds) == ("ep", "edp")
    assert [list(g) for g in view.kind_groups("ep")] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert list(view.find_group("edp", 5) or ()) == [1, 5]


def test_a_view_with_other_pipelines_leaves_out_their_unions() -> None:
    """Megatron refuses such an order; here the dense view alone has embedding groups."""
    dense = Topology.of({"tp": 2, "dp": 2, "pp": 2}, order="tp-pp-dp", split_stage=1)
    other = dense.view({"ep": 4, "pp": 2}, order="ep-pp")
    assert tuple(other.kinds) == ("ep", "pp")
    same = dense.view({"ep": 2, "pp": 2, "edp": 2}, order="ep-pp-edp")
    assert [list(g) for g in same.kind_groups("position_embedding")] == [[0, 2], [1, 3], [4, 6], [5, 7]]


# The grids of tp ranks by hand: a rank's coordinates count up, the first axis fastest.
GRIDS: dict[tuple[str, int], dict[str, list[list[int]]]] = {
    ("2d", 4): {"tp": [[0, 1, 2, 3]], "col": [[0, 1], [2, 3]], "row": [[0, 2], [1, 3]]},
    ("2d", 9): {
        "tp": [list(range(9))],
        "col": [[0, 1, 2], [3, 4, 5], [6, 7, 8]],
        "row": [[0, 3, 6], [1, 4, 7], [2, 5, 8]],
    },
    ("2.5d", 4): {
        "tp": [[0, 1, 2, 3]],
        "col": [[0, 1], [2, 3]],
        "row": [[0, 2], [1, 3]],
        "depth": [[0], [1], [2], [3]],
    },
    ("2.5d", 8): {
        "tp": [list(range(8))],
        "col": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "row": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "depth": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "row-depth": [[0, 2, 4, 6], [1, 3, 5, 7]],
    },
    ("3d", 8): {
        "tp": [list(range(8))],
        "weight": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "input": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "output": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "weight-input": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "weight-output": [[0, 1, 4, 5], [2, 3, 6, 7]],
    },
}


def grid_topology(mode: str, tp: int, *, dp: int = 1, pp: int = 1, order: str = "") -> Topology:
    parallel = ParallelSpec(tp=tp, dp=dp, pp=pp, tensor_mode=mode, order=order or DEFAULT_ORDER)
    return job_topology(complete(JobSpec(parallel=parallel)))


@pytest.mark.parametrize(("mode", "tp"), GRIDS)
def test_groups_of_a_grid_by_hand(mode: str, tp: int) -> None:
    topology = grid_topology(mode, tp)
    kinds = [kind for kind in topology.kinds if kind not in GROUP_KINDS or kind == "tp"]
    found = {kind: [list(g) for g in topology.kind_groups(kind)] for kind in kinds}
    assert found == GRIDS[mode, tp]


@pytest.mark.parametrize("order", ["tp-cp-dp-pp", "dp-tp-pp-cp", "pp-dp-tp-cp"])
@pytest.mark.parametrize(("mode", "tp"), [("2d", 4), ("2.5d", 18), ("3d", 8)])
def test_a_grid_lies_inside_the_tp_groups_whatever_the_order(mode: str, tp: int, order: str) -> None:
    whole = Topology.of({"tp": tp, "dp": 2, "pp": 3}, order=order)
    topology = grid_topology(mode, tp, dp=2, pp=3, order=order)
    grid = TensorGrid.of(mode, tp)
    for kind in GROUP_KINDS:
        assert lists(topology, *topology.kinds[kind]) == lists(whole, *whole.kinds[kind])
    assert (topology.whole_sizes, topology.whole_order) == (whole.sizes, whole.order)
    for rank in range(topology.world_size):
        place, own = topology.whole_coords(rank), list(topology.group(rank, "tp"))
        assert {axis: place[axis] for axis in AXIS_NAMES} == whole.coords(rank)
        assert own[place["tp"]] == rank
        assert grid.coords(place["tp"]) == {axis: place[axis] for axis in grid.axes}
        for axes in grid.groups.values():
            fixed = [axis for axis in grid.axes if axis not in axes]
            places = [grid.coords(at) for at in range(tp)]
            same = [own[at] for at in range(tp) if all(places[at][a] == place[a] for a in fixed)]
            assert list(topology.group(rank, *axes)) == same


@pytest.mark.parametrize(("mode", "tp"), [("2d", 4), ("2d", 9), ("2.5d", 8), ("3d", 8)])
def test_device_mesh_has_the_same_grid(mode: str, tp: int) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    topology, axes = grid_topology(mode, tp, dp=2), TensorGrid.of(mode, tp).axes
    slowest_first = ("dp", *reversed(axes))
    shape = tuple(topology.sizes[axis] for axis in slowest_first)
    for rank in range(topology.world_size):
        dist.init_process_group("fake", rank=rank, world_size=topology.world_size, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=slowest_first)
            for axis in slowest_first:
                members = dist.get_process_group_ranks(mesh.get_group(axis))
                assert list(topology.group(rank, axis)) == members
            both = mesh[slowest_first[1:]]._flatten("tp").get_group()
            assert list(topology.group(rank, "tp")) == dist.get_process_group_ranks(both)
            at = dict(zip(slowest_first, mesh.get_coordinate(), strict=True))
            assert {axis: topology.coords(rank)[axis] for axis in slowest_first} == at
        finally:
            dist.destroy_process_group()
