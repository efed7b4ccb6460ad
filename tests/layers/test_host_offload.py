"""Inputs in host memory: copied on a stream of their own, back ahead of time, equal to the bit."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from mpctl.layers.recompute import HostOffload, checkpointed
from tests.streams import LoggedStream

CPU = torch.device("cpu")


def trained(offload: HostOffload | None, passes: int = 1) -> list[Tensor]:
    """Gradients of 3 recomputed layers, the forwards of all passes before the first backward."""
    weights = [torch.full((4, 4), 0.1 * i + 0.1, requires_grad=True) for i in range(3)]
    results = []
    for number in range(passes):
        if offload is not None:
            offload.begin_pass()
        x = torch.arange(8.0).view(2, 4) + number
        for weight in weights:
            x = checkpointed(lambda x, w: (x @ w).tanh(), x, weight, offload=offload)
        results.append(x.sum())
    for result in results:
        result.backward()
    return [weight.grad for weight in weights]


def test_the_next_one_is_fetched_when_one_is_taken() -> None:
    """By hand: 3 copies out; then one back that is waited for, the second meanwhile, the third."""
    stream = LoggedStream()
    trained(HostOffload.of(stream, CPU))
    out = ["follow", "copy", "keep"]
    assert stream.log[:9] == 3 * out
    assert stream.log[9:] == [
        "follow", "copy", "join",  # the last layer's
        "follow", "copy",  # the one before, while the last is computed
        "join", "follow", "copy", "join",
    ]  # fmt: skip


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("ahead", [True, False])
def test_gradients_are_the_same_to_the_bit(passes: int, ahead: bool) -> None:
    offload = HostOffload(LoggedStream(), fetches_ahead=ahead)
    found, expected = trained(offload, passes), trained(None, passes)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_pass_does_not_fetch_what_another_put() -> None:
    """Two micro batches in flight: 6 copies out and 6 back, none of them twice."""
    stream = LoggedStream()
    trained(HostOffload.of(stream, CPU), passes=2)
    assert stream.log.count("copy") == 12 and stream.log.count("join") == 6


def test_nothing_of_an_abandoned_pass_is_fetched_or_kept() -> None:
    offload = HostOffload.of(LoggedStream(), CPU)
    host, put = offload.put(torch.ones(3))
    before = torch.utils.weak.TensorWeakRef(host)
    later_host, later = offload.put(torch.ones(3))
    del host, put
    gc.collect()
    assert before() is None
    assert offload.take(later_host, later).tolist() == [1, 1, 1]


def test_of_a_cpu_what_is_taken_is_what_was_put() -> None:
    offload = HostOffload()
    host, put = offload.put(torch.ones(3))
    assert offload.take(host, put).data_ptr() == host.data_ptr()
    assert not HostOffload.of(offload.stream, CPU).fetches_ahead
    assert HostOffload.of(offload.stream, torch.device("meta")).fetches_ahead
