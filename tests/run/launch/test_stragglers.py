"""Which ranks are named as stragglers, on step logs made by hand and by chance."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import cache

import pytest

from mpctl.records.rundir.slow import SlowPart
from mpctl.records.rundir.step_log import NOT_COMPARED, ROWS, WINDOW, StepTimes
from mpctl.run.launch.stragglers import NAMED, StragglerWatch, common_steps, compare

Compute = Callable[[int, int], float]
"""Milliseconds that a rank computes in a step."""
FOUR_HOSTS = {rank: f"n{rank // 2}" for rank in range(8)}


def logs(compute: Compute, ranks: int, last: int, processor: Mapping[int, int] | None = None) -> dict[int, StepTimes]:
    """What ranks have logged of the steps up to `last`, each as long as its slowest rank."""
    steps = range(max(1, last - WINDOW + 1), last + 1)
    own = {r: tuple(round(1e3 * compute(r, step)) for step in steps) for r in range(ranks)}
    length = max(1, max(times[-1] for times in own.values()))
    used = processor or {}
    return {r: StepTimes(last, own[r], length, used.get(r, 35_000)) for r in range(ranks)}


def first_named(watch: StragglerWatch, compute: Compute, ranks: int, steps: int) -> tuple[int, list[SlowPart]]:
    """The first step after which somebody is named, checked after every step; `steps` for none."""
    for last in range(WINDOW, steps):
        if found := watch.find(logs(compute, ranks, last)):
            return last, found
    return steps, []


def noisy(seed: int, spread: float, slow: Mapping[int, float], onset: int) -> Compute:
    """35 ms with noise of a normal distribution, of which every tenth step has three times as much;
    from step `onset` on, some ranks compute so many times as long."""

    draw = random.Random(seed)

    @cache
    def compute(rank: int, step: int) -> float:
        noise = draw.gauss(0.0, spread) * (3 if draw.random() < 0.1 else 1)
        return 35 * max(0.2, 1 + noise) * (slow.get(rank, 1.0) if step >= onset else 1.0)

    return compute


def test_the_example_of_the_module() -> None:
    watch = StragglerWatch([0] * 4, on_processors=True)
    times = logs(lambda rank, step: (35, 36, 35, 63)[rank], 4, 40)
    (part,) = watch.find(times)
    assert (part.ranks, part.ratio, part.since, part.named) == ((3,), 1.8, 21, 40)
    assert part.text == (
        "rank 3 computes 1.8 times as long as its equals since step 21, 28 ms of a step; it "
        "uses no more processor time: something else takes its cores, or a limit"
    )
    more = logs(lambda rank, step: (35, 36, 35, 63)[rank], 4, 40, processor={3: 63_000})
    (part,) = watch.find(more)
    assert part.text.endswith("it uses more processor time, too: more work, or a slower processor")


@pytest.mark.parametrize("spread", [0.05, 0.1, 0.2])
@pytest.mark.parametrize("slow", [1.5, 1.8, 3.0])
def test_a_straggler_is_named_within_20_steps(spread: float, slow: float) -> None:
    if (slow, spread) == (1.5, 0.2):
        pytest.skip("1.5 times as long is 1.5 standard deviations above the limit: later")
    for seed in range(10):
        compute = noisy(seed, spread, {5: slow}, onset=61)
        last, found = first_named(StragglerWatch([0] * 8), compute, 8, 120)
        assert [part.ranks for part in found] == [(5,)]
        assert 61 + NAMED - 5 <= last < 61 + 20, (seed, last)
        assert found[0].ratio == pytest.approx(slow, rel=0.35)
        assert abs(found[0].since - 61) <= 5 + 30 * spread


@pytest.mark.parametrize("spread", [0.05, 0.2, 0.5])
def test_noise_alone_names_nobody(spread: float) -> None:
    """Eight even ranks in 1,000 windows that overlap; the widest noise is half of a step."""
    for seed in range(4):
        compute = noisy(seed, spread, {}, onset=0)
        assert first_named(StragglerWatch([0] * 8), compute, 8, 270) == (270, [])


def test_a_pause_of_ten_steps_names_nobody() -> None:
    """A garbage collection, a page fault, a neighbour that compiles."""
    compute: Compute = lambda rank, step: 350 if rank == 2 and 50 <= step < 60 else 35  # noqa: E731
    assert first_named(StragglerWatch([0] * 4), compute, 4, 200) == (200, [])


def test_it_is_over_when_half_of_the_steps_are_even_again() -> None:
    compute: Compute = lambda rank, step: 70 if rank == 2 and 50 <= step < 90 else 35  # noqa: E731
    watch = StragglerWatch([0] * 4)
    slow = [last for last in range(WINDOW, 150) if watch.find(logs(compute, 4, last))]
    assert slow == list(range(50 + NAMED - 1, 90 + WINDOW // 2 - 1))


def test_of_two_equals_the_slower_is_named_and_the_other_said() -> None:
    watch = StragglerWatch([0, 0])
    (part,) = watch.find(logs(lambda rank, step: (60, 30)[rank], 2, 30))
    assert part.ranks == (0,) and "2.0 times as long as rank 1, its only equal, since" in part.text


def test_stages_of_unequal_work_are_compared_by_their_past() -> None:
    """pp 3, one rank a stage: 20, 35 and 60 ms; then the first takes half as long again."""
    usual = (20, 35, 60)

    def compute(rank: int, step: int) -> float:
        return usual[rank] * (1.5 if rank == 0 and step >= 61 else 1.0)

    last, (part,) = first_named(StragglerWatch([0, 1, 2]), compute, 3, 120)
    assert last == 61 + NAMED - 1 and part.ranks == (0,) and part.ratio == 1.5
    assert "1.5 times as long as it did at first, against the other stages, since step 61" in part.text
    everybody: Compute = lambda rank, step: usual[rank] * (2 if step >= 61 else 1)  # noqa: E731
    assert first_named(StragglerWatch([0, 1, 2]), everybody, 3, 150) == (150, [])


def test_a_host_whose_ranks_are_all_slow_is_named_once() -> None:
    """dp 8 over four hosts; then pp 2, where a host holds a whole stage and has no equals."""
    slow: Compute = lambda rank, step: 70 if rank in (2, 3) else 35  # noqa: E731
    (part,) = StragglerWatch([0] * 8, hosts=FOUR_HOSTS).find(logs(slow, 8, 30))
    assert (part.ranks, part.hosts) == ((2, 3), ("n1",))
    assert part.text.startswith("host n1 (ranks 2-3) computes 2.0 times as long as its equals since")
    later: Compute = lambda rank, step: 70 if rank < 2 and step >= 61 else 35  # noqa: E731
    hosts = {0: "n0", 1: "n0", 2: "n1", 3: "n1"}
    _, (part,) = first_named(StragglerWatch([0, 0, 1, 1], hosts=hosts), later, 4, 120)
    assert part.name == "host n0 (ranks 0-1)" and "against the other stages" in part.text
    one: Compute = lambda rank, step: 70 if rank == 3 else 35  # noqa: E731
    (part,) = StragglerWatch([0] * 8, hosts=FOUR_HOSTS).find(logs(one, 8, 30))
    assert part.name == "rank 3 on host n1"


def test_what_costs_the_run_little_is_not_named() -> None:
    """Twice 1 ms in steps of 100 ms, which go by in messages."""
    times = logs(lambda rank, step: 2 if rank == 3 else 1, 4, 30)
    long = {r: StepTimes(of.last, of.computing, 100_000) for r, of in times.items()}
    assert StragglerWatch([0] * 4).find(times) and not StragglerWatch([0] * 4).find(long)


def test_steps_with_a_checkpoint_count_for_nobody() -> None:
    """Rank 0 alone saves, every fourth step, in the background."""
    times = logs(lambda rank, step: 70 if rank == 0 and step % 4 else 35, 4, 40)
    marked = tuple(NOT_COMPARED if step % 4 else 35_000 for step in times[0].steps)
    times[0] = StepTimes(40, marked, 70_000)
    assert StragglerWatch([0] * 4).find(times) == []


def test_hosts_that_report_at_different_times_are_compared_in_common_steps() -> None:
    one = (35_000,) * ROWS
    mixed = {r: StepTimes(90 if r < 2 else 60, one if r < 3 else (70_000,) * ROWS) for r in range(4)}
    assert common_steps(mixed.values()) == range(41, 61)
    assert [part.ranks for part in StragglerWatch([0] * 4).find(mixed)] == [(3,)]
    far = {**mixed, 0: StepTimes(500, one)}
    assert StragglerWatch([0] * 4).find(far) == []  # nothing in common: nothing is said


def test_each_is_compared_with_the_median_of_the_others() -> None:
    """By hand: of 1, 2, 3, 10 the others of 10 have the median 2, those of 1 have 3."""
    judged = compare({rank: {7: float(n)} for rank, n in enumerate((1, 2, 3, 10))})
    assert judged[3].ratio == 5.0 and judged[3].slow == (7,) and judged[0].slow == ()
    assert judged[2].ratio == 1.5 and compare({0: {7: 1.0}}) == {}
