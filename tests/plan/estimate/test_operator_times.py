"""Messages overlapped with kernels and products of fewer bits, by hand on the ideal device of
test_time."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.plan.estimate.kernels import cover_backwards
from tests.plan.estimate.test_time import DEVICE, timed, with_part

SPLIT: dict[str, Any] = {"parallel.tp": 2, "parallel.sequence_parallel": True}


def test_pieces_overlap_with_their_product_where_the_link_multicasts() -> None:
    """A block's 4 gathers and scatters forward, and the 2 gathers backward that no dW covers, each
    beside a product that is shorter; half of what fits is hidden."""
    shares = with_part("overlap", products=0.5)
    apart, beside = timed(SPLIT, shares), timed({**SPLIT, "cluster.intra_node.multicast": True}, shares)
    forward = [64 * 192, 64 * 64, 64 * 256, 64 * 256]  # k n of qkv, out, up, down
    seconds = 2 * 16 / 2 * (sum(forward) + 2 * (forward[1] + forward[3])) / 1e12
    assert apart.total - beside.total == pytest.approx(2 * 0.5 * seconds)
    assert timed({**SPLIT, "cluster.intra_node.multicast": True}).total == apart.total


def test_keys_and_values_in_a_ring_overlap_with_attention() -> None:
    job = {"parallel.cp": 2, "training.runtime": "megatron-core"}
    apart, beside = timed(job), timed(job, with_part("overlap", cp=1.0))
    # 2 layers, 8 queries of 16 keys, forward and twice back
    scores = 2 * 3 * 4 * 8 * 16 * 64 / 1e12
    assert apart.cp - beside.cp == pytest.approx(min(scores, apart.cp))


@pytest.mark.parametrize(("more", "share"), [({}, 1 / 4), ({"training.attention_dropout": 0.1}, 0)])
def test_gathered_keys_overlap_with_the_diagonals_alone(more: dict[str, Any], share: float) -> None:
    """A quarter of the work at cp 2, 8 x 16 / 2 pairs of 4 heads of 16, 2 products and 5; dropout
    is another kernel's, and gathers first."""
    job = {"parallel.cp": 2, "model.attention": "flash", **more}
    job["cluster.intra_node.bandwidth"] = 1e6  # slow, so that more than the diagonals is sent
    apart, beside = timed(job).cp, timed(job, with_part("overlap", cp=1.0)).cp
    scores = 2 * (2 + 5) * 2 * (8 * 16 / 2) * 64 / 1e12
    assert apart - beside == pytest.approx(share * scores)


def test_halves_of_an_input_overlap_with_a_product() -> None:
    """2 column products a layer, of 8 rows: half of each gather, or of each product, is hidden; the
    messages are twice as many, of half the size, and each pays its latency."""
    own = with_part("overlap", tp=1.0, gathers_in_halves=True)
    whole = timed(SPLIT, own)
    halves = timed({**SPLIT, "parallel.tp_comm_overlap": True}, own)
    products = 2 * 2 * 16 * 64 * (192 + 256) / 2 / 1e12  # of both layers, on one of two ranks
    gather = 16 * 64 * 4 / 2 / 1e9 + 1e-6  # as in test_time.py
    sent = 2 * 2 * 1e-6  # the latency of each of two products' second halves, in each layer
    assert gather > products
    assert halves.tp - whole.tp == pytest.approx(sent - products / 2)


def test_gradients_of_all_chunks_but_one_overlap_with_the_last_micro_batches() -> None:
    assert cover_backwards(1, 1) == cover_backwards(8, 1) == 1
    assert cover_backwards(4, 2) == 2.5


@pytest.mark.parametrize(("dtype", "saved"), [("bf16", 0.0), ("fp8", 0.5)])
def test_attention_of_jobs_in_fp8_may_be_faster(dtype: str, saved: float) -> None:
    """At twice the speed it takes half the time; that of 16 bits stays as it is."""
    device = {**DEVICE, "peak_flops": {"bf16": 1e12, "fp8": 1e12}}
    job = {"cluster.device": device, "training.dtype": dtype, "model.attention": "flash"}
    plain, twice, tenfold = (timed(job, with_part("operators", flash_narrow=x)).compute for x in (1, 2, 10))
    attention = (plain - tenfold) / 0.9 if saved else 1.0
    assert plain - twice == pytest.approx(saved * attention)


@pytest.mark.parametrize(("dtype", "part", "moves"), [("fp8", 0.5, 1), ("mxfp8", 0.4, 1), ("nvfp4", 0.25, 1.48)])
def test_products_of_layers_alone_have_fewer_bits(dtype: str, part: float, moves: float) -> None:
    """Scores and the head stay in bf16, at 1 TFLOP/s; casts of inputs and gradients are made each
    time, those of weights once a step. A cast to nvfp4 moves half as much again."""
    kernels = {**DEVICE["kernels"], "narrow": {dtype: part}}
    device = {**DEVICE, "peak_flops": {"bf16": 1e12, dtype: 8e12}, "kernels": kernels, "memory_bandwidth": 1e18}
    job = {"cluster.device": device, "training.dtype": dtype, "training.global_batch_size": 4}
    free, cast = timed(job), timed(job, with_part("operators", cast_bytes=1e6))
    products = 4 * 16 * 2 * 12 * 6 * 64 * 64
    rest = 4 * 16 * (2 * 12 * 16 * 64 + 6 * 64 * 256)
    assert free.compute == pytest.approx(products / (8e12 * part) + rest / 1e12)
    weights = 64 * 192 + 64 * 64 + 2 * 64 * 256
    inputs, outputs = 16 * (3 * 64 + 256), 16 * (192 + 2 * 64 + 256)
    moved = moves * 2 * (weights + 4 * (inputs + outputs)) / 1e12
    assert cast.compute - free.compute == pytest.approx(moved)
    assert free.peak == 8e12
    each = timed(job, with_part("operators", cast_bytes=1e6, casts_weights="pass"))
    passes = moves * 2 * 2 * 4 * weights / 1e12  # 2 layers, forward and backward, 4 micro batches
    assert each.compute - cast.compute == pytest.approx(passes - moves * 2 * weights / 1e12)
