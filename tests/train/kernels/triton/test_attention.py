"""One kernel attends as the step-by-step path does: results, gradients, dropout bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mpctl.train.kernels.attention import AttentionVariant, slopes
from mpctl.train.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.train.kernels.counter_rng import CounterRNG, DropoutMask, keep_mask
from mpctl.train.kernels.triton.attention import fused_attention, refusal
from mpctl.train.kernels.triton.backend import TritonKernels
from mpctl.train.layers.attention import AttentionConfig, AttentionCore
from mpctl.train.layers.shard_context import ShardContext

B, A, K, Q, S, D, START = 2, 2, 1, 40, 72, 24, 32
HEADS = range(3, 3 + A)
VARIANTS: dict[str, dict[str, Any]] = {
    "causal": {},
    "both ways": {"is_causal": False},
    "dropout": {"p": 0.3},
    "dropout both ways": {"p": 0.3, "is_causal": False},
    "window": {"window": 20},
    "slopes": {"slopes": True, "p": 0.1},
    "mask": {"mask": True, "p": 0.2},
    "mask a head": {"mask": True, "each": True, "is_causal": False},
    "bias": {"bias": True, "p": 0.2, "is_causal": False},
    "bias a sample": {"bias": True, "each": True},
    "all": {"mask": True, "bias": True, "slopes": True, "window": 33, "p": 0.4, "scale": 1.0},
}
# Blocks that are seen in full, keys behind a query, and every branch at once.
QUICK = ("causal", "dropout both ways", "all")


def numbers(*shape: int, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def tensors(dtype: torch.dtype, device: torch.device, kv_heads: int = K) -> list[Tensor]:
    """Query, key and value as a layer makes them, by position and then by head."""
    shapes = ((Q, A), (S, kv_heads), (S, kv_heads))
    return [
        numbers(B, *shape, D, dtype=dtype, device=device, seed=i).transpose(1, 2).requires_grad_()
        for i, shape in enumerate(shapes)
    ]


def variant(
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_causal: bool = True,
    p: float = 0.0,
    scale: float | None = None,
    window: int | None = None,
    each: bool = False,
    mask: bool = False,
    bias: bool = False,
    slopes: bool = False,
) -> AttentionVariant:
    """A block of Q rows from position START, whose mask lets row 3 of sample 0 see nothing."""
    rows = range(START, START + Q)
    outer = (B, A) if each else (1, 1)
    seen = numbers(*outer, Q, S, dtype=torch.float32, device=device, seed=7) > -1
    seen[0, :, 3] = False
    rng = CounterRNG(1, 2, torch.tensor([5, 9], device=device))
    of_probabilities = {"rng_site": "x", "heads": HEADS, "rows": rows}
    return AttentionVariant(
        rows,
        is_causal,
        scale,
        seen if mask else None,
        numbers(B if each else 1, A, Q, S, dtype=dtype, device=device, seed=8).requires_grad_() if bias else None,
        window,
        alibi(device) if slopes else None,
        rng.mask((B, A, Q, S), p, **of_probabilities) if p else None,
    )


def alibi(device: torch.device) -> Tensor:
    return slopes(8, HEADS, device)


def passes(kernels: KernelBackend, inputs: list[Tensor], of: AttentionVariant) -> list[Tensor]:
    """The result, and the gradients of query, key, value and bias."""
    leaves = [*inputs, *([] if of.bias is None else [of.bias])]
    query, key, value = inputs
    result = kernels.attention(query, key, value, of)
    grad = numbers(*result.shape, dtype=result.dtype, device=result.device, seed=9)
    return [result.detach(), *torch.autograd.grad(result, leaves, grad)]


class Fused(KernelBackend):
    """The kernel for all that it is given, float64 too, which the interpreter can do."""

    def attention(self, query: Tensor, key: Tensor, value: Tensor, variant: AttentionVariant):
        return fused_attention(query, key, value, variant)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in VARIANTS]
)
@pytest.mark.quick(1)
def test_results_and_gradients_are_those_of_torch(name: str, device: torch.device) -> None:
    dtype, bound = (torch.float64, 1e-12) if device.type == "cpu" else (torch.float32, 1e-4)
    of = variant(dtype, device, **VARIANTS[name])
    inputs = tensors(dtype, device)
    for ours, theirs in zip(passes(Fused(), inputs, of), passes(TORCH_BACKEND, inputs, of), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound)


@pytest.mark.parametrize("columns", [16, 32])
def test_values_of_another_head_size(columns: int, device: torch.device) -> None:
    """The kernel has one head size: narrower values, or queries and keys, are padded."""
    dtype, bound = (torch.float64, 1e-12) if device.type == "cpu" else (torch.float32, 1e-4)
    of = variant(dtype, device, p=0.3)
    query, key, _ = tensors(dtype, device)
    value = numbers(B, K, S, columns, dtype=dtype, device=device, seed=2).requires_grad_()
    inputs = [query, key, value]
    for ours, theirs in zip(passes(Fused(), inputs, of), passes(TORCH_BACKEND, inputs, of), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound)


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [
        pytest.param(torch.float32, 1e-5, marks=pytest.mark.slow),
        pytest.param(torch.float16, 4e-3, marks=pytest.mark.slow),
        (torch.bfloat16, 3e-2),
    ],
)
def test_dtypes_that_are_trained(dtype: torch.dtype, bound: float, device: torch.device) -> None:
    """Against float64 of the same values: rounded inputs, exact between."""
    narrow, wide = (variant(kind, device, p=0.2, slopes=True) for kind in (dtype, torch.float64))
    inputs = tensors(dtype, device)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    for ours, theirs in zip(passes(TritonKernels(), inputs, narrow), passes(TORCH_BACKEND, exact, wide), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), theirs, rtol=bound, atol=bound)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [127, 128, 150])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
def test_rows_about_a_tile_in_16_bits(dtype: torch.dtype, bound: float, rows: int, device: torch.device) -> None:
    """A tile has 128 rows or keys: one row less, all of them, some of a second, behind as many keys
    as there are rows and 5 more; heads of 80, which fill no block of columns. Against float64."""
    shapes = ((rows, A), (rows + 5, K), (rows + 5, K))
    inputs = [
        numbers(1, *shape, 80, dtype=dtype, device=device, seed=i).transpose(1, 2).requires_grad_()
        for i, shape in enumerate(shapes)
    ]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    rng = CounterRNG(1, 2, torch.tensor([5], device=device))
    at = range(5, 5 + rows)
    mask = rng.mask((1, A, rows, rows + 5), 0.1, rng_site="x", heads=HEADS, rows=at)
    of = AttentionVariant(at, is_causal=True, dropout=mask)
    for ours, theirs in zip(passes(TritonKernels(), inputs, of), passes(TORCH_BACKEND, exact, of), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), theirs, rtol=bound, atol=bound)


def test_every_pair_is_kept_or_dropped_as_the_hash_says(device: torch.device) -> None:
    """Of scores 0 and values that are the unit matrix the result is the mask itself, over
    (1 - p) s."""
    rows, s, p = range(100, 140), 64, 0.4
    zero = torch.zeros(B, A, len(rows), s, device=device)
    unit = torch.eye(s, device=device).expand(B, A, s, s)
    rng = CounterRNG(3, 4, torch.tensor([2**33 + 1, 7], device=device))
    for key in (None, torch.tensor(-12345, dtype=torch.int32, device=device)):
        mask = rng.mask(zero.shape, p, rng_site="x", heads=range(5, 5 + A), rows=rows)
        if key is not None:
            mask = DropoutMask(key, p, mask.samples, rows, range(s), range(5, 5 + A))
        result = fused_attention(zero, unit, unit, AttentionVariant(rows, dropout=mask))
        kept = keep_mask(mask.key, p, mask.coordinates())
        assert torch.equal(result != 0, kept)
        torch.testing.assert_close(result, kept / (1 - p) / s)
        assert 0.5 < kept.double().mean() < 0.7


def test_a_row_that_sees_nothing_gives_zeros_and_takes_no_gradient(device: torch.device) -> None:
    seen = torch.ones(1, 1, Q, S, dtype=torch.bool, device=device)
    seen[..., 3, :] = False
    inputs = tensors(torch.float32, device)
    result, dquery, *_ = passes(Fused(), inputs, AttentionVariant(range(Q), mask=seen))
    for x in (result, dquery):
        assert not x[:, :, 3].any() and x[:, :, 4].any() and x.isfinite().all()


def test_results_lie_as_the_next_product_reads_them(device: torch.device) -> None:
    inputs, of = tensors(torch.float32, device), variant(torch.float32, device, p=0.1)
    result, *gradients = passes(TritonKernels(), inputs, of)
    for x in (result, *gradients):
        assert x.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("name", ["dropout", "window", "bias"])
def test_context_parallel_ranks_attend_as_the_whole_does(name: str, device: torch.device) -> None:
    """Each block of rows against the prefix that it sees, beside one block of all rows."""
    settings = {"dropout": {"dropout": 0.3}, "window": {"window": 9}, "bias": {}}[name]
    q, k, v = (x.detach()[..., :32, :] for x in tensors(torch.float32, device))
    bias = numbers(1, A, 32, 32, dtype=torch.float32, device=device, seed=5)
    given = {"bias": bias} if name == "bias" else {}
    rng = CounterRNG(5, 6, torch.tensor([4, 8], device=device))
    context = ShardContext(backend=TritonKernels())
    core = AttentionCore(AttentionConfig(A * D, A, kv_heads=K, **settings), context, "x")
    whole = core(q, k, v, rng, **given)
    for rows in (range(8, 16), range(24, 32)):
        own = slice(rows.start, rows.stop)
        part = {"bias": bias[..., own, : rows.stop]} if given else {}
        keys = slice(rows.stop)
        ours = core(q[..., own, :], k[..., keys, :], v[..., keys, :], rng, rows=rows, **part)
        torch.testing.assert_close(ours, whole[..., own, :], rtol=1e-5, atol=1e-6)


def test_recomputation_is_for_what_keeps_pairs(device: torch.device) -> None:
    inputs = tensors(torch.float32, device)
    query, key, value = inputs
    with_dropout = variant(torch.float32, device, p=0.1)
    plain = variant(torch.float32, device)
    assert TORCH_BACKEND.keeps_pairs(query, key, value, with_dropout)
    assert not TritonKernels().keeps_pairs(query, key, value, with_dropout)
    assert not TORCH_BACKEND.keeps_pairs(query, key, value, plain)
    doubles = query.double(), key.double(), value.double()
    assert TritonKernels().keeps_pairs(*doubles, with_dropout)


def test_what_the_kernel_refuses_is_said(device: torch.device) -> None:
    of = variant(torch.float32, device, p=0.1)
    query, key, value = tensors(torch.float32, device)
    assert refusal(query, key, value, of) is None
    doubles = query.double(), key.double(), value.double()
    assert "64 bits" in (refusal(*doubles, of) or "")
    wide = torch.zeros(1, 1, 4, 264, device=device)
    assert "264" in (refusal(wide, wide, wide, AttentionVariant(range(4))) or "")
    assert "264" in (refusal(query, key, wide, AttentionVariant(range(4))) or "")
    scattered = variant(torch.float32, device, p=0.1)
    assert scattered.dropout is not None
    heads = torch.tensor([0, 4], device=device)
    mask = DropoutMask(1, 0.1, scattered.dropout.samples, of.rows, range(S), heads)
    assert "scattered" in (refusal(query, key, value, AttentionVariant(of.rows, dropout=mask)) or "")


def test_a_group_of_one_sees_the_same(device: torch.device) -> None:
    """Shared key-value heads are those heads repeated."""
    inputs = tensors(torch.float32, device)
    repeated = [inputs[0], *(x.repeat_interleave(A // K, dim=1) for x in inputs[1:])]
    of = variant(torch.float32, device, p=0.3)
    ours = [TritonKernels().attention(q, k, v, of) for q, k, v in (inputs, repeated)]
    assert torch.equal(*ours)


def test_the_operation_is_what_torch_was_told(device: torch.device) -> None:
    """Its schema, its gradient and its fake results, as torch.library.opcheck holds them."""
    query, key, value = tensors(torch.float32, device)
    samples = torch.tensor([5, 9], device=device)
    given = (None, None, alibi(device), None, 17, samples, [3, START], True, 20, 0.1, 0.2)
    wanted = ("test_schema", "test_autograd_registration", "test_faketensor")
    operation = torch.ops.mpctl.attention.default
    found = torch.library.opcheck(operation, (query, key, value, *given), test_utils=wanted)
    assert set(found.values()) == {"SUCCESS"}
