"""Uses of one memory by two streams, by hand."""

import pytest

from tests.late.order import Race, StreamOrder


def test_a_write_and_a_read_must_be_ordered():
    order = StreamOrder()
    order.take("A", 1, "empty")
    with pytest.raises(Race, match="B does not wait for A"):
        order.use("B", 1, "copy", writes=True)
    order.wait("B", order.clock("A"))
    order.use("B", 1, "copy", writes=True)
    with pytest.raises(Race, match="add reads what copy writes: A does not wait for B"):
        order.use("A", 1, "add", writes=False)
    order.wait("A", order.clock("B"))
    order.use("A", 1, "add", writes=False)


def test_two_reads_need_no_order_and_a_later_write_needs_both():
    order = StreamOrder()
    order.take("A", 1, "empty")
    order.wait("B", order.clock("A"))
    order.use("B", 1, "send", writes=False)
    order.use("A", 1, "add", writes=False)
    with pytest.raises(Race, match="zero_ writes what send reads"):
        order.use("A", 1, "zero_", writes=True)


def test_other_bytes_of_one_memory_are_another_thing():
    order = StreamOrder()
    order.take("A", 1, "empty")
    order.wait("B", order.clock("A"))
    order.use("B", 1, "gather", writes=True, extent=(0, 64))
    order.use("A", 1, "add_", writes=True, extent=(64, 128))
    with pytest.raises(Race, match="gather"):
        order.use("A", 1, "add_", writes=True, extent=(32, 96))


def test_order_passes_through_a_third_stream():
    order = StreamOrder()
    order.take("A", 1, "empty")
    order.wait("B", order.clock("A"))
    order.wait("C", order.clock("B"))
    order.use("C", 1, "copy", writes=True)


def test_memory_goes_back_to_the_stream_that_it_was_taken_on():
    """That stream may hand it out at once, so it has to know of all uses."""
    for is_kept, is_awaited in ((False, False), (True, False), (False, True)):
        order = StreamOrder()
        order.take("A", 1, "empty")
        order.wait("B", order.clock("A"))
        order.use("B", 1, "offload", writes=False)
        if is_kept:
            order.keep(1, "B")
        if is_awaited:
            order.wait("A", order.clock("B"))
        early = order.free(1)
        assert (early is None) == (is_kept or is_awaited)
        assert early is None or "freed while offload reads it" in early
