"""Which links between hosts are named as slow, and what is told apart from them."""

from __future__ import annotations

from collections.abc import Mapping

from mpctl.records.rundir.collective_log import CollectiveProgress, GroupProgress
from mpctl.records.rundir.slow import SlowPart
from mpctl.records.rundir.step_log import WINDOW, StepTimes
from mpctl.run.launch.slow_links import LinkWatch

HOSTS = {0: "n1", 1: "n1", 2: "n2", 3: "n2"}
Waits = Mapping[tuple[str, str], Mapping[int, float]]
"""Milliseconds of each rank in the messages of a group, by its name and ranks."""


class Scene:
    """A watch over ranks that report medians of full windows, and steps of 100 ms."""

    def __init__(self, hosts: Mapping[int, str] = HOSTS, size: int = 1 << 20) -> None:
        self.watch, self.last, self.size = LinkWatch(hosts), 0, size

    def after(
        self, waits: Waits, growth: float = 1.0, kinds: Mapping[tuple[str, str], str] | None = None
    ) -> list[SlowPart]:
        """What is slow after WINDOW more steps. growth: of what every rank computes."""
        self.last += WINDOW
        times, progress = {}, {}
        for rank in self.watch.hosts:
            mine = {key: of[rank] for key, of in waits.items() if rank in of}
            groups = [GroupProgress(*key, 1, 1, (kinds or {}).get(key, "all_reduce"), 8) for key in mine]
            spent = tuple(round(1e3 * ms) for ms in mine.values())
            times[rank] = StepTimes(self.last, (50_000,) * WINDOW, 100_000, 0, spent, (self.size,) * len(spent))
            progress[rank] = CollectiveProgress(tuple(groups))
        return self.watch.find(times, progress, dict.fromkeys(self.watch.hosts, growth))


def dp(fast: float, late: float = 0.0) -> Waits:
    """Two groups between the hosts, in which the wire takes `fast`; ranks 2 and 3 come `late`."""
    return {("dp_cp", "0,2"): {0: fast + late, 2: fast}, ("dp_cp", "1,3"): {1: fast + late, 3: fast}}


def test_the_example_of_the_module() -> None:
    scene = Scene()
    assert scene.after(dp(8, late=22)) == []
    assert scene.after(dp(16, late=22)) == []  # 8 ms of 100
    (part,) = scene.after(dp(40, late=22))
    assert (part.kind, part.hosts, part.axis, part.ratio) == ("link", ("n1", "n2"), "dp_cp", 5.0)
    assert part.ranks == (0, 1, 2, 3) and part.since == 60 - WINDOW // 2
    assert part.text == (
        "the link between hosts n1 and n2 takes 5.0 times as long as before for messages of dp_cp "
        "(ranks 0-3) since about step 50: 40 ms of a step of 100 ms for 1.0 MiB, 8 ms before"
    )
    assert scene.after(dp(14, late=22)) == []


def test_a_late_peer_is_not_the_wire() -> None:
    scene = Scene()
    assert scene.after(dp(8)) == []
    assert scene.after(dp(8, late=80)) == []


def test_groups_within_a_host_are_not_judged() -> None:
    scene = Scene()
    assert scene.after({("tp", "0-1"): {0: 5, 1: 5}}) == []
    assert scene.after({("tp", "0-1"): {0: 60, 1: 60}}) == []


def test_ranks_that_compute_longer_explain_messages_that_take_longer() -> None:
    scene = Scene()
    scene.after(dp(10))
    assert scene.after(dp(30), growth=1.6) == [] and scene.after(dp(33), growth=1.6)


def test_a_message_is_slow_where_both_ends_wait_and_its_hop_has_a_direction() -> None:
    """pp over three hosts; first the receivers wait for late senders, as in every pipeline."""
    hosts = {0: "n1", 1: "n2", 2: "n3"}
    there, on = ("pp", "0-1"), ("pp", "1-2")
    sends = {there: "send", on: "send"}
    scene = Scene(hosts)
    assert scene.after({there: {0: 1, 1: 40}, on: {1: 1, 2: 50}}, kinds=sends) == []
    assert scene.after({there: {0: 2, 1: 60}, on: {1: 2, 2: 70}}, kinds=sends) == []
    (part,) = scene.after({there: {0: 2, 1: 60}, on: {1: 45, 2: 70}}, kinds=sends)
    assert part.name == "the link from host n2 to host n3" and part.ranks == (1, 2)


def test_a_link_that_is_slow_from_the_start_is_compared_with_others() -> None:
    """dp 2 on four hosts: two groups, of which one is slow."""
    hosts = {0: "n1", 1: "n2", 2: "n3", 3: "n4"}
    waits = {("dp_cp", "0-1"): {0: 8, 1: 9}, ("dp_cp", "2-3"): {2: 40, 3: 41}}
    (part,) = Scene(hosts).after(waits)
    assert part.hosts == ("n3", "n4")


def test_nothing_is_said_before_all_have_full_windows() -> None:
    watch = LinkWatch(HOSTS)
    short = dict.fromkeys(HOSTS, StepTimes(3, (5, 5, 5), 100))
    assert watch.find(short, dict.fromkeys(HOSTS, CollectiveProgress()), {}) == []
