"""What a recomputed block keeps, that it is computed again, and that nothing else changes."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from mpctl.model.operators.kernel_sets import COPIES_IN_FLIGHT
from mpctl.train.kernels.counter_rng import CounterRNG
from mpctl.train.layers.recompute import HostOffload, InputCheckpointer, checkpointed, recomputed
from mpctl.train.transport.group import Group
from mpctl.train.transport.timing import Collective
from tests.streams import LoggedStream
from tests.threads import run_ranks
from tests.train.layers.build import make_layer
from tests.train.layers.oracle import NO_PEERS, close, dropped, grouped, logged, numbers, saved_bytes

B, S, H = 2, 6, 4
WAYS = [
    {"partition": partition, "offload": HostOffload() if offload else None}
    for partition in (False, True)
    for offload in (False, True)
]


def _work(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    y = (x @ weight).exp()
    return (y if scale is None else y * scale).sin().exp()


def _both_ways(rank: int, size: int) -> list:
    """For every way: gradients of x, weight and a keyword tensor; the plain ones last; the log."""
    log: list[Collective] = []
    group, results = grouped(rank, size, log), []
    for way in [*WAYS, None]:
        x, w, k = (numbers(*shape, seed=i).requires_grad_() for i, shape in enumerate([(B, S, H), (H, H), (S, H)]))
        inner = x * 1
        y = _work(inner, w, scale=k) if way is None else checkpointed(_work, inner, w, scale=k, group=group, **way)
        y.backward(numbers(B, S, H, seed=9))
        results.append([y.detach(), x.grad, w.grad, k.grad])
    return [results, logged(log)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_values_and_gradients_are_bit_for_bit_the_plain_ones(size: int) -> None:
    for results, log in [_both_ways(0, 1)] if size == 1 else run_ranks(_both_ways, size):
        for result in results[:-1]:
            for actual, expected in zip(result, results[-1], strict=True):
                assert torch.equal(actual, expected)
        # the two partitioned ways gather their input once each, in backward
        whole = ("all_gather", "tp", B * S * H * 8, "float64")
        assert log == ([whole] * 2 if size > 1 else [])


@pytest.mark.parametrize(("size", "partition"), [(1, False), (1, True), (4, False), (4, True)])
@pytest.mark.parametrize("offload", [False, True])
def test_the_input_alone_is_kept_and_a_partition_keeps_its_part(size: int, partition: bool, offload: bool) -> None:
    x, w = numbers(B, S, H, seed=1).requires_grad_(), numbers(H, H)
    kept = saved_bytes(
        lambda: checkpointed(
            lambda hidden: _work(hidden, w),
            x,
            group=Group(size - 1, size),
            partition=partition,
            offload=HostOffload() if offload else None,
        )
    )
    assert kept == B * S * H * 8 // (size if partition else 1)
    assert saved_bytes(lambda: _work(x, w)) >= 2 * B * S * H * 8


def test_rank_one_of_two_keeps_the_second_half() -> None:
    x = torch.arange(8.0).view(1, 4, 2)
    kept = InputCheckpointer(Group(1, 2), partition=True).save(x)
    assert kept.tolist() == [4, 5, 6, 7]
    assert kept.untyped_storage().nbytes() == 16
    with pytest.raises(ValueError, match="6 is not divisible by 4"):
        InputCheckpointer(Group(1, 4), partition=True).save(torch.ones(1, 3, 2))


@pytest.mark.parametrize(("way", "freed"), [({"offload": HostOffload()}, True), ({}, False)])
def test_the_live_input_is_let_go(way: dict, freed: bool) -> None:
    x = numbers(B, S, H).requires_grad_()
    inner = x * 1
    storage = weakref.ref(inner.untyped_storage())
    y = checkpointed(_work, inner, numbers(H, H), **way)
    del inner
    assert (storage() is None) or not freed
    y.sum().backward()
    assert storage() is None


def test_it_runs_twice_with_a_gradient_and_once_without() -> None:
    calls = []

    def counted(x: Tensor) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return (x * 2).exp()

    x = numbers(B, S, H).requires_grad_()
    with torch.no_grad():
        assert not checkpointed(counted, x).requires_grad
    assert calls == [False]
    y = checkpointed(counted, x)
    y.sum().backward(retain_graph=True)
    assert calls == [False, True, True]
    y.sum().backward()
    assert calls == [False, True, True, True]
    close(x.grad, 4 * (2 * x.detach()).exp())


def test_an_input_without_gradient_still_trains_the_weights() -> None:
    """The first block of a model whose embedding is frozen."""
    x, w = numbers(B, S, H), numbers(H, H, seed=1).requires_grad_()
    _work(x, w).sum().backward()
    expected, w.grad = w.grad, None
    checkpointed(_work, x, w, offload=HostOffload()).sum().backward()
    assert torch.equal(w.grad, expected)


def test_core_keeps_its_arguments_and_draws_the_same_mask() -> None:
    rng = CounterRNG(1, 2, torch.arange(B))

    def attended(q: Tensor, k: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        return dropped(scores, rng, 0.5, rng_site="x") @ k

    outcomes = []
    for run in (attended, lambda q, k: recomputed(attended, q, k)):
        q, k = (numbers(B, S, H, seed=i).requires_grad_() for i in (1, 2))
        kept = saved_bytes(lambda run=run, q=q, k=k: run(q, k))
        run(q, k).sum().backward()
        outcomes.append([kept, q.grad, k.grad])
    assert outcomes[1][0] == 2 * B * S * H * 8
    assert outcomes[0][0] >= outcomes[1][0] + 2 * B * S * S * 8
    assert torch.equal(outcomes[0][1], outcomes[1][1])
    assert torch.equal(outcomes[0][2], outcomes[1][2])


def test_what_a_layer_keeps() -> None:
    """With dropout everywhere: none > selective > full, which is bsh, in parts bsh/t."""
    kept = {}
    for name, options in {
        "none": {},
        "selective": {"recompute": "selective"},
        "full": {"recompute": "full"},
        "partition": {"recompute": "full", "partition_activations": True, "tp": Group(1, 4, NO_PEERS)},
    }.items():
        layer = make_layer(16, 4, 64, rng_site="x", dropout=0.1, attention_dropout=0.1, **{"tp": Group(), **options})
        x = torch.ones(1, 64, 16, requires_grad=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torch.distributed.all_reduce", lambda *_, **__: None)
            kept[name] = saved_bytes(lambda layer=layer, x=x: layer(x, CounterRNG(1, 1, torch.arange(1))))
    bsh, scores = 64 * 16 * 4, 4 * 64 * 64
    assert kept["full"] == bsh
    assert kept["partition"] == bsh // 4
    # probabilities, mask and dropped probabilities are 4 + 1 + 4 bytes each in float32; with them
    # go the scaled query and whatever the product had to copy
    assert 9 * scores <= kept["none"] - kept["selective"] <= 9 * scores + 3 * bsh
    assert kept["selective"] > 10 * bsh


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_offload_frees_the_device() -> None:
    x = torch.randn(8, 512, 1024, device="cuda", requires_grad=True)
    w = torch.randn(1024, 1024, device="cuda").mul_(0.02)
    outcomes = []
    for offload in (False, True):
        x.grad = None
        inner = x * 1
        before = torch.cuda.memory_allocated()
        y = checkpointed(_work, inner, w, offload=HostOffload() if offload else None)
        del inner
        held = torch.cuda.memory_allocated() - before
        y.backward(torch.ones_like(y))
        assert x.grad is not None
        outcomes.append((held, x.grad.clone()))
        del y
    size = x.numel() * 4
    # the output is new; offloaded, the input's memory is given back
    assert [held for held, _ in outcomes] == [size, 0]
    assert torch.equal(outcomes[0][1], outcomes[1][1])


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
    """By hand: 3 copies out, at the third the first (2 entries) is waited for; then one back that
    is waited for, the second meanwhile, the third."""
    stream = LoggedStream()
    trained(HostOffload.of(stream, CPU))
    out = ["follow", "copy"]
    assert stream.log[:7] == [*3 * out, "join 2"]
    assert stream.log[7:] == [
        "follow",
        "copy",
        "join",  # the last layer's
        "follow",
        "copy",  # the one before, while the last is computed
        "join",
        "follow",
        "copy",
        "join",
    ]


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("ahead", [True, False])
def test_gradients_are_the_same_to_the_bit(passes: int, ahead: bool) -> None:
    offload = HostOffload(LoggedStream(), is_apart=ahead)
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


def test_an_input_is_taken_once_and_its_host_memory_is_used_again() -> None:
    offload = HostOffload.of(LoggedStream(), CPU)
    host, put = offload.put(torch.ones(3))
    where = host.data_ptr()
    assert offload.take(host, put).tolist() == [1, 1, 1]
    with pytest.raises(RuntimeError, match="was taken before: backward can run once only"):
        offload.take(host, put)
    other, _ = offload.put(torch.zeros(4))
    again, _ = offload.put(torch.zeros(3))
    assert again.data_ptr() == where != other.data_ptr()


def test_of_a_cpu_what_is_taken_is_what_was_put() -> None:
    offload = HostOffload()
    host, put = offload.put(torch.ones(3))
    assert offload.take(host, put).data_ptr() == host.data_ptr()
    assert not HostOffload.of(offload.stream, CPU).is_apart
    assert HostOffload.of(offload.stream, torch.device("meta")).is_apart


def test_the_last_two_inputs_are_held_until_they_are_copied() -> None:
    offload = HostOffload.of(LoggedStream(), CPU)
    puts, sources = [], []
    for number in range(4):
        x = torch.full((3,), float(number))
        sources.append(weakref.ref(x.untyped_storage()))
        puts.append(offload.put(x))
        del x
        held = [source() is not None for source in sources]
        assert held == [number - n < COPIES_IN_FLIGHT for n in range(number + 1)]
    assert offload.take(*puts.pop()).tolist() == [3, 3, 3]
    assert all(source() is None for source in sources)
