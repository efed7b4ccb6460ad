"""The layer over tp x sequence parallelism x recomputation: one loss surface, counted messages."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from mpctl.core.sharding import local_range
from mpctl.train.kernels.counter_rng import CounterRNG
from mpctl.train.layers.parameters import partial_kind
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.transport.group import Group
from mpctl.train.transport.timing import Collective
from tests.threads import run_ranks
from tests.train.layers.build import make_layer
from tests.train.layers.oracle import close, dropped, fill, gradients, grouped, logged, numbers, whole

B, S, H, A = 2, 8, 16, 4
SAMPLES = torch.tensor([12, 7])
# sequence_parallel, recompute, partition
KINDS = [
    (False, "none", False),
    (False, "selective", False),
    (False, "full", False),
    (False, "full", True),
    (True, "none", False),
    (True, "selective", False),
    (True, "full", False),
]


def _layer(group: Group, kind: tuple[bool, str, bool], p: float, norm: str = "layernorm"):
    split, recompute, partition = kind
    layer = make_layer(
        H,
        A,
        4 * H,
        tp=group,
        rng_site="layers.1",
        dropout=p,
        attention_dropout=p,
        norm=norm,
        sequence_parallel=split,
        recompute=recompute,
        partition_activations=partition,
        offload_activations=partition,
        dtype=torch.float64,
    )
    fill(layer)
    return layer


def _part(x: Tensor, group: Group, split: bool) -> Tensor:
    if not split:
        return x.clone()
    own = local_range(S, parts=group.size, index=group.rank)
    return x[:, own.start : own.stop].clone()


def _one(rank: int, size: int, kind: tuple[bool, str, bool], p: float, norm: str) -> list:
    """Output, input gradient, weight gradients after the sum of partial ones, and the log."""
    log: list[Collective] = []
    group, split = grouped(rank, size, log), kind[0]
    layer = _layer(group, kind, p, norm)
    x = _part(numbers(B, S, H, seed=8), group, split).requires_grad_()
    y = layer(x, CounterRNG(5, 6, SAMPLES))
    forward = len(log)
    y.backward(_part(numbers(B, S, H, seed=9), group, split))
    own = logged(log)
    alone = {n: q.grad.clone() for n, q in layer.named_parameters() if partial_kind(q)}
    for parameter in layer.parameters():
        if partial_kind(parameter):
            parameter.grad = group.all_reduce(parameter.grad)
    return [y.detach(), x.grad, gradients(layer), own[:forward], own[forward:], alone]


def _all(rank: int, size: int) -> list:
    cases = [(kind, p, norm) for kind in KINDS for p, norm in ((0.1, "layernorm"), (0, "rmsnorm"))]
    return [_one(rank, size, *case) for case in cases]


@pytest.fixture(scope="module", params=[1, 2, 4])
def results(request: pytest.FixtureRequest) -> list:
    return [_all(0, 1)] if request.param == 1 else run_ranks(_all, request.param)


def _cases(results: list) -> list:
    """(kind, dropout, [one rank's outcome, ..]) for every case."""
    turned = list(zip(*results, strict=True))
    return [(kind, (0.1, 0)[i], turned[2 * k + i]) for k, kind in enumerate(KINDS) for i in (0, 1)]


def test_outputs_and_gradients_equal_the_unsharded_layer(results: list) -> None:
    plain = (False, "none", False)
    expected = {0.1: _one(0, 1, plain, 0.1, "layernorm"), 0: _one(0, 1, plain, 0, "rmsnorm")}
    for (split, *_), p, ranks in _cases(results):
        for which in (0, 1):
            parts = [rank[which] for rank in ranks]
            assert split or all(torch.equal(part, parts[0]) for part in parts)
            close(torch.cat(parts, 1) if split else parts[0], expected[p][which])
        for name, (reference, *_) in expected[p][2].items():
            close(whole([rank[2][name] for rank in ranks]), reference)


def test_partial_parameters_are_named_and_do_need_their_sum(results: list) -> None:
    biases = ["attention.output.bias", "mlp.down.bias"]
    norms = [f"{n}_norm.{w}" for n in ("attention", "mlp") for w in ("weight", "bias")]
    for (split, *_), p, ranks in _cases(results):
        names = {n for n in norms + biases if p or not n.endswith("norm.bias")}
        for rank in ranks:
            assert set(rank[5]) == (names if split and len(ranks) > 1 else set())
            if len(ranks) > 1:
                for name, alone in rank[5].items():
                    assert (alone - rank[2][name][0]).abs().max() > 1e-3, name


def _law(kind: tuple[bool, str, bool], p: float) -> tuple[Counter, Counter]:
    """Collectives of a layer by kind, forward and backward, as layer.py states them."""
    split, recompute, partition = kind
    if split:
        forward = Counter(all_gather=2, reduce_scatter=2)
        backward = Counter(all_gather=4, reduce_scatter=2)
    else:
        forward, backward = Counter(all_reduce=2), Counter(all_reduce=2)
    if recompute == "full":
        backward = backward + forward
        if not p:
            backward["reduce_scatter" if split else "all_reduce"] -= 1
    if partition:
        backward["all_gather"] += 1
    return forward, backward


def test_every_message_is_counted_by_the_law(results: list) -> None:
    for kind, p, ranks in _cases(results):
        for rank in ranks:
            for log, law in zip(rank[3:5], _law(kind, p), strict=True):
                found = Counter(entry[0] for entry in log)
                assert found == (law if len(ranks) > 1 else Counter()), (kind, p)
                assert {entry[1:] for entry in log} <= {("tp", B * S * H * 8, "float64")}


def test_dropout_masks_follow_the_global_rows() -> None:
    """A layer that took its rows to be the first ones would draw rank 0's mask on every rank."""
    layer = _layer(Group(1, 2), (True, "none", False), 0.5)
    ones, rng = torch.ones(B, S, H, dtype=torch.float64), CounterRNG(5, 6, SAMPLES)
    part = ones[:, : S // 2]
    own = layer._dropout_add(part, rng.within("layers.1"), "mlp", torch.zeros_like(part))
    full = dropped(ones, rng, 0.5, rng_site="layers.1.mlp")
    assert torch.equal(own, full[:, S // 2 :])
    assert not torch.equal(own, full[:, : S // 2])


def test_rows_under_context_and_sequence_parallelism_by_hand() -> None:
    # s=16, c=2: rank 1 of cp holds blocks 1 and 2, positions 4..12; rank 1 of tp the later half
    context = ShardContext(Group(1, 2), Group(1, 2, name="cp"), sequence_parallel=True)
    rows = context.positions(4, torch.device("cpu"))
    assert rows.tolist() == [8, 9, 10, 11]


def test_bad_combinations_are_refused_in_words() -> None:
    common = {"tp": Group(), "rng_site": "x"}
    with pytest.raises(ValueError, match=r"recompute none: .*\(set recompute to full\)"):
        make_layer(H, A, H, partition_activations=True, **common)
    with pytest.raises(ValueError, match=r"1/t already \(drop one\)"):
        make_layer(H, A, H, partition_activations=True, recompute="full", sequence_parallel=True, **common)
    with pytest.raises(ValueError, match="'some' is not one of none, selective, full"):
        make_layer(H, A, H, recompute="some", **common)
    with pytest.raises(ValueError, match="'batch' is not one of layernorm, rmsnorm"):
        make_layer(H, A, H, norm="batch", **common)


def test_repr_tells_what_is_unusual() -> None:
    text = repr(_layer(Group(), (True, "full", False), 0.0))
    assert "rng_site=layers.1, dropout=0.0, sequence_parallel, recompute=full\n" in text
    assert "recompute" not in repr(_layer(Group(), (False, "none", False), 0.0))
