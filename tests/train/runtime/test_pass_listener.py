"""Offloaded inputs of one forward are a pass of their own."""

from __future__ import annotations

import torch

from mpctl.model.pipeline.schedule.orders import Action
from mpctl.train.layers.recompute import HostOffload
from mpctl.train.runtime.pass_listener import OffloadPasses


def test_a_forward_begins_a_pass_and_a_backward_does_not() -> None:
    offload = HostOffload()
    passes = OffloadPasses(offload)
    first_host, first = offload.put(torch.ones(2))
    passes.begin(Action("backward", 0, 0))
    second_host, second = offload.put(torch.ones(2))
    assert second.before is not None and second.before() is first
    passes.begin(Action("forward", 1, 0))
    _, third = offload.put(torch.ones(2))
    assert third.before is None
    assert len(first_host) == len(second_host)
