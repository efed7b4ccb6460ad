"""The rank law against an enumeration that knows no arithmetic: coordinates, in order, numbered."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations, product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.core.axes import AXIS_NAMES, GROUP_KINDS
from mpctl.core.errors import InputError
from mpctl.core.sharding import divisors
from mpctl.core.topology import Topology
from mpctl.plan.planning.document import group_summary

ORDERS = ["-".join(order) for order in permutations(AXIS_NAMES)]
AXES = st.sets(st.sampled_from(AXIS_NAMES), min_size=1).map(sorted)


@dataclass(frozen=True)
class Case:
    topology: Topology
    coords: list[dict[str, int]]  # by rank

    def groups(self, axes: list[str]) -> list[list[int]]:
        """Ranks with equal coordinates off `axes`; a dict keeps them by first rank."""
        found: dict[tuple[int, ...], list[int]] = defaultdict(list)
        kept = [axis for axis in AXIS_NAMES if axis not in axes]
        for rank, coords in enumerate(self.coords):
            found[tuple(coords[axis] for axis in kept)].append(rank)
        return list(found.values())


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sizes = {axis: draw(st.integers(1, 4)) for axis in AXIS_NAMES}
    order = draw(st.sampled_from(ORDERS))
    gpus = draw(st.integers(1, prod(sizes.values()) + 1))
    split = draw(st.none() | st.integers(0, sizes["pp"] - 1))
    slowest_first = order.split("-")[::-1]
    coords = [
        dict(zip(slowest_first, at, strict=True)) for at in product(*(range(sizes[axis]) for axis in slowest_first))
    ]
    return Case(Topology.of(sizes, order=order, gpus_per_node=gpus, split_stage=split), coords)


@given(cases())
def test_coords_follow_the_order_and_rank_inverts_them(case: Case) -> None:
    topology = case.topology
    assert topology.world_size == len(case.coords)
    assert [topology.coords(rank) for rank in range(topology.world_size)] == case.coords
    assert [topology.rank(**coords) for coords in case.coords] == list(range(topology.world_size))


@given(cases(), AXES)
def test_groups_are_those_of_the_enumeration_in_order(case: Case, axes: list[str]) -> None:
    groups = [list(group) for group in case.topology.groups(*axes)]
    assert groups == case.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(len(case.coords)))
    assert {len(group) for group in groups} == {case.topology.group_size(*axes)}


@given(cases(), AXES, st.data())
def test_group_of_a_rank_is_the_listed_one(case: Case, axes: list[str], data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(case.coords) - 1))
    (listed,) = [group for group in case.groups(axes) if rank in group]
    assert list(case.topology.group(rank, *axes)) == listed


@given(cases(), st.sampled_from(sorted(GROUP_KINDS)))
def test_kind_groups_are_ascending_by_first_rank(case: Case, kind: str) -> None:
    groups = [list(group) for group in case.topology.kind_groups(kind)]
    assert groups == sorted(groups)
    assert all(group == sorted(set(group)) for group in groups)


@given(cases())
def test_embedding_groups_are_the_ends_and_the_split_of_each_pipeline(case: Case) -> None:
    topology, last = case.topology, case.topology.sizes["pp"] - 1
    split = set() if topology.split_stage is None else {topology.split_stage}
    for kind, stages in (("embedding", {0, last} | split), ("position_embedding", {0} | split)):
        expected = [
            [rank for rank in pipeline if case.coords[rank]["pp"] in stages] for pipeline in case.groups(["pp"])
        ]
        assert [list(group) for group in topology.kind_groups(kind)] == expected


@given(cases(), st.sampled_from(sorted(GROUP_KINDS)), st.data())
def test_find_group_is_the_listed_group_or_none(case: Case, kind: str, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(case.coords) - 1))
    holding = [list(g) for g in case.topology.kind_groups(kind) if rank in g]
    found = case.topology.find_group(kind, rank)
    assert ([] if found is None else [list(found)]) == holding


@given(cases(), st.sampled_from(sorted(GROUP_KINDS)))
def test_summary_of_a_kind_agrees_with_its_list(case: Case, kind: str) -> None:
    groups = [list(group) for group in case.topology.kind_groups(kind)]
    assert group_summary(case.topology, kind) == {
        "count": len(groups),
        "size": len(groups[0]),
        "first": groups[0],
        "last": groups[-1],
    }


@given(cases(), st.sampled_from(AXIS_NAMES))
def test_straddling_groups_are_those_with_ranks_on_two_nodes(case: Case, axis: str) -> None:
    topology = case.topology
    gpus = topology.gpus_per_node
    leaving = [g for g in case.groups([axis]) if len({rank // gpus for rank in g}) > 1]
    shown, count = topology.straddling(axis)
    assert count == len(leaving)
    assert [list(group) for group in shown] == leaving[:4]


@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 6, 8, 16])
@pytest.mark.parametrize("order", ["tp-cp-dp-pp", "dp-tp-cp-pp"])
def test_straddling_groups_of_unions_whose_members_are_unevenly_spaced(gpus: int, order: str) -> None:
    """A union of the first and last axis of a cube: ranks 0, 1, 4 and 5."""
    whole = Topology.of({"tp": 8, "dp": 3, "pp": 2}, order=order, gpus_per_node=gpus)
    ends = {"ends": ("a", "c")}
    topology = whole.factored("tp", {"a": 2, "b": 2, "c": 2}, ends)
    for kind in ("ends", "a", "b", "c", "tp", "dp", "mp"):
        groups = [list(group) for group in topology.kind_groups(kind)]
        leaving = [group for group in groups if len({rank // gpus for rank in group}) > 1]
        shown, count = topology.straddling(kind)
        assert (count, [list(group) for group in shown]) == (len(leaving), leaving[:4])


@given(cases())
def test_nodes_hold_consecutive_ranks(case: Case) -> None:
    topology = case.topology
    held = [topology.node(r) * topology.gpus_per_node + topology.local_rank(r) for r in range(topology.world_size)]
    assert held == list(range(topology.world_size))
    assert topology.nodes == topology.node(topology.world_size - 1) + 1
    assert all(0 <= topology.local_rank(r) < topology.gpus_per_node for r in held)


@given(cases(), st.data())
def test_axes_of_size_one_may_be_left_out_of_the_order(case: Case, data: st.DataObject) -> None:
    sizes, order = case.topology.sizes, case.topology.order
    idle = [axis for axis in order if sizes[axis] == 1]
    dropped = data.draw(st.sets(st.sampled_from(idle))) if idle else set()
    named = [axis for axis in order if axis not in dropped]
    if not named:
        return
    short = Topology.of(sizes, order="-".join(named))
    assert [short.coords(rank) for rank in range(short.world_size)] == case.coords


@given(cases(), st.sampled_from(AXIS_NAMES), st.data())
def test_a_factored_axis_keeps_every_group_and_has_groups_inside_it(case: Case, axis: str, data: st.DataObject) -> None:
    topology = case.topology
    rows = data.draw(st.sampled_from(divisors(topology.sizes[axis])))
    columns = topology.sizes[axis] // rows
    grid = topology.factored(axis, {"row": rows, "col": columns})
    for kind in topology.kinds:
        listed = [list(group) for group in topology.kind_groups(kind)]
        assert [list(group) for group in grid.kind_groups(kind)] == listed
    assert [list(g) for g in grid.groups("row", "col")] == case.groups([axis])
    assert grid.straddling(axis) == topology.straddling(axis)
    for group in grid.groups("row"):
        assert len(group) == rows
        (around,) = {tuple(topology.group(rank, axis)) for rank in group}
        at = around.index(group[0])
        assert list(group) == list(around[at : at + rows])


def test_the_parts_of_an_axis_multiply_to_it() -> None:
    with pytest.raises(InputError, match="row 2 x col 2 is 4, and tp is 6"):
        Topology.of({"tp": 6}).factored("tp", {"row": 2, "col": 2})


WORLD = Topology.of({"tp": 2, "dp": 2, "pp": 4}, gpus_per_node=8)
REFUSED: dict[str, tuple[Callable[[], object], list[str]]] = {
    "an unknown axis": (
        lambda: Topology.of({"tp": 2, "ddp": 8}),
        ["ddp: no axis is called 'ddp' (did you mean dp? use tp, cp, dp, pp)"],
    ),
    "all at once": (
        lambda: Topology.of({"ep": 2, "tp": 0, "dp": -1}, order="tp-dp-zz", gpus_per_node=0),
        [
            "ep: no axis is called 'ep' (use tp, cp, dp, pp)",
            "tp: 0 is no number of ranks (use 1 or more)",
            "dp: -1 is no number of ranks (use 1 or more)",
            "gpus_per_node: 0 is no number of ranks (use 1 or more)",
            "order: 'tp-dp-zz' has axes that are unknown zz (use each of tp, cp, dp, pp once, "
            "fastest first, as in tp-cp-dp-pp)",
        ],
    ),
    "a size that is no integer": (
        lambda: Topology.of({"tp": 2.0}),  # type: ignore[dict-item]
        ["tp: 2.0 is no number of ranks (use 1 or more)"],
    ),
    "a stage beyond the last": (
        lambda: Topology.of({"pp": 4}, split_stage=4),
        ["split_stage: 4 is none of 4 stages (use 0 to 3)"],
    ),
    "an unknown group": (
        lambda: WORLD.group(5, "zz"),
        ["zz: no group is called 'zz' (use tp, cp, dp, pp, dp_cp, mp, embedding, position_embedding)"],
    ),
    "an unknown coordinate": (lambda: WORLD.rank(ep=1), ["ep: no axis is called 'ep' (use tp, cp, dp, pp)"]),
    "a coordinate beyond its axis": (lambda: WORLD.rank(pp=4), ["pp: 4 is not below its size of 4 (use 0 to 3)"]),
    "an unknown axis to factor": (
        lambda: WORLD.factored("xp", {"a": 1}),
        ["xp: no axis is called 'xp' (use tp, cp, dp, pp)"],
    ),
    "parts without ranks": (
        lambda: WORLD.factored("tp", {"row": -2, "col": -1}),
        ["row: -2 is no number of ranks (use 1 or more)", "col: -1 is no number of ranks (use 1 or more)"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_sizes_and_names_are_refused_in_words(case: str) -> None:
    ask, expected = REFUSED[case]
    with pytest.raises(InputError) as refused:
        ask()
    assert [str(issue) for issue in refused.value.issues] == expected


@pytest.mark.parametrize("rank", [-1, 16, 99])
@pytest.mark.parametrize(
    "ask",
    [
        WORLD.coords,
        WORLD.whole_coords,
        WORLD.node,
        WORLD.local_rank,
        lambda rank: WORLD.group(rank, "pp"),
        lambda rank: WORLD.find_group("embedding", rank),
    ],
)
def test_a_rank_outside_of_the_world_is_refused(ask: Callable[[int], object], rank: int) -> None:
    with pytest.raises(InputError) as refused:
        ask(rank)
    message = f"rank: {rank} is not a rank of this world of 16 ranks (use 0 to 15)"
    assert str(refused.value) == message


@pytest.mark.parametrize(
    "ask", [WORLD.groups, WORLD.group_size, WORLD.straddling, WORLD.kind_groups, lambda kind: WORLD.find_group(kind, 0)]
)
def test_every_question_about_an_unknown_group_is_refused(ask: Callable[[str], object]) -> None:
    with pytest.raises(InputError, match="no group is called 'eddp'"):
        ask("eddp")
