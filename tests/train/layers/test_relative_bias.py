"""T5's buckets against tables made by hand from the paper's formula; the split bias."""

from __future__ import annotations

import pytest
import torch

from mpctl.train.layers.relative_bias import RelativeBias, relative_buckets
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.transport.group import Group
from tests.threads import run_ranks
from tests.train.layers.oracle import close, fill, gradients, grouped, logged, numbers, whole

# 32 buckets to distance 128. Causal: exact to 15, then 16 + floor(16 log(n/16) / log 8): a new
# bucket at n = 16 * 8^(j/16) = 16, 18.2, 20.7, 23.6, 26.9, 30.6, 34.9, 39.7, 45.3, ...
CAUSAL = {
    -5: 0,
    0: 0,
    1: 1,
    15: 15,
    16: 16,
    18: 16,
    19: 17,
    20: 17,
    21: 18,
    23: 18,
    24: 19,
    26: 19,
    27: 20,
    30: 20,
    31: 21,
    32: 21,
    34: 21,
    35: 22,
    39: 22,
    40: 23,
    45: 23,
    46: 24,
    112: 30,
    113: 31,
    128: 31,
    5000: 31,
}
# Both ways: 16 a side, exact to 7, then 8 + floor(8 log(n/8) / log 16): a new bucket at
# n = 8 * 2^(j/2) = 8, 11.3, 16, 22.6, 32, 45.3, 64, 90.5. Keys ahead count from 16.
SIDE = {
    0: 0,
    1: 1,
    7: 7,
    8: 8,
    11: 8,
    12: 9,
    15: 9,
    16: 10,
    22: 10,
    23: 11,
    31: 11,
    32: 12,
    45: 12,
    46: 13,
    63: 13,
    64: 14,
    90: 14,
    91: 15,
    127: 15,
    128: 15,
    900: 15,
}


def test_causal_buckets_by_hand() -> None:
    back = torch.tensor(list(CAUSAL))
    found = relative_buckets(-back, buckets=32, max_distance=128, bidirectional=False)
    assert dict(zip(CAUSAL, found.tolist(), strict=True)) == CAUSAL


def test_bidirectional_buckets_by_hand() -> None:
    back = torch.tensor(list(SIDE))
    law = {"buckets": 32, "max_distance": 128, "bidirectional": True}
    assert relative_buckets(-back, **law).tolist() == list(SIDE.values())
    ahead = [value + 16 if back else 0 for back, value in SIDE.items()]
    assert relative_buckets(back, **law).tolist() == ahead


def _run(rank: int, size: int) -> list:
    results = []
    for bidirectional in (True, False):
        log: list = []
        bias = RelativeBias(
            8, 20, 4, ShardContext(tp=grouped(rank, size, log), dtype=torch.float64), bidirectional=bidirectional
        )
        fill(bias)
        heads = bias.local_heads
        y = bias(5, 9, 2)
        y.backward(numbers(1, 4, 5, 9, seed=2)[:, heads.start : heads.stop])
        results.append([y.detach(), gradients(bias), logged(log)])
    return results


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_split_bias_and_its_gradient(size: int) -> None:
    results = [_run(0, 1)] if size == 1 else run_ranks(_run, size)
    for case, bidirectional in enumerate((True, False)):
        table, weight = numbers(8, 4, seed=3) * 0.3, numbers(1, 4, 5, 9, seed=2)
        expected, grad = torch.empty(1, 4, 5, 9).double(), torch.zeros(8, 4).double()
        for q in range(5):
            for k in range(9):
                place = relative_buckets(
                    torch.tensor(k - q - 2), buckets=8, max_distance=20, bidirectional=bidirectional
                )
                expected[0, :, q, k] = table[place]
                grad[place] += weight[0, :, q, k]
        parts = [result[case] for result in results]
        close(torch.cat([part[0] for part in parts], 1), expected)
        close(whole([part[1]["weight"] for part in parts]), grad)
        assert all(part[2] == [] for part in parts)


def test_any_positions_are_rows_of_the_whole() -> None:
    bias = RelativeBias(8, 20, 4, ShardContext(tp=Group(), dtype=torch.float64), bidirectional=True)
    fill(bias)
    rows = torch.tensor([0, 1, 6, 7])
    assert torch.equal(bias.at(rows, range(8)), bias(8, 8)[:, :, rows])


def test_bad_tables_are_refused() -> None:
    with pytest.raises(ValueError, match="2 relative buckets"):
        RelativeBias(2, 128, 4, ShardContext(tp=Group()), bidirectional=True)
    with pytest.raises(ValueError, match="max_distance 8 must exceed the 8 exact"):
        RelativeBias(32, 8, 4, ShardContext(tp=Group()), bidirectional=True)
    with pytest.raises(ValueError, match="6 is not divisible by 4"):
        RelativeBias(32, 128, 6, ShardContext(tp=Group(0, 4)), bidirectional=True)
    text = repr(RelativeBias(32, 128, 6, ShardContext(tp=Group(1, 2)), bidirectional=False))
    assert text == "RelativeBias(heads 3..6 of 6, 32 buckets to 128, bidirectional=False, t=2)"


def test_a_bias_is_contiguous() -> None:
    """Its last stride is 1, without which CUDA's fused attention refuses it."""
    bias = RelativeBias(8, 20, 4, ShardContext(tp=Group(0, 2)), bidirectional=True)
    fill(bias)
    assert bias(5, 9).is_contiguous() and bias(5, 9).shape == (1, 2, 5, 9)
