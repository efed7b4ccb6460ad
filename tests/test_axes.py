"""Orders of axes and the kinds of groups."""

from __future__ import annotations

import pytest

from mpctl.axes import AXES, AXIS_NAMES, DEFAULT_ORDER, GROUP_KINDS, Axis, parse_order
from mpctl.planning.document import plan_document, rank_document
from mpctl.planning.plan import make_plan
from mpctl.spec.job import JobSpec, complete
from mpctl.spec.parallel import ParallelSpec
from mpctl.topology import Topology

BUSY = dict.fromkeys(AXIS_NAMES, 2)


@pytest.mark.parametrize(
    ("order", "sizes", "parsed"),
    [
        (DEFAULT_ORDER, BUSY, ("tp", "cp", "dp", "pp")),
        ("tp-cp-pp-dp", BUSY, ("tp", "cp", "pp", "dp")),
        ("dp-tp", {"tp": 2, "dp": 2}, ("dp", "tp", "cp", "pp")),
        ("pp", {}, ("pp", "tp", "cp", "dp")),
    ],
)
def test_an_order_names_the_axes_fastest_first(
    order: str, sizes: dict[str, int], parsed: tuple[str, ...]
) -> None:
    assert parse_order(order, sizes) == parsed


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        ("tp-cp-dp", "missing pp"),
        ("tp-cp-dp-pp-ep", "unknown ep"),
        ("tp-tp-cp-dp-pp", "repeated tp"),
        ("tp,cp,dp,pp", "unknown tp,cp,dp,pp"),
        ("TP-cp-dp-pp", "unknown TP; missing tp"),
        ("", "unknown ; missing tp, cp, dp, pp"),
    ],
)
def test_a_bad_order_says_what_is_wrong_with_it(order: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_order(order, BUSY)


def test_group_kinds_are_made_of_axes() -> None:
    assert all(set(axes) <= set(AXIS_NAMES) for axes in GROUP_KINDS.values())
    assert GROUP_KINDS["mp"] == ("tp", "pp")


def test_an_axis_is_one_row() -> None:
    """A toy axis between dp and pp: the rank law, its groups and the plan's JSON follow."""
    toy = Axis("xp", "toy", "nothing", "nothing")
    topology = Topology.of(
        {"tp": 2, "xp": 2, "pp": 2}, axes=(*AXES, toy), order="tp-xp-pp", gpus_per_node=4
    )
    assert [list(group) for group in topology.groups("xp")] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert topology.coords(6) == {"tp": 0, "cp": 0, "dp": 0, "pp": 1, "xp": 1}
    job = complete(JobSpec(parallel=ParallelSpec(tp=2, dp=2, pp=2)))
    document = plan_document(make_plan(job), topology, kinds=None, ranks=True)
    assert document["groups"]["xp"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert document["order"] == "tp-xp-pp-cp-dp"
    assert document["ranks"][6]["coords"]["xp"] == 1
    assert "xp" in rank_document(make_plan(job), topology, 6)["groups"]
