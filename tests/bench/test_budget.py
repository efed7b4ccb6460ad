"""Rounds within a budget, by a clock that the test moves."""

from mpctl.bench.runner import Budget


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def rounds(budget, clock, lengths):
    done = []
    for number, length in zip(budget.rounds(len(lengths)), lengths, strict=False):
        clock.now += length
        done.append(number)
    return done


def test_a_round_begins_only_where_one_as_long_would_end_in_time():
    clock = Clock()
    assert rounds(Budget(10.0, clock), clock, [4.0] * 5) == [0, 1]


def test_the_first_round_always_begins():
    clock = Clock()
    assert rounds(Budget(1.0, clock), clock, [4.0] * 5) == [0]


def test_without_a_budget_all_rounds_run():
    clock = Clock()
    budget = Budget(None, clock)
    assert rounds(budget, clock, [4.0] * 5) == [0, 1, 2, 3, 4] and budget.left is None


def test_how_many_rounds_are_likely_follows_from_the_longest():
    clock = Clock()
    budget = Budget(10.0, clock)
    assert [budget.likely(number, 9) for number in _each(budget, clock, 3.0)] == [9, 3, 3]
    assert Budget(None, clock).likely(4, 9) == 9
    budget = Budget(100.0, clock)
    assert [budget.likely(number, 3) for number in _each(budget, clock, 3.0)] == [3, 3, 3]


def _each(budget, clock, length):
    for number in budget.rounds(3):
        yield number
        clock.now += length
