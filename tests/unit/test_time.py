"""FLOP of a step against published equations, and the floor under its time by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.estimate.time import StepTime, step_flops
from mpctl.families.gpt.ops import operator_table
from mpctl.plan import load_plan, make_plan
from mpctl.rules.layout import job_stages
from tests.unit.jobs import GPT, job_of, shape_of

DEVICE = {
    "name": "a device",
    "kind": "cuda",
    "memory_bytes": 2**36,
    "peak_flops": {"fp32": 1e12},
    "source": "made up",
}
# Two layers of hidden 64: small enough for every message to be written out.
TINY: dict[str, Any] = {
    "cluster.device": DEVICE,
    "cluster.intra_node.bandwidth": 1e9,
    "cluster.intra_node.latency": 1e-6,
    "model.layers": 2,
    "model.hidden": 64,
    "model.heads": 4,
    "model.vocab": 256,
    "model.seq_length": 16,
}


def flops_of_all_ranks(settings: dict[str, Any]) -> float:
    job = job_of(settings)
    model = shape_of(job)
    table = operator_table(model, tp=job.parallel.tp)
    ranks = job.sizes["tp"] * job.sizes["cp"] * job.sizes["dp"]
    stages = enumerate(job_stages(job, model.layers))
    return sum(ranks * step_flops(job, model, table, spans, stage=k) for k, spans in stages)


@given(
    layers=st.sampled_from([12, 24]),
    heads=st.sampled_from([8, 16]),
    seq=st.sampled_from([512, 1024]),
    vocab=st.sampled_from([1024, 51200]),
    tp=st.sampled_from([1, 2, 8]),
    pp=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([1, 2]),
    cp=st.sampled_from([1, 2]),
)
def test_flops_of_a_step_are_equation_3(
    layers: int, heads: int, seq: int, vocab: int, tp: int, pp: int, dp: int, cp: int
) -> None:
    """arXiv 2104.04473, eq. 3, with full recomputation: 96 B s L h^2 (1 + s/(6h) + v/(16 L h)).

    Without it the blocks take 72 and the logits stay: 72 B s L h^2 (1 + s/(6h) + v/(12 L h))
    (arXiv 2205.05198, eq. 7). Multiplied out both are integers, so that equality is exact.
    """
    batch, h = 8 * dp, 64 * heads
    job = {
        "model.layers": layers, "model.hidden": h, "model.heads": heads,
        "model.vocab": vocab, "model.seq_length": seq,
        "parallel.tp": tp, "parallel.pp": pp, "parallel.dp": dp, "parallel.cp": cp,
        "training.micro_batch_size": 2, "training.global_batch_size": batch,
    }  # fmt: skip
    logits = 6 * batch * seq * h * vocab
    blocks = layers * (6 * h * h + seq * h) * batch * seq  # 1/12 of 72 L h^2 (1 + s/(6h)) B s
    assert flops_of_all_ranks(job) == 12 * blocks + logits
    assert flops_of_all_ranks({**job, "training.recompute": "full"}) == 16 * blocks + logits


def test_flops_of_gpt3() -> None:
    """arXiv 2104.04473, section 5.1: 1024 A100, batch 1536, 140 TFLOP/s a GPU, 300B tokens in 34
    days, by eq. 4, 8 T P / (n X): it leaves out scores and logits, 3 % of eq. 3 for this shape."""
    job = load_plan("gpt3-175b-1024").job
    model = shape_of(job)
    table = operator_table(model, tp=8)
    stages = enumerate(job_stages(job, model.layers))
    flops = 64 * sum(step_flops(job, model, table, s, stage=k) for k, s in stages)
    steps = 300e9 / (1536 * 2048)
    days = steps * flops / (1024 * 140e12) / 86400
    assert days == pytest.approx(34, rel=0.03)


def floor(settings: dict[str, Any]) -> StepTime:
    estimate = make_plan(job_of({**TINY, **settings})).estimate
    assert estimate is not None
    assert isinstance(estimate.time, StepTime), estimate.time
    return estimate.time


def test_one_rank_computes_and_nothing_else() -> None:
    time = floor({"training.global_batch_size": 4})
    blocks, logits = 2 * 12 * (6 * 64 * 64 + 16 * 64), 6 * 64 * 256
    assert time.flops_per_rank == 4 * 16 * (blocks + logits)
    assert time.compute == pytest.approx(time.flops_per_rank / 1e12)
    assert (time.bubble, time.tp, time.dp) == (0, 0, 0)
    assert time.total == time.compute


def test_tp_seconds_by_hand() -> None:
    """tp 2: a ring sends each message once (2 (2-1)/2) in 2 steps of 1 us, at 1 GB/s."""
    time = floor({"parallel.tp": 2, "training.global_batch_size": 4})
    phi, m = 16 * 64 * 4, 4
    states = m * (2 * 4 + 1 + 1)  # blocks, word table, head
    seconds = states * (phi / 1e9 + 2e-6) + 3 * m * (16 * 4 / 1e9 + 2e-6) + 8 / 1e9 + 2e-6
    assert time.tp == pytest.approx(seconds, rel=1e-12)
    assert time.dp == 0


def test_dp_seconds_by_hand_within_and_between_nodes() -> None:
    parameters = 2 * (12 * 64 * 64 + 13 * 64) + (256 + 16) * 64 + 2 * 64
    inside = floor({"parallel.dp": 4})
    assert inside.dp == pytest.approx(1.5 * 4 * parameters / 1e9 + 6e-6, rel=1e-12)
    apart = {"cluster.nodes": 2, "cluster.gpus_per_node": 2}
    network = {"cluster.inter_node.bandwidth": 5e8, "cluster.inter_node.latency": 1e-5}
    between = floor({"parallel.dp": 4, **apart, **network})  # two ranks share a node's link
    assert between.dp == pytest.approx(1.5 * 4 * parameters / 2.5e8 + 6e-5, rel=1e-12)


@pytest.mark.parametrize(
    ("settings", "share"),
    [({}, 1 / 4), ({"parallel.vpp": 2, "model.layers": 4}, 1 / 8)],
)
def test_bubble_is_p_less_one_over_v_m(settings: dict[str, Any], share: float) -> None:
    time = floor({"parallel.pp": 2, "training.global_batch_size": 4, **settings})
    assert time.bubble == pytest.approx(time.compute * share)


def reason(settings: dict[str, Any]) -> str:
    estimate = make_plan(job_of(settings)).estimate
    assert estimate is not None
    assert estimate.step_seconds is None
    assert isinstance(estimate.time, str)
    return estimate.time


def test_a_missing_figure_is_named() -> None:
    assert reason({}) == "no cluster.device is named"
    bare = {**GPT, "cluster.device": DEVICE}
    assert reason({**bare, "training.dtype": "bf16"}) == "a device has no bf16 rate in its preset"
    words = "cluster.{} has no bandwidth, and {} needs it"
    assert reason({**bare, "parallel.tp": 2}) == words.format("intra_node", "tp")
    assert reason({**bare, "parallel.dp": 2}) == words.format("intra_node", "dp")
    apart = {**bare, "cluster.nodes": 2, "cluster.gpus_per_node": 1, "parallel.dp": 2}
    assert reason(apart) == words.format("inter_node", "dp")


def test_a_link_that_no_group_uses_is_not_missed() -> None:
    estimate = make_plan(job_of({"cluster.device": DEVICE})).estimate
    assert estimate is not None
    assert estimate.step_seconds is not None
