"""A sequence split over cp against the whole: outputs, gradients, dropout, traffic, no big mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from mpctl.train.kernels.attention import AttentionVariant
from mpctl.train.kernels.backend import KernelBackend
from mpctl.train.kernels.counter_rng import CounterRNG
from mpctl.train.kernels.masks import partly_bidirectional_mask
from mpctl.train.kernels.partial_attention import Gradients, KeyPart, PartialKernel, use_flash_attention_3
from mpctl.train.kernels.rotary import Rotary
from mpctl.train.layers.attention import AttentionConfig, AttentionCore, ParallelSelfAttention
from mpctl.train.layers.context_parallel import context_blocks, context_positions, gather_context
from mpctl.train.layers.relative_bias import RelativeBias
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.transport.group import Group, Pending
from mpctl.train.transport.timing import Collective
from tests.threads import run_ranks
from tests.train.layers.build import make_attention
from tests.train.layers.oracle import axes, close, context_split, dropped, fill, grouped, logged, numbers

B, S, H, A, K, D = 2, 16, 16, 4, 2, 4
SAMPLES = torch.tensor([12, 7])
PREFIX = torch.tensor([5, 11])
CASES: dict[str, dict] = {
    "causal": {},
    "rotary": {"rotary": Rotary(D, 100.0), "kv_heads": K},
    "dropout": {"rotary": Rotary(D, 100.0), "dropout": 0.3},
    "dropout recomputed": {"dropout": 0.3, "recompute": True, "kv_heads": K},
    "both ways": {"causal": False},
    "both ways dropout": {"causal": False, "dropout": 0.3},
    "glm": {"causal": False, "mask": True, "dropout": 0.3},
    "causal mask": {"mask": True},
    "bias": {"bias": True},
}


def _made(case: str, tp: Group, cp: Group) -> tuple[ParallelSelfAttention, RelativeBias]:
    wanted = {k: v for k, v in CASES[case].items() if k not in ("mask", "bias")}
    made = make_attention(H, A, head_dim=D, tp=tp, cp=cp, rng_site="x", dtype=torch.float64, **wanted)
    bias = RelativeBias(8, 12, A, ShardContext(tp=tp, dtype=torch.float64), bidirectional=True)
    fill(made)
    fill(bias)
    return made, bias


def _case(case: str, tp: Group, cp: Group) -> list:
    module, relative = _made(case, tp, cp)
    x = context_split(numbers(B, S, H, seed=8), cp).requires_grad_()
    rows = context_positions(S, cp.size, cp.rank)
    wanted = CASES[case]
    mask = partly_bidirectional_mask(PREFIX, S, queries=rows) if "mask" in wanted else None
    bias = relative.at(rows, range(S)) if "bias" in wanted else None
    y = module(x, CounterRNG(5, 6, SAMPLES), mask=mask, bias=bias)
    y.backward(context_split(numbers(B, S, H, seed=9), cp))
    weights = [*module.parameters(), *([relative.weight] if "bias" in wanted else [])]
    return [y.detach(), x.grad, [weight.grad for weight in weights]]


def _run(rank: int, size: int) -> dict:
    cp = grouped(rank, size, name="cp")
    return {case: _case(case, Group(), cp) for case in CASES}


def _run_with_tp(rank: int, size: int) -> dict:
    tp, cp = axes(rank, 2, 2)
    return {case: _case(case, tp, cp)[:2] for case in CASES}


def _joined(pieces: list[Tensor], c: int) -> Tensor:
    whole = torch.empty(B, S, *pieces[0].shape[2:], dtype=pieces[0].dtype)
    for rank, piece in enumerate(pieces):
        whole[:, context_positions(S, c, rank)] = piece
    return whole


@pytest.mark.parametrize("size", [2, 4])
def test_split_sequences_against_the_whole(size: int) -> None:
    whole, results = _run(0, 1), run_ranks(_run, size)
    for case in CASES:
        parts = [result[case] for result in results]
        for place in (0, 1):
            close(_joined([part[place] for part in parts], size), whole[case][place])
        for grads, expected in zip(zip(*(part[2] for part in parts), strict=True), whole[case][2], strict=True):
            close(torch.stack(grads).sum(0), expected)


def test_the_sequence_and_the_heads_split_at_once() -> None:
    whole, results = _run(0, 1), run_ranks(_run_with_tp, 4)
    for case in CASES:
        for tp in range(2):
            for place in (0, 1):
                pieces = [results[tp][case][place], results[tp + 2][case][place]]
                close(_joined(pieces, 2), whole[case][place])


def test_dropout_and_masks_do_act() -> None:
    got = _run(0, 1)
    for one, other in (("both ways", "both ways dropout"), ("causal", "causal mask")):
        same = torch.equal(got[one][0], got[other][0])
        assert same == (other == "causal mask")  # a prefix adds nothing to what is causal anyway
    assert (got["both ways"][0] - got["glm"][0]).abs().max() > 1e-2


def _traffic(rank: int, size: int) -> list:
    log: list[Collective] = []
    cp = grouped(rank, size, log, "cp")
    module, _ = _made("dropout recomputed", Group(), cp)
    y = module(context_split(numbers(B, S, H), cp).requires_grad_(), CounterRNG(5, 6, SAMPLES))
    forward = len(log)
    y.sum().backward()
    return [logged(log[:forward]), logged(log[forward:])]


def test_one_gather_forward_and_one_reduce_scatter_backward() -> None:
    message = 2 * B * K * S * D * 8
    for forward, backward in run_ranks(_traffic, 2):
        assert forward == [("all_gather", "cp", message, "float64")]
        assert backward == [("reduce_scatter", "cp", message, "float64")]


class Recorded(KernelBackend):
    """Notes each call of a kernel: queries, keys, and whether it was causal or backward."""

    def __init__(self, seen: list[Any] | None = None) -> None:
        self.seen: list[Any] = [] if seen is None else seen

    def partial_kernel(self, *tensors_and_scale) -> PartialKernel | None:
        found, seen = super().partial_kernel(*tensors_and_scale), self.seen
        assert found is not None

        class Kernel(PartialKernel):
            def forward(self, query: Tensor, key: Tensor, value: Tensor, **how) -> KeyPart:
                seen.append((query.shape[-2], key.shape[-2], how["is_causal"]))
                return super().forward(query, key, value, **how)

            def backward(self, grad: Tensor, query: Tensor, key: Tensor, *rest, **how) -> Gradients:
                seen.append((-query.shape[-2], key.shape[-2], how["is_causal"]))
                return super().backward(grad, query, key, *rest, **how)

        return Kernel(*found)

    def scaled_dot_product(self, query: Tensor, *args, **more) -> Tensor:
        raise AssertionError("a mask of pairs, or a kernel of its own for one")


@dataclass(frozen=True)
class Told(Pending):
    seen: list[Any] = field(default_factory=list)

    def wait(self) -> Tensor:
        self.seen.append("wait")
        return super().wait()


def watched(group: Group, seen: list[Any]) -> Group:
    """The group, which notes when a message starts and when it is waited for."""

    def told(name: str) -> Callable[..., Pending]:
        start = getattr(group, name)

        def started(*arguments: Any, **how: Any) -> Pending:
            seen.append(name)
            return Told(start(*arguments, **how).wait(), seen=seen)

        return started

    for name in ("start_all_gather", "start_reduce_scatter"):
        object.__setattr__(group, name, told(name))
    return group


def _calls(rank: int, size: int) -> list[Any]:
    seen: list[Any] = []
    cp = watched(grouped(rank, size, name="cp"), seen)
    core = AttentionCore(AttentionConfig(H, A), ShardContext(cp=cp, backend=Recorded(seen)), "x")
    core.split(*(numbers(B, A, S // size, D).requires_grad_() for _ in range(3))).sum().backward()
    return seen


@pytest.mark.parametrize("c", [2, 4])
def test_blocks_are_diagonals_and_prefixes_and_no_mask_is_made(c: int) -> None:
    """The diagonals while keys arrive, in backward while gradients leave; equal work on all
    ranks."""
    n = S // (2 * c)
    for rank, seen in enumerate(run_ranks(_calls, c)):
        first, last = (rank * n, False), ((2 * c - 1 - rank) * n, False)
        own, back, ahead = [(n, n, True)] * 2, [(-n, n, True)] * 2, [(n, *first)] * (rank > 0)
        ahead += [(n, *last)]
        prefixes = [(-n, *last), *[(-n, *first)] * (rank > 0)]
        assert seen[: 4 + len(ahead)] == ["start_all_gather", *own, "wait", *ahead]
        assert seen[4 + len(ahead) :] == [*prefixes, "start_reduce_scatter", *back, "wait"]
        assert sum(keys / (1 + is_causal) for _, keys, is_causal in own + ahead) == 2 * c * n


def test_the_last_rows_of_keys_that_are_all_there() -> None:
    """As latent attention has them, and a cache, against those of the whole square."""
    query, key, value = (numbers(B, n, S, D, seed=i) for i, n in enumerate((A, K, K)))
    rows, backend = range(5, S), Recorded()
    tensors = [x.requires_grad_() for x in (query, key, value)]
    tail = backend.attention(query[:, :, 5:], key, value, AttentionVariant(rows, is_causal=True))
    assert backend.seen == [(S - 5, S - 5, True), (S - 5, 5, False)]
    variant = AttentionVariant(range(S), is_causal=True)
    whole = KernelBackend().attention(query, key, value, variant)[:, :, 5:]
    close(tail, whole)
    got, expected = (torch.autograd.grad(y.square().sum(), tensors) for y in (tail, whole))
    for one, other in zip(got, expected, strict=True):
        close(one, other)


def test_flash_attention_3_is_taken_on_a_hopper_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    activated: list[str] = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda on: activated.append(on))
    assert not use_flash_attention_3((9, 0)) and not activated  # its module is not installed
    monkeypatch.setattr("mpctl.train.kernels.partial_attention.find_spec", lambda name: name)
    assert not use_flash_attention_3((10, 0)) and not use_flash_attention_3((8, 0))
    assert use_flash_attention_3((9, 0)) and activated == ["FA3", False]


def test_positions_by_hand() -> None:
    assert context_positions(8, 2, 0).tolist() == [0, 1, 6, 7]
    assert context_positions(8, 2, 1).tolist() == [2, 3, 4, 5]
    assert context_blocks(8, 1, 0) == (range(8),)
    tokens = torch.arange(16).view(2, 8)
    assert context_split(tokens, Group(1, 2)).tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    for c in (1, 2, 4):
        held = torch.cat([context_positions(16, c, r) for r in range(c)])
        assert held.sort().values.tolist() == list(range(16))
    with pytest.raises(ValueError, match="12 is not divisible by 8"):
        context_blocks(12, 4, 0)
    odd = torch.ones(1, 1, 3, 2)
    with pytest.raises(ValueError, match="6 is not divisible by 4"):
        gather_context(odd, odd, Group(0, 2))


def test_noise_of_scattered_rows_and_columns_is_the_wholes() -> None:
    rng, rows = CounterRNG(1, 2, torch.arange(3)), torch.tensor([0, 1, 14, 15])
    x = torch.rand(3, S, 6) + 0.5
    y = dropped(x, rng, 0.4, rng_site="x")
    assert torch.equal(dropped(x[:, rows], rng, 0.4, rng_site="x", rows=rows), y[:, rows])
    columns = torch.tensor([5, 0, 2])
    z = dropped(x[:, :, columns], rng, 0.4, rng_site="x", columns=columns)
    assert torch.equal(z, y[:, :, columns])
    shares = torch.rand(3, 4, S, S) + 0.5
    y = dropped(shares, rng, 0.4, rng_site="x", heads=range(4))
    keys = torch.tensor([9, 3, 4, 11, 0])
    part = shares[:, 1:3][:, :, rows][..., keys]
    z = dropped(part, rng, 0.4, rng_site="x", heads=range(1, 3), rows=rows, columns=keys)
    assert torch.equal(z, y[:, 1:3][:, :, rows][..., keys])
    z = dropped(shares[..., 4:9], rng, 0.4, rng_site="x", heads=range(4), columns=range(4, 9))
    assert torch.equal(z, y[..., 4:9])
    with pytest.raises(ValueError, match="names 4 places, the tensor has 16"):
        dropped(x, rng, 0.4, rng_site="x", rows=rows)
