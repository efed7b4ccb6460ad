"""A thread reads what the next steps need; nobody can tell but by the time."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event, active_count

import pytest

from mpctl.errors import InputError
from mpctl.runtime.batches import ReadAhead


def items_of(step: int) -> Iterator[str]:
    """Two items a step; step 3 has none, and the second of step 5 is broken."""
    if step == 3:
        return
    yield f"{step}a"
    if step == 5:
        raise InputError.of("token-outside-vocabulary", "data", "token 7 of 5", "prepare it anew")
    yield f"{step}b"


def test_steps_come_in_order_and_whole() -> None:
    reader = ReadAhead(items_of, stop=5, depth=3)
    assert [list(reader.step(n)) for n in range(5)] == [
        ["0a", "0b"], ["1a", "1b"], ["2a", "2b"], [], ["4a", "4b"]
    ]  # fmt: skip
    reader.close()


def test_it_reads_so_far_ahead_and_no_farther() -> None:
    read, is_far = [], Event()

    def noted(step: int) -> Iterator[int]:
        for item in range(2):
            read.append((step, item))
            if (step, item) == (1, 1):
                is_far.set()
            yield item

    reader = ReadAhead(noted, stop=100, depth=4)
    first = reader.step(0)
    assert next(first) == 0
    assert is_far.wait(10)  # taken: 0; waiting: 1, the end, 0 and 1 of step 1
    assert read == [(0, 0), (0, 1), (1, 0), (1, 1)]
    reader.close()


def test_an_error_is_raised_where_its_item_is_due() -> None:
    reader = ReadAhead(items_of, stop=9, depth=8)
    assert list(reader.step(4)) == ["4a", "4b"]
    fifth = reader.step(5)
    assert next(fifth) == "5a"
    with pytest.raises(InputError, match="token 7 of 5"):
        next(fifth)
    assert list(reader.step(6)) == ["6a", "6b"]
    reader.close()


def test_a_step_can_be_read_again_or_left() -> None:
    reader = ReadAhead(items_of, stop=3, depth=2)
    assert [list(reader.step(n)) for n in (0, 0, 2, 2, 1)] == [
        ["0a", "0b"], ["0a", "0b"], ["2a", "2b"], ["2a", "2b"], ["1a", "1b"]
    ]  # fmt: skip
    left = reader.step(2)
    next(left)
    assert list(reader.step(0)) == ["0a", "0b"]
    assert list(reader.step(7)) == ["7a", "7b"]  # beyond the last, as a benchmark steps
    reader.close()


def test_a_closed_reader_leaves_no_thread() -> None:
    before = active_count()
    reader = ReadAhead(items_of, stop=1000, depth=1)
    next(reader.step(10))
    assert active_count() == before + 1
    reader.close()
    assert active_count() == before
    reader.close()
