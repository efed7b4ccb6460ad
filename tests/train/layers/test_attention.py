"""Rotary, shared heads, masks, biases, recomputation and split sequences, against head by head."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mpctl.train.kernels.backend import KernelBackend
from mpctl.train.kernels.counter_rng import CounterRNG
from mpctl.train.kernels.rotary import Rotary
from mpctl.train.layers.attention import ParallelSelfAttention
from mpctl.train.layers.parameters import global_index, partial_kind, shard_of
from mpctl.train.transport.group import Group
from mpctl.train.transport.timing import Collective
from tests.threads import run_ranks
from tests.train.layers.build import make_attention
from tests.train.layers.oracle import (
    close,
    copies,
    dropped,
    fill,
    gradients,
    grouped,
    logged,
    numbers,
    saved_bytes,
    whole,
)

B, S, H, A, D = 2, 8, 16, 4, 4
SAMPLES = torch.tensor([12, 7])
# what each case asks of the layer; mask and bias are arguments of forward
CASES: dict[str, dict] = {
    "rotary": {"rotary": True},
    "rotary shared": {"rotary": True, "kv_heads": 2, "dropout": 0.2},
    "two kv heads": {"kv_heads": 2},
    "one kv head": {"kv_heads": 1, "dropout": 0.2, "rotary": True},
    "mask": {"causal": False, "mask": True},
    "mask dropout": {"causal": False, "mask": True, "dropout": 0.2},
    "mask causal shared": {"mask": True, "kv_heads": 1},
    "bias": {"causal": False, "bias": True},
    "bias recomputed": {"causal": False, "bias": True, "recompute": True},
    "scale": {"scale": 1.0, "kv_heads": 2},
    "scale bias": {"scale": 1.0, "causal": False, "bias": True},
    "scale dropout": {"scale": 0.2, "bias": True, "dropout": 0.2},
    "all": {"rotary": True, "mask": True, "bias": True, "dropout": 0.2, "recompute": True, "kv_heads": 2},
}


def _made(case: str, group: Group, split: bool = False, **more) -> ParallelSelfAttention:
    wanted = {k: v for k, v in CASES[case].items() if k not in ("mask", "bias", "rotary")}
    rotary = Rotary(D, 100.0) if "rotary" in CASES[case] else None
    made = make_attention(
        H,
        A,
        head_dim=D,
        tp=group,
        rng_site="x",
        rotary=rotary,
        sequence_parallel=split,
        dtype=torch.float64,
        **wanted,
        **more,
    )
    fill(made)
    return made


def _mask() -> Tensor:
    mask = numbers(B, 1, S, S, seed=21) > -0.5
    mask[0, 0, 3] = False  # a query that sees nothing
    mask[1, 0, 2, :3] = False  # one that sees nothing where the mask is also causal
    mask[1, 0, 2, 3:] = True
    return mask


def _rng() -> CounterRNG:
    return CounterRNG(5, 6, SAMPLES)


def _run(rank: int, size: int, split: bool) -> dict:
    group, results = grouped(rank, size), {}
    n = S // size if split else S
    own = slice(rank * n, (rank + 1) * n) if split else slice(S)
    for case, wanted in CASES.items():
        module = _made(case, group, split)
        heads = slice(module.local_heads.start, module.local_heads.stop)
        x = numbers(B, S, H, seed=8)[:, own].clone().requires_grad_()
        bias = numbers(1, A, S, S, seed=22)[:, heads].clone().requires_grad_()
        y = module(x, _rng(), mask=_mask() if "mask" in wanted else None, bias=bias if "bias" in wanted else None)
        y.backward(numbers(B, S, H, seed=9)[:, own])
        for parameter in module.parameters():
            if partial_kind(parameter):
                group.all_reduce(parameter.grad)
        grad = bias.grad if "bias" in wanted else torch.zeros(0)
        results[case] = [y.detach(), x.grad, gradients(module), grad]
    return results


def _rotate(x: Tensor) -> Tensor:
    theta = torch.tensor([100.0 ** (-2 * i / D) for i in range(D // 2)], dtype=torch.float64)
    turn = torch.exp(1j * torch.arange(S)[:, None] * theta)
    turned = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * turn
    return torch.cat((turned.real, turned.imag), -1)


def _formula(case: str, w: dict[str, Tensor], x: Tensor, bias: Tensor) -> Tensor:
    wanted, heads = CASES[case], []
    kv = wanted.get("kv_heads", A)
    fused = (x @ w["qkv.weight"].T + w["qkv.bias"]).unflatten(-1, (-1, D))
    seen = torch.ones(S, S).tril().bool() if wanted.get("causal", True) else torch.ones(S, S).bool()
    seen = seen & _mask()[:, 0] if "mask" in wanted else seen
    ones = torch.ones(B, A, S, S, dtype=torch.float64)
    factor = dropped(ones, _rng(), wanted.get("dropout", 0.0), rng_site="x", heads=range(A))
    for head in range(A):
        other = head * kv // A
        q, k, v = fused[:, :, head], fused[:, :, A + other], fused[:, :, A + kv + other]
        if "rotary" in wanted:
            q, k = _rotate(q), _rotate(k)
        scores = torch.einsum("bqd,bkd->bqk", q, k) * wanted.get("scale", D**-0.5)
        scores = scores + bias[:, head] if "bias" in wanted else scores
        shares = scores.exp() * seen
        shares = shares / shares.sum(-1, keepdim=True).clamp(min=1e-300) * factor[:, head]
        heads.append(shares @ v)
    return torch.cat(heads, -1) @ w["output.weight"].T + w["output.bias"]


@pytest.mark.parametrize(
    ("size", "split"),
    [
        (1, False),
        (2, False),
        (2, True),
        pytest.param(4, False, marks=pytest.mark.slow),
        pytest.param(4, True, marks=pytest.mark.slow),
    ],
)
def test_every_case_against_its_formula(size: int, split: bool) -> None:
    results = [_run(0, 1, split)] if size == 1 else run_ranks(_run, size, split)
    for case, wanted in CASES.items():
        w = copies(_made(case, Group()))
        x = numbers(B, S, H, seed=8).requires_grad_()
        bias = numbers(1, A, S, S, seed=22).requires_grad_()
        y = _formula(case, w, x, bias)
        y.backward(numbers(B, S, H, seed=9))
        parts = [result[case] for result in results]
        for place, expected in ((0, y.detach()), (1, x.grad)):
            if split:
                close(torch.cat([part[place] for part in parts], 1), expected)
            else:
                for part in parts:
                    close(part[place], expected)
        for name, leaf in w.items():
            close(whole([part[2][name] for part in parts]), leaf.grad)
        if "bias" in wanted:
            close(torch.cat([part[3] for part in parts], 1), bias.grad)


class _Counted(KernelBackend):
    def __init__(self) -> None:
        self.calls = 0

    def scaled_dot_product(self, *args, **more) -> Tensor:
        self.calls += 1
        return super().scaled_dot_product(*args, **more)


def test_the_fused_kernel_runs_where_there_is_no_attention_dropout() -> None:
    x = numbers(B, S, H)
    for case, wanted in CASES.items():
        backend = _Counted()
        module = _made(case, Group(), backend=backend)
        more = {"mask": _mask()} if "mask" in wanted else {}
        module(x, _rng(), **more)
        assert backend.calls == (0 if wanted.get("dropout") else 1), case
        module(x, None, **more)
        assert backend.calls == (1 if wanted.get("dropout") else 2), case


def test_a_recomputed_core_keeps_no_scores() -> None:
    kept = []
    for again in (False, True):
        module = make_attention(64, 4, tp=Group(), rng_site="x", dropout=0.1, recompute=again)
        fill(module)
        x, rng = torch.ones(1, 256, 64, requires_grad=True), CounterRNG(1, 2, torch.tensor([3]))
        kept.append(saved_bytes(lambda m=module, x=x, rng=rng: m(x, rng)))
    # probabilities, mask and dropped probabilities of 4 heads in float32
    assert kept[0] - kept[1] >= (4 + 1 + 4) * 4 * 256 * 256


def test_rotary_positions_may_be_given() -> None:
    module, x = _made("rotary", Group()), numbers(B, S, H)
    close(module(x, positions=range(S)), module(x))
    close(module(x, positions=range(100, 100 + S)), module(x))  # only distances count
    rows = torch.arange(S).expand(B, S).clone()
    rows[1, 4:] += 3
    moved = module(x, positions=rows)
    close(moved[0], module(x)[0])
    assert (moved[1] - module(x)[1]).abs().max() > 1e-3


def _traffic(rank: int, size: int) -> list:
    results = []
    for kv in (4, 2, 1):
        log: list[Collective] = []
        module = make_attention(H, A, head_dim=D, tp=grouped(rank, size, log), rng_site="x", kv_heads=kv)
        fill(module)
        y = module(torch.ones(B, S, H, requires_grad=True))
        forward = len(log)
        y.sum().backward()
        results.append([logged(log[:forward]), logged(log[forward:])])
    return results


def test_the_traffic_of_fewer_heads_than_ranks() -> None:
    for result in run_ranks(_traffic, 4):
        for kv, (forward, backward) in zip((4, 2, 1), result, strict=True):
            rows, heads = B * S * H * 4, 2 * B * S * kv * D * 4
            gathers = kv < 4
            kinds = [("all_gather", "tp", heads, "float32")] * gathers
            assert forward == [*kinds, ("all_reduce", "tp", rows, "float32")]
            kinds = [("reduce_scatter", "tp", heads, "float32")] * gathers
            assert backward == [*kinds, ("all_reduce", "tp", rows, "float32")]


def test_each_weight_of_shared_heads_is_held_once() -> None:
    held = []
    for rank in range(4):
        module = make_attention(H, A, head_dim=D, tp=Group(rank, 4), rng_site="x", kv_heads=1)
        held += global_index(shard_of(module.qkv.weight), 0).tolist()
        assert ", 1 of 1 kv, d=4" in repr(module)
    assert sorted(held) == list(range((A + 2) * D))


def test_heads_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(ValueError, match=r"kv_heads: 2 is not divisible by 4 .*use one of 1, 2 r"):
        make_attention(24, 8, tp=Group(0, 4), rng_site="x", kv_heads=2, head_dim=3)
    with pytest.raises(ValueError, match=r"kv_heads: 3 is not divisible by 2 "):
        make_attention(48, 12, tp=Group(0, 2), rng_site="x", kv_heads=3)
