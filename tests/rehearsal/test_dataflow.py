"""The least bytes of parts of a step, by hand: 16 bytes are 4 float32."""

from __future__ import annotations

import torch
from torch import Tensor

from mpctl.rehearsal.audit import Dataflow, Part
from mpctl.rehearsal.kernel_counts import Touched, tensor_bytes


def whole(*tensors: Tensor) -> Touched:
    return [(tensor, tensor_bytes(tensor)) for tensor in tensors]


def test_what_a_part_makes_and_uses_up_costs_nothing() -> None:
    flow, part, later = Dataflow(), Part(), Part()
    x, between, y = (torch.zeros(4) for _ in range(3))
    flow.read(part, whole(x))
    flow.write(part, whole(between))
    flow.read(part, whole(between))
    flow.write(part, whole(y))
    del between
    assert part.least_bytes == 16  # y is not needed yet
    flow.read(later, whole(y))
    assert part.least_bytes == 32 and later.least_bytes == 16


def test_what_lives_at_the_end_was_needed() -> None:
    flow, part = Dataflow(), Part()
    kept, dropped = torch.zeros(4), torch.zeros(4)
    flow.write(part, whole(kept, dropped))
    del dropped
    flow.finish()
    assert part.least_bytes == 16


def test_views_of_one_product_are_the_product() -> None:
    flow, part = Dataflow(), Part()
    qkv = torch.zeros(2, 12)
    q, k, v = qkv.chunk(3, dim=-1)
    flow.read(part, whole(q, k, v, q.t(), qkv))
    assert part.least_bytes == 96


def test_a_copy_of_values_as_they_are_is_what_it_copies() -> None:
    flow, maker, copier, reader = Dataflow(), Part(), Part(), Part()
    x = torch.zeros(4)
    flow.write(maker, whole(x))
    copy = x.clone()
    flow.copy(x, copy, copier)
    flow.read(reader, whole(copy))
    assert (maker.least_bytes, copier.least_bytes, reader.least_bytes) == (16, 0, 16)


def test_a_change_in_place_of_what_was_there_is_read_and_written() -> None:
    flow, part, x = Dataflow(), Part(), torch.zeros(4)
    flow.read(part, whole(x))
    flow.write(part, whole(x))
    assert part.least_bytes == 32


def test_rows_that_are_overwritten_one_after_another_are_read_and_written() -> None:
    flow, part, x = Dataflow(), Part(), torch.zeros(4, 4)
    for row in x:
        flow.read(part, whole(row))
        flow.write(part, whole(row))
    assert part.least_bytes == 2 * 64


def test_a_freed_storage_is_forgotten() -> None:
    flow, part = Dataflow(), Part()
    x = torch.zeros(4)
    flow.write(part, whole(x))
    assert len(flow.living) == 1
    del x
    assert not flow.living
