"""FLOP of a step against published equations, and the floor under its time by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.estimate.flops import layer_costs, step_flops
from mpctl.estimate.time import StepTime
from mpctl.families.gpt.ops import operator_table
from mpctl.families.products import Part
from mpctl.families.shapes import head, word_table
from mpctl.families.t5.ops import SOURCE
from mpctl.families.t5.ops import operator_table as t5_table
from mpctl.families.table import OperatorTable
from mpctl.plan import load_plan, make_plan
from mpctl.stages import job_stages
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


def test_an_end_between_two_stacks_counts_to_the_layer_beside_it() -> None:
    """A T5 whose encoder ended with a head of its own: its last layer takes 6 v h a token more."""
    job = job_of({
        **{key: value for key, value in TINY.items() if key.startswith("model")},
        "model.family": "t5", "model.position": "relative", "model.decoder_layers": 2,
        "model.decoder_seq_length": 8,
    })  # fmt: skip
    model = shape_of(job)
    table = t5_table(model, tp=1)
    encoder, decoder = table.stacks
    extra = Part((head(SOURCE, tied=False),), (word_table(model, tp=1, name="head"),))
    plain = layer_costs(job, model, table)
    costs = layer_costs(job, model, OperatorTable((replace(encoder, exit=extra), decoder)))
    added = [a - b for a, b in zip(costs.layers, plain.layers, strict=True)]
    assert added == [0, 16 * 6 * 256 * 64, 0, 0]
    assert (plain.entry, plain.exit) == (0, 8 * 6 * 256 * 64)
    assert (costs.entry, costs.exit) == (plain.entry, plain.exit)


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


# A layer's forward, the head's, and 4 KiB of hidden states between two stages, seconds.
LAYER, HEAD, HOP = 16 * 4 * (6 * 64**2 + 16 * 64) / 1e12, 16 * 2 * 64 * 256 / 1e12, 5.096e-6
WORDS = 256 * 64 * 4 / 1e9 + 2e-6  # a ring of 2 sums the tied word table
NORM = 8 / 1e9 + 2e-6


def test_two_unequal_stages_by_hand() -> None:
    """1F1B, m 4: stage 1, which has the head, is the busiest: F + H and twice that. It waits F for
    the first micro batch, works, and then stage 0 does its last backward: 3 F of bubble.

    With a hop t > (F + H) / 2: stage 0's second backward needs stage 1's, the third forward waits
    for it, and so on: F0 t (F0 B0) t B0 F2 t (F2 B2) (F3 B3) t B3 = 6 F + 9 (F + H) + 4 t.
    """
    time = floor({"parallel.pp": 2, "training.global_batch_size": 4})
    slow = LAYER + HEAD
    assert time.compute == pytest.approx(12 * slow)
    assert time.bubble == pytest.approx(3 * LAYER)
    assert time.pp == pytest.approx(4 * HOP - 3 * HEAD + WORDS + NORM)
    assert time.total == pytest.approx(6 * LAYER + 9 * slow + 4 * HOP + WORDS + NORM)
    assert (time.tp, time.cp, time.dp) == (0, 0, 0)


def test_gpipe_by_hand() -> None:
    """Stage 1 waits F and t, does all of its work, and t later stage 0 its last backward."""
    time = floor({"parallel.pp": 2, "training.global_batch_size": 4, "parallel.schedule": "gpipe"})
    assert time.bubble == pytest.approx(3 * LAYER)
    assert time.pp == pytest.approx(2 * HOP + WORDS + NORM)


def test_a_layer_given_to_the_other_stage_balances_the_head() -> None:
    """A head of 1.28 layers: of 6 + 6 the second stage takes 7.28, of 7 + 5 the first one 7."""
    shape = {
        "model.layers": 12, "model.vocab": 8192, "model.hidden": 512, "model.seq_length": 128,
        "parallel.pp": 2, "training.global_batch_size": 64,
    }  # fmt: skip
    layer, head = 72 * 512**2 + 12 * 512 * 128, 6 * 512 * 8192
    even = floor(shape)
    better = floor({**shape, "parallel.first_stage_layers": 7})
    assert even.flops_per_rank == 64 * 128 * (6 * layer + head)
    assert better.flops_per_rank == 64 * 128 * 7 * layer
    assert better.total < even.total


@pytest.mark.parametrize(("vpp", "layers"), [(1, 4), (2, 4), (4, 8)])
def test_bubble_of_nearly_equal_stages(vpp: int, layers: int) -> None:
    """(p-1)/(v m) of the work, but for a head of 128 words, 1 % of a layer."""
    shape = {"model.hidden": 1024, "model.vocab": 128, "model.seq_length": 128}
    time = floor({
        **shape, "model.layers": layers, "parallel.pp": 2, "parallel.vpp": vpp,
        "training.global_batch_size": 4,
    })  # fmt: skip
    assert time.bubble == pytest.approx(time.compute / (4 * vpp), rel=0.03)


def test_zero_bubbles_bubble_is_a_forward_and_a_backward_less_the_weights_gradient() -> None:
    """(p-1) (F + B - W) where W is the least: W takes no scores, F and B do."""
    shape = {"model.hidden": 1024, "model.vocab": 128, "model.seq_length": 128, "model.layers": 4}
    job = {**shape, "parallel.pp": 4, "training.global_batch_size": 8}
    time = floor({**job, "parallel.schedule": "zero-bubble"})
    weights, scores = 24 * 1024**2 * 128, 4 * 1024 * 128**2
    bubble = 3 * (weights + scores + weights + 2 * scores - weights) / 1e12
    assert time.bubble == pytest.approx(bubble, rel=0.03)
    assert time.bubble < 0.5 * floor(job).bubble


def test_tp_messages_of_a_stage_are_played_too() -> None:
    """tp 2 x pp 2, m 4: forward a block reduces twice, the head's stage its loss three times and,
    backward, the head's input; the first stage looks words up. Stage 1 waits for one forward of
    stage 0, and stage 0 ends with a backward."""
    slow = {**TINY["cluster.device"], "peak_flops": {"fp32": 1e15}}  # messages alone
    time = floor({"cluster.device": slow, "parallel.tp": 2, "parallel.pp": 2,
                  "training.global_batch_size": 4})  # fmt: skip
    phi, loss = 16 * 64 * 4 / 1e9 + 2e-6, 16 * 4 / 1e9 + 2e-6
    assert time.tp == pytest.approx(4 * (5 * phi + 3 * loss) + NORM)
    assert time.bubble == pytest.approx((2 + 1) * phi + 2 * phi, rel=0.01)


def test_a_forward_is_told_from_a_backward() -> None:
    """A stage of 4 layers before one of 1, messages alone: with 9 to 8 all-reduces forward to
    backward stage 0 has one more forward to do, or a backward of 8, while stage 1 does 2 + 3 and a
    loss. It never waits: had it all 17 forward it would wait for the last of them."""
    slow = {**TINY["cluster.device"], "peak_flops": {"fp32": 1e15}}
    time = floor({
        "cluster.device": slow, "model.layers": 5, "parallel.first_stage_layers": 4,
        "parallel.tp": 2, "parallel.pp": 2, "training.global_batch_size": 4,
    })  # fmt: skip
    assert time.tp == pytest.approx(4 * 17 * (4096 / 1e9 + 2e-6) + NORM)
    assert time.bubble == pytest.approx(0, abs=1e-12)


def test_boundaries_of_unequal_links() -> None:
    """pp 4 on 2 nodes, one micro batch: 2 hops inside a node and one between, forward and back."""
    network = {"cluster.inter_node.bandwidth": 1e8, "cluster.inter_node.latency": 1e-4}
    apart = {"cluster.nodes": 2, "cluster.gpus_per_node": 2, "parallel.pp": 4, **network}
    time = floor({**apart, "model.layers": 4, "parallel.schedule": "gpipe"})
    words, norm = 256 * 64 * 4 / 1e8 + 2e-4, 2 * (3 / 4) * 8 / 1e8 + 6e-4
    assert time.pp == pytest.approx(2 * (2 * HOP + 4096 / 1e8 + 1e-4) + words + norm)


def test_stages_on_two_nodes_share_the_nodes_link() -> None:
    """pp 2 x dp 2: both ranks of a stage are on one node, and send to the other at once."""
    network = {"cluster.inter_node.bandwidth": 1e9, "cluster.inter_node.latency": 1e-6}
    apart = {"cluster.nodes": 2, "cluster.gpus_per_node": 2, "parallel.pp": 2, **network}
    time = floor({**apart, "training.global_batch_size": 2, "parallel.schedule": "gpipe"})
    hop = 2 * 4096 / 1e9 + 1e-6
    words, norm = 2 * 256 * 64 * 4 / 1e9 + 2e-6, 2 * 8 / 1e9 + 2e-6
    assert time.pp == pytest.approx(2 * hop + words + norm)


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
    assert reason({**bare, "parallel.pp": 2}) == words.format("intra_node", "pp")
    apart = {**bare, "cluster.nodes": 2, "cluster.gpus_per_node": 1, "parallel.dp": 2}
    assert reason(apart) == words.format("inter_node", "dp")


def test_a_link_that_no_group_uses_is_not_missed() -> None:
    estimate = make_plan(job_of({"cluster.device": DEVICE})).estimate
    assert estimate is not None
    assert estimate.step_seconds is not None
