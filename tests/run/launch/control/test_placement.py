"""Which host runs which node: hosts keep their nodes, spare hosts fill those of others."""

from __future__ import annotations

import pytest

from mpctl.run.launch.control.placement import Placement, ReturnPolicy

FIRST = Placement((0, 1, 2))


@pytest.mark.parametrize(
    ("fit", "unwanted", "least", "assigned", "absent", "used_all_the_same"),
    [
        ({0, 1, 2, 3}, [], 3, (0, 1, 2), set(), ()),
        ({0, 2, 3, 4}, [], 3, (0, 3, 2), set(), ()),
        ({3, 4, 2}, [], 3, (3, 4, 2), set(), ()),
        ({0, 2}, [], 2, (0, 1, 2), {1}, ()),  # elastic
        ({0, 2}, [1], 3, (0, 1, 2), set(), (1,)),
        ({0, 2}, [4, 1], 3, (0, 4, 2), set(), (4,)),  # the least unwanted one
        ({0}, [4, 1, 2], 3, (0, 1, 4), set(), (4, 1)),
        ({0}, [], 3, (0, 1, 2), {1, 2}, ()),  # too few
        (set(), [2], 1, (0, 1, 2), {0, 1}, (2,)),
    ],
)
def test_hosts_keep_their_nodes(
    fit: set[int],
    unwanted: list[int],
    least: int,
    assigned: tuple[int, ...],
    absent: set[int],
    used_all_the_same: tuple[int, ...],
) -> None:
    placement = FIRST.renewed(fit, unwanted, least)
    assert (placement.assigned, placement.absent) == (assigned, absent)
    assert placement.unwanted == used_all_the_same
    assert placement.used == [host for host in assigned if host not in absent]


def test_a_host_that_is_back_does_not_take_its_node_again() -> None:
    replaced = FIRST.renewed({0, 2, 3}, [], 3)
    assert replaced.assigned == (0, 3, 2)
    assert replaced.renewed({0, 1, 2, 3}, [], 3).assigned == (0, 3, 2)
    assert replaced.renewed({0, 1, 3}, [], 3).assigned == (0, 3, 1)


def test_an_elastic_run_takes_any_host_for_a_free_node() -> None:
    smaller = FIRST.renewed({0, 2}, [], 1)
    assert smaller.used == [0, 2]
    assert smaller.renewed({0, 1, 2}, [], 1).used == [0, 1, 2]
    assert smaller.renewed({0, 2, 4}, [], 1).used == [0, 4, 2]


def test_the_pauses_of_a_host_double() -> None:
    policy = ReturnPolicy()
    assert [policy.note_loss(0, 0.0) for _ in range(4)] == [0, 40, 80, 160]
    assert [policy.note_refusal(1, 0.0) for _ in range(3)] == [20, 40, 80]
    assert [policy.note_loss(0, 0.0) for _ in range(9)][-1] == 1800
    assert not policy.may_return(0, 1799) and policy.may_return(0, 1800)
    assert policy.may_return(7, 0.0)
