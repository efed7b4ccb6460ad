"""Who waits for whom, from what ranks have logged."""

from __future__ import annotations

from dataclasses import dataclass, field

from mpctl.launch.wait_graph import wait_graph
from mpctl.rundir.collective_log import CollectiveProgress, GroupProgress

LETTERS = {"r": "all_reduce", "g": "all_gather", "s": "send"}


@dataclass
class Ranks:
    """Builds what ranks have logged: `at(rank, "tp 2-3", 7)` has started and finished 7 of the
    group, `waits` has started it and waits for its end."""

    states: dict[int, list[GroupProgress]] = field(default_factory=dict)
    waiting: dict[int, tuple[int, int]] = field(default_factory=dict)

    def at(
        self, rank: int, group: str, number: int, *, finished: int | None = None, kind: str = "r"
    ) -> Ranks:
        name, members = group.split()
        done = number if finished is None else finished
        progress = GroupProgress(name, members, number, done, LETTERS[kind], 4096)
        self.states.setdefault(rank, []).append(progress)
        return self

    def waits(self, rank: int, group: str, number: int, kind: str = "r") -> Ranks:
        self.at(rank, group, number, finished=number - 1, kind=kind)
        self.waiting[rank] = (len(self.states[rank]) - 1, number)
        return self

    @property
    def progress(self) -> dict[int, CollectiveProgress]:
        return {
            rank: CollectiveProgress(tuple(groups), *self.waiting.get(rank, (None, 0)))
            for rank, groups in self.states.items()
        }


def tp_and_dp(*, stopped: int = 3) -> Ranks:
    """The example of the module: all wait because of rank 3."""
    ranks = Ranks()
    ranks.waits(0, "tp 0-1", 9).at(0, "dp 0,2", 4)
    ranks.waits(1, "dp 1,3", 5).at(1, "tp 0-1", 8)
    ranks.waits(2, "tp 2-3", 9).at(2, "dp 0,2", 4)
    return ranks.at(stopped, "tp 2-3", 8).at(stopped, "dp 1,3", 4)


def test_the_example_of_the_module() -> None:
    graph = wait_graph(tp_and_dp().progress)
    assert graph.ends == [3] and graph.circle() == []
    assert [(wait.rank, wait.group.name) for wait in graph.waits_for(3)] == [(1, "dp"), (2, "tp")]
    assert graph.waits[0][0].blockers == (1,)


def test_a_rank_without_a_log_has_started_nothing() -> None:
    ranks = Ranks().waits(0, "tp 0-1", 1)
    assert wait_graph(ranks.progress).ends == [1]


def test_ranks_that_compute_wait_for_nobody() -> None:
    ranks = Ranks().at(0, "dp 0-1", 8, finished=6).at(1, "dp 0-1", 6)
    assert wait_graph(ranks.progress).waits == {}


def test_who_has_joined_and_does_something_else_holds_up_the_rest() -> None:
    """Through shared memory a rank serves its peers only while it waits."""
    ranks = Ranks().waits(0, "dp 0-1", 8).at(1, "dp 0-1", 9, finished=7)
    graph = wait_graph(ranks.progress)
    assert graph.ends == [1] and graph.waits[0][0].have_started


def test_a_circle_of_messages() -> None:
    """Both stages send first and receive then, and no message is buffered."""
    ranks = Ranks().waits(0, "pp 0,1", 3, "s").at(0, "pp 1,0", 2, kind="s")
    ranks.waits(1, "pp 1,0", 3, "s").at(1, "pp 0,1", 2, kind="s")
    graph = wait_graph(ranks.progress)
    assert graph.ends == [] and [wait.rank for wait in graph.circle()] == [0, 1]


def test_all_members_wait_in_one_collective() -> None:
    ranks = Ranks().waits(0, "dp 0-1", 3).waits(1, "dp 0-1", 3, "g")
    graph = wait_graph(ranks.progress)
    assert graph.ends == [] and graph.circle() == [] and graph.waits[0][0].blockers == ()


def test_on_gpus_the_host_only_queues() -> None:
    """Rank 0 has queued two collectives that rank 1 has not; no host waits in either."""
    ranks = Ranks().at(0, "tp 0-1", 9).at(1, "tp 0-1", 7)
    assert wait_graph(ranks.progress).waits == {}
    assert wait_graph(ranks.progress, queued=True).ends == [1]


def test_ten_thousand_ranks_take_a_moment() -> None:
    ranks = Ranks()
    for rank in range(9_999):
        ranks.waits(rank, "world 0-9999", 5)
    assert wait_graph(ranks.at(9_999, "world 0-9999", 4).progress).ends == [9_999]
