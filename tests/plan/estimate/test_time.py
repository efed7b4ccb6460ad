"""FLOP of a step against published equations, and its time by hand on an ideal device."""

from __future__ import annotations

from math import exp, isfinite
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.core.units import seconds_text
from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.estimate.explain import explain_time
from mpctl.plan.estimate.flops import step_flops
from mpctl.plan.estimate.step import PARTS, StepTime
from mpctl.plan.estimate.time import find_step_time
from mpctl.plan.planning.plan import load_plan, make_plan
from mpctl.spec.presets import preset_names
from mpctl.spec.runtime import FittedRuns, HostCosts, MemoryPasses, OperatorCosts, OverlapShares, RuntimeProfile
from tests.jobs import GPT, job_of

DEVICE = {
    "name": "a device",
    "kind": "cuda",
    "memory_bytes": 2**36,
    "peak_flops": {"fp32": 1e12},
    "kernels": {"products": 1.0, "memory": 1.0, "flash": 1.0, "flash_backward": 1.0, "source": "-"},
    "source": "made up",
}
# Two layers of hidden 64: small enough for every message to be written out.
TINY: dict[str, Any] = {
    "cluster.device": DEVICE,
    "cluster.step_factor": 1.0,
    "cluster.intra_node.bandwidth": 1e9,
    "cluster.intra_node.latency": 1e-6,
    "model.layers": 2,
    "model.hidden": 64,
    "model.heads": 4,
    "model.vocab": 256,
    "model.seq_length": 16,
    "model.attention": "unfused",
}
NONE = MemoryPasses(forward=0, backward=0)
# A runtime that does nothing besides: no overlap, no host, no memory to move.
IDEAL = RuntimeProfile(
    name="ideal",
    operators=OperatorCosts(
        hidden=NONE,
        width=NONE,
        inner=NONE,
        scores=NONE,
        logits=NONE,
        gradient_bytes=0,
        optimizer_bytes=1,
        stops_early=True,
    ),
    overlap=OverlapShares(tp=0, pp=0, dp=0),
    host=HostCosts(layer=0),
    spread=0.1,
    spread_apart=0.2,
    source="made up",
)


def flops_of_all_ranks(settings: dict[str, Any]) -> float:
    job = job_of(settings)
    layout, ranks = JobLayout.of(job), job.world_size // job.parallel.pp
    return sum(ranks * step_flops(layout, stage) for stage in range(len(layout.stages)))


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
        "model.layers": layers,
        "model.hidden": h,
        "model.heads": heads,
        "model.vocab": vocab,
        "model.seq_length": seq,
        "parallel.tp": tp,
        "parallel.pp": pp,
        "parallel.dp": dp,
        "parallel.cp": cp,
        "training.micro_batch_size": 2,
        "training.global_batch_size": batch,
    }
    logits = 6 * batch * seq * h * vocab
    blocks = layers * (6 * h * h + seq * h) * batch * seq  # 1/12 of 72 L h^2 (1 + s/(6h)) B s
    assert flops_of_all_ranks(job) == 12 * blocks + logits
    assert flops_of_all_ranks({**job, "training.recompute": "full"}) == 16 * blocks + logits


def test_flops_of_gpt3() -> None:
    """arXiv 2104.04473, section 5.1: 1024 A100, batch 1536, 140 TFLOP/s a GPU, 300B tokens in 34
    days, by eq. 4, 8 T P / (n X): it leaves out scores and logits, 3 % of eq. 3 for this shape."""
    job = load_plan("gpt3-175b-1024").job
    layout = JobLayout.of(job)
    flops = 64 * sum(step_flops(layout, stage) for stage in range(len(layout.stages)))
    steps = 300e9 / (1536 * 2048)
    days = steps * flops / (1024 * 140e12) / 86400
    assert days == pytest.approx(34, rel=0.03)


def step_time(settings: dict[str, Any], profile: RuntimeProfile = IDEAL) -> StepTime | str:
    job = job_of({**TINY, **settings})
    return find_step_time(JobLayout.of(job), profile)


def timed(settings: dict[str, Any], profile: RuntimeProfile = IDEAL) -> StepTime:
    time = step_time(settings, profile)
    assert isinstance(time, StepTime), time
    return time


def with_part(name: str, **changes: Any) -> RuntimeProfile:
    """IDEAL with other values in one of its tables."""
    part = getattr(IDEAL, name).model_copy(update=changes)
    return IDEAL.model_copy(update={name: part})


def test_one_rank_computes_and_nothing_else() -> None:
    time = timed({"training.global_batch_size": 4})
    blocks, logits = 2 * 12 * (6 * 64 * 64 + 16 * 64), 6 * 64 * 256
    assert time.hardware_flops == time.model_flops == 4 * 16 * (blocks + logits)
    assert time.compute == pytest.approx(time.model_flops / 1e12)
    assert (time.bubble, time.tp, time.dp_cp, time.optimizer, time.other) == (0, 0, 0, 0, 0)
    assert time.total == time.compute
    assert time.mfu == time.hfu == pytest.approx(1)


def test_recomputation_counts_to_hfu_and_not_to_mfu() -> None:
    """arXiv 2205.05198, eq. 7 and 8: full repeats the blocks' forward, selective the scores. Ours
    ends before the last product, whose result nobody asks for."""
    plain = timed({})
    full = timed({"training.recompute": "full"})
    selective = timed({"training.recompute": "selective"})
    forward, scores = 2 * 16 * 4 * (6 * 64**2 + 16 * 64), 2 * 16 * 4 * 16 * 64
    assert full.model_flops == selective.model_flops == plain.model_flops
    assert full.hardware_flops == plain.model_flops + forward
    assert selective.hardware_flops == plain.model_flops + scores
    assert selective.total == pytest.approx(selective.hardware_flops / 1e12)
    last = 2 * 16 * 2 * 4 * 64**2
    assert full.total == pytest.approx((full.hardware_flops - last) / 1e12)
    to_its_end = timed({"training.recompute": "full", "training.dropout": 0.1})
    assert to_its_end.total == pytest.approx(full.hardware_flops / 1e12)


def test_dropout_inside_a_kernel_costs_its_hash() -> None:
    """2 layers of 4 heads, 4 micro batches of 16 x 16 / 2 pairs: 8 integer operations a pair, at a
    quarter of fp32's rate, in three kernels. Our kernels run 2 products forward and 7 backward, a
    library's 5, at 0.9 of its rate. Selective recomputation has nothing to repeat."""
    flash = {"model.attention": "flash", "training.global_batch_size": 4}
    dropped = {**flash, "training.attention_dropout": 0.1}
    plain, ours = timed(flash), timed(dropped)
    pairs = 2 * 4 * 4 * 16 * 16 / 2
    hashes, products = 3 * 8 * pairs / 0.25e12, (9 / 0.9 - 7) * 2 * 16 * pairs / 1e12
    assert ours.compute - plain.compute == pytest.approx(hashes + products, rel=1e-6)
    again = timed({**dropped, "training.recompute": "selective"})
    assert again.compute == ours.compute and again.hardware_flops == ours.hardware_flops


NORM = 8 / 1e9 + 2e-6  # the gradient norm's square, summed over two ranks of a node
STATUS = (3 + 2) * 8 / 1e9 + 2e-6  # the status of two ranks


def test_tp_seconds_by_hand() -> None:
    """tp 2: a ring sends each message once (2 (2-1)/2) in 2 steps of 1 us, at 1 GB/s."""
    time = timed({"parallel.tp": 2, "training.global_batch_size": 4})
    phi, m = 16 * 64 * 4, 4
    states = m * (2 * 4 + 1 + 1)  # blocks, word table, head
    seconds = states * (phi / 1e9 + 2e-6) + 3 * m * (16 * 4 / 1e9 + 2e-6)
    assert time.tp == pytest.approx(seconds + NORM, rel=1e-12)
    assert (time.dp_cp, time.other) == (0, pytest.approx(STATUS))


def test_sequence_parallelism_sends_ten_phases_a_block() -> None:
    """10 half-rings a block, 2 at the word table (gather back, scatter), 3 at the head; once a step
    gradients of norms, of row biases and of positions, which each rank has of its own tokens."""
    job = {"parallel.tp": 2, "parallel.sequence_parallel": True}
    phase, loss = 16 * 64 * 4 / 2 / 1e9 + 1e-6, 16 * 4 / 1e9 + 2e-6
    partial = (2 * 6 * 64 + 16 * 64 + 2 * 64) * 4 / 1e9 + 2e-6
    expected = (2 * 10 + 2 + 3) * phase + 3 * loss + partial + NORM
    assert timed(job).tp == pytest.approx(expected)


def test_a_column_products_message_hides_behind_its_own_dw() -> None:
    """Two columns a block, and the head: 5 of 10 messages, of which a dW is shorter."""
    job = {"parallel.tp": 2}
    apart, beside = timed(job), timed(job, with_part("overlap", tp=1.0))
    weights = 16 * (2 * (64 * 192 + 64 * 256) + 64 * 256) / 1e12  # 2 m k n / tp of each dW
    assert apart.total - beside.total == pytest.approx(weights)
    assert beside.tp == pytest.approx(apart.tp - weights)


def test_dp_seconds_by_hand_within_and_between_nodes() -> None:
    """Between nodes a ring of 2 + 2 ranks enters each node once; up and down a tree it is one step
    inside and one between, each way."""
    parameters = 2 * (12 * 64 * 64 + 13 * 64) + (256 + 16) * 64 + 2 * 64
    inside = timed({"parallel.dp": 4})
    assert inside.dp_cp == pytest.approx(1.5 * 4 * parameters / 1e9 + 6e-6, rel=1e-12)
    apart = {"cluster.nodes": 2, "cluster.gpus_per_node": 2}
    network = {"cluster.inter_node.bandwidth": 5e8, "cluster.inter_node.latency": 1e-5}
    between = timed({"parallel.dp": 4, **apart, **network})
    assert between.dp_cp == pytest.approx(1.5 * 4 * parameters / 5e8 + 2.2e-5, rel=1e-12)


def test_groups_that_share_a_node_share_its_link() -> None:
    """tp 2 x dp 2 on 2 nodes of 2: two rings over dp leave each node, one rank of it in each."""
    network = {"cluster.inter_node.bandwidth": 5e8, "cluster.inter_node.latency": 1e-5}
    time = timed({"parallel.tp": 2, "parallel.dp": 2, "cluster.nodes": 2, "cluster.gpus_per_node": 2, **network})
    split = 2 * (6 * 64 * 64 + 3.5 * 64) + 256 / 2 * 64
    whole = 2 * 6 * 64 + 16 * 64 + 2 * 64
    assert time.dp_cp == pytest.approx(2 * 4 * (split + whole) / 5e8 + 2e-5)


def test_zero_1_scatters_gradients_and_gathers_parameters() -> None:
    """Half an all-reduce each; as long, but for bf16 parameters and the norm over dp_cp."""
    plain, zero = timed({"parallel.dp": 4}), timed({"parallel.dp": 4, "parallel.zero": 1})
    assert zero.dp_cp == pytest.approx(plain.dp_cp + 1.5 * 8 / 1e9 + 6e-6)


def test_zero_3_gathers_twice_and_scatters_once_a_micro_batch() -> None:
    """Of 2 layers each by itself, and of the ends together, with the tied table once."""
    time = timed({"parallel.dp": 4, "parallel.zero": 3, "training.global_batch_size": 8})
    layer, ends = 12 * 64 * 64 + 13 * 64, (256 + 16) * 64 + 2 * 64
    phase = 0.75 * 4 * (2 * layer + ends) / 1e9 + 3 * 3e-6
    norm = 1.5 * 8 / 1e9 + 6e-6
    assert time.dp_cp == pytest.approx(2 * 3 * phase + norm)
    hidden = timed(
        {"parallel.dp": 4, "parallel.zero": 3, "training.global_batch_size": 8}, with_part("overlap", dp=0, zero=1.0)
    )
    assert hidden.total == pytest.approx(max(hidden.compute, time.dp_cp), rel=0.35)
    assert hidden.dp_cp < time.dp_cp


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_group_of_states_inside_of_a_node_sends_one_slice_a_step_out_of_it(zero: int) -> None:
    """dp 4 on 2 nodes of 2, states over each node: only an all-reduce of half of the gradients
    leaves a node, whose two ranks share its 0.5 GB/s."""
    layer, ends = 12 * 64 * 64 + 13 * 64, (256 + 16) * 64 + 2 * 64
    network = {"cluster.inter_node.bandwidth": 5e8, "cluster.inter_node.latency": 1e-5}
    nodes = {"cluster.nodes": 2, "cluster.gpus_per_node": 2, "training.global_batch_size": 8}
    time = timed({"parallel.dp": 4, "parallel.zero": zero, "parallel.zero_size": 2, **nodes, **network})
    numel, micro_batches = 2 * layer + ends, 2
    inside = 0.5 * 4 * numel / 1e9  # a reduce-scatter, or a gathering
    inside *= {1: 2, 2: micro_batches + 1, 3: 3 * micro_batches}[zero]
    sent = {1: 2, 2: 3 * micro_batches + 1, 3: 9 * micro_batches}[zero]
    outside = 4 * numel / 2 / 2.5e8 + 2e-5
    norm = 8 / 1e9 + 2e-6  # over one group: the other has the same slices
    assert time.dp_cp == pytest.approx(inside + sent * 1e-6 + outside + norm, rel=1e-9)


def test_a_pipeline_may_keep_zero_3s_parameters() -> None:
    """Gathered and scattered once a step, however many micro batches there are."""
    job = {"parallel.dp": 2, "parallel.pp": 2, "parallel.zero": 3}
    few, many = ({**job, "training.global_batch_size": batch} for batch in (8, 64))
    keeping = with_part("overlap", keeps=True)
    assert timed(many, keeping).dp_cp == pytest.approx(timed(few, keeping).dp_cp)
    assert timed(many).dp_cp - NORM == pytest.approx(8 * (timed(few).dp_cp - NORM))


def test_a_slower_cluster_slows_kernels_and_nothing_else() -> None:
    job = {"parallel.tp": 2}
    plain, slow = timed(job), timed({**job, "cluster.slowdown": 1.5})
    assert slow.compute == pytest.approx(1.5 * plain.compute)
    assert slow.tp == plain.tp


def test_gradients_hide_behind_the_last_backward_alone() -> None:
    job = {"parallel.dp": 4, "training.global_batch_size": 32}
    apart, beside = timed(job), timed(job, with_part("overlap", dp=1.0))
    backward = 16 * (2 * 8 * (6 * 64 * 64 + 16 * 64) + 4 * 64 * 256) / 1e12
    assert apart.total - beside.total == pytest.approx(min(backward, apart.dp_cp))
    told = timed({**job, "parallel.overlap_gradients": False}, with_part("overlap", dp=1.0))
    cpu = {"cluster.device": {**TINY["cluster.device"], "kind": "cpu"}}
    assert told.dp_cp == timed({**job, **cpu}, with_part("overlap", dp=1.0)).dp_cp == apart.dp_cp


def test_a_slow_host_sets_the_pace() -> None:
    """3 ms a layer, forward and twice that backward; kernels take microseconds."""
    slow = with_part("host", layer=1e-3, step=0.5)
    time = timed({"training.global_batch_size": 4}, slow)
    assert time.total == pytest.approx(4 * 2 * 3e-3 + 0.5, rel=1e-3)
    assert time.other == pytest.approx(time.total - time.compute)


def test_optimizer_moves_its_bytes() -> None:
    device = {**TINY["cluster.device"], "memory_bandwidth": 1e9}
    profile = with_part("operators", optimizer_bytes=40.0)
    parameters = 2 * (12 * 64 * 64 + 13 * 64) + (256 + 16) * 64 + 2 * 64
    assert timed({"cluster.device": device}, profile).optimizer == pytest.approx(parameters * 40e-9)
    sharded = timed({"cluster.device": device, "parallel.dp": 2, "parallel.zero": 1}, profile)
    assert sharded.optimizer == pytest.approx(parameters * 20e-9)


# A layer's forward, the head's, and 4 KiB of hidden states between two stages, seconds.
LAYER, HEAD, HOP = 16 * 4 * (6 * 64**2 + 16 * 64) / 1e12, 16 * 2 * 64 * 256 / 1e12, 5.096e-6
WORDS = 256 * 64 * 4 / 1e9 + 2e-6  # a ring of 2 sums the tied word table


def test_two_unequal_stages_by_hand() -> None:
    """1F1B, m 4: stage 1, which has the head, is the busiest: F + H and twice that. It waits F for
    the first micro batch, works, and then stage 0 does its last backward: 3 F of bubble.

    With a hop t > (F + H) / 2: stage 0's second backward needs stage 1's, the third forward waits
    for it, and so on: F0 t (F0 B0) t B0 F2 t (F2 B2) (F3 B3) t B3 = 6 F + 9 (F + H) + 4 t.
    """
    time = timed({"parallel.pp": 2, "training.global_batch_size": 4})
    slow = LAYER + HEAD
    assert time.compute == pytest.approx(12 * slow)
    assert time.bubble == pytest.approx(3 * LAYER)
    assert time.pp == pytest.approx(4 * HOP - 3 * HEAD + WORDS + NORM)
    assert time.total == pytest.approx(6 * LAYER + 9 * slow + 4 * HOP + WORDS + NORM + STATUS)
    assert (time.tp, time.cp, time.dp_cp) == (0, 0, 0)


def test_gpipe_by_hand() -> None:
    """Stage 1 waits F and t, does all of its work, and t later stage 0 its last backward."""
    time = timed({"parallel.pp": 2, "training.global_batch_size": 4, "parallel.schedule": "gpipe"})
    assert time.bubble == pytest.approx(3 * LAYER)
    assert time.pp == pytest.approx(2 * HOP + WORDS + NORM)


def test_a_layer_given_to_the_other_stage_balances_the_head() -> None:
    """A head of 1.28 layers: of 6 + 6 the second stage takes 7.28, of 7 + 5 the first one 7."""
    shape = {
        "model.layers": 12,
        "model.vocab": 8192,
        "model.hidden": 512,
        "model.seq_length": 128,
        "parallel.pp": 2,
        "training.global_batch_size": 64,
    }
    layer, head = 72 * 512**2 + 12 * 512 * 128, 6 * 512 * 8192
    even = timed(shape)
    better = timed({**shape, "parallel.first_stage_layers": 7})
    assert even.compute * 1e12 == pytest.approx(64 * 128 * (6 * layer + head))
    assert better.compute * 1e12 == pytest.approx(64 * 128 * 7 * layer)
    assert better.total < even.total


@pytest.mark.parametrize(("vpp", "layers"), [(1, 4), (2, 4), (4, 8)])
def test_bubble_of_nearly_equal_stages(vpp: int, layers: int) -> None:
    """(p-1)/(v m) of the work, but for a head of 128 words, 1 % of a layer."""
    shape = {"model.hidden": 1024, "model.vocab": 128, "model.seq_length": 128}
    time = timed(
        {**shape, "model.layers": layers, "parallel.pp": 2, "parallel.vpp": vpp, "training.global_batch_size": 4}
    )
    assert time.bubble == pytest.approx(time.compute / (4 * vpp), rel=0.03)


def test_zero_bubbles_bubble_is_a_forward_and_a_backward_less_the_weights_gradient() -> None:
    """(p-1) (F + B - W) where W is the least: W takes no scores, F and B do."""
    shape = {"model.hidden": 1024, "model.vocab": 128, "model.seq_length": 128, "model.layers": 4}
    job = {**shape, "parallel.pp": 4, "training.global_batch_size": 8}
    time = timed({**job, "parallel.schedule": "zero-bubble"})
    weights, scores = 24 * 1024**2 * 128, 4 * 1024 * 128**2
    bubble = 3 * (weights + scores + weights + 2 * scores - weights) / 1e12
    assert time.bubble == pytest.approx(bubble, rel=0.03)
    assert time.bubble < 0.5 * timed(job).bubble


def test_tp_messages_of_a_stage_are_played_too() -> None:
    """tp 2 x pp 2, m 4: forward a block reduces twice, the head's stage its loss three times and,
    backward, the head's input; the first stage looks words up. Stage 1 waits for one forward of
    stage 0, and stage 0 ends with a backward."""
    slow = {**TINY["cluster.device"], "peak_flops": {"fp32": 1e15}}  # messages alone
    time = timed({"cluster.device": slow, "parallel.tp": 2, "parallel.pp": 2, "training.global_batch_size": 4})
    phi, loss = 16 * 64 * 4 / 1e9 + 2e-6, 16 * 4 / 1e9 + 2e-6
    assert time.tp == pytest.approx(4 * (5 * phi + 3 * loss) + NORM)
    assert time.bubble == pytest.approx((2 + 1) * phi + 2 * phi, rel=0.01)


def test_boundaries_of_unequal_links() -> None:
    """pp 4 on 2 nodes, one micro batch: 2 hops inside a node and one between, forward and back. The
    word table is summed over the two ends, which lie on two nodes."""
    network = {"cluster.inter_node.bandwidth": 1e8, "cluster.inter_node.latency": 1e-4}
    apart = {"cluster.nodes": 2, "cluster.gpus_per_node": 2, "parallel.pp": 4, **network}
    time = timed({**apart, "model.layers": 4, "parallel.schedule": "gpipe"})
    words = 256 * 64 * 4 * 2 / 1e8 + 2e-4  # as if both ranks of the node summed theirs
    norm = 1.5 * 8 / 1e8 + 2 * (1e-6 + 1e-4)  # 2 + 2 ranks, up and down a tree
    assert time.pp == pytest.approx(2 * (2 * HOP + 4096 / 1e8 + 1e-4) + words + norm)


def test_stages_on_two_nodes_share_the_nodes_link() -> None:
    """pp 2 x dp 2: both ranks of a stage are on one node, and send to the other at once."""
    network = {"cluster.inter_node.bandwidth": 1e9, "cluster.inter_node.latency": 1e-6}
    apart = {"cluster.nodes": 2, "cluster.gpus_per_node": 2, "parallel.pp": 2, **network}
    time = timed({**apart, "training.global_batch_size": 2, "parallel.schedule": "gpipe"})
    words, norm = 2 * 256 * 64 * 4 / 1e9 + 2e-6, 2 * 8 / 1e9 + 2e-6
    assert time.pp == pytest.approx(2 * (2 * 4096 / 1e9 + 1e-6) + words + norm)


def test_a_missing_figure_is_named() -> None:
    assert plan_time({}) == "no cluster.device is named"
    bare = {**GPT, "cluster.device": DEVICE}
    no_rate = "a device has no bf16 rate in its preset"
    assert plan_time({**bare, "training.dtype": "bf16"}) == no_rate
    words = "cluster.{} has no bandwidth, and {} needs it"
    assert plan_time({**bare, "parallel.tp": 2}) == words.format("intra_node", "tp")
    assert plan_time({**bare, "parallel.dp": 2}) == words.format("intra_node", "dp_cp")
    assert plan_time({**bare, "parallel.pp": 2}) == words.format("intra_node", "pp")
    apart = {**bare, "cluster.nodes": 2, "cluster.gpus_per_node": 1, "parallel.dp": 2}
    assert plan_time(apart) == words.format("inter_node", "dp_cp")


def plan_time(settings: dict[str, Any]) -> StepTime | str:
    estimate = make_plan(job_of(settings)).estimate
    assert estimate is not None
    return estimate.time


def test_a_link_that_no_group_uses_is_not_missed() -> None:
    assert isinstance(plan_time({"cluster.device": DEVICE}), StepTime)


def test_what_was_never_measured_widens_the_band_in_words() -> None:
    time = timed({})
    assert time.low == time.hardware_flops / time.peak <= time.total < time.high
    told = " ".join(time.extrapolates)
    for word in ("this cluster", "a device", "fp32", "no memory bandwidth", "parameters"):
        assert word in told
    seen = FittedRuns(devices=["a device"], clusters=["here"], dtypes=["fp32"], gpus=8, parameters=1e9)
    device = {**TINY["cluster.device"], "memory_bandwidth": 1e12}
    known = timed({"cluster.device": device, "cluster.name": "here"}, IDEAL.model_copy(update={"seen": seen}))
    assert known.extrapolates == ()
    assert known.high / known.total == pytest.approx(exp(1.645 * 0.1))
    assert known.high / known.total < time.high / time.total


def test_a_cluster_with_a_spread_of_its_own_is_a_measured_one() -> None:
    """Its device and as many ranks as it has devices were measured with it; a software that mpctl
    does not launch never ran there."""
    launched = IDEAL.model_copy(
        update={
            "runs": IDEAL.runs.model_copy(update={"launched": True}),
            "seen": FittedRuns(dtypes=["fp32"], parameters=1e9),
        }
    )
    device = {**TINY["cluster.device"], "memory_bandwidth": 1e12}
    settings = {"cluster.device": device, "cluster.gpus_per_node": 4, "parallel.dp": 4}
    own = timed({**settings, "cluster.spread": 0.05}, launched)
    assert own.extrapolates == ()
    assert own.high / own.total == pytest.approx(exp(1.645 * 0.05))
    apart = timed(settings, launched)
    assert len(apart.extrapolates) == 3  # the cluster, its device, 4 ranks
    assert apart.band.factor == pytest.approx(exp(1.645 * 0.2 * launched.widening**2))
    turns = timed({**settings, "cluster.spread": 0.05, "cluster.cores": 2}, launched)
    assert turns.extrapolates == ("4 ranks, and the largest run measured has 2",)
    other = launched.model_copy(update={"runs": IDEAL.runs})
    assert timed({**settings, "cluster.spread": 0.05}, other).band == apart.band


def test_a_band_is_a_factor_either_way_but_never_faster_than_the_peak() -> None:
    slow = timed(
        {"cluster.device": {**TINY["cluster.device"], "memory_bandwidth": 1e9}},
        with_part("operators", optimizer_bytes=100),
    )
    assert slow.low == slow.total / slow.band.factor > slow.hardware_flops / slow.peak
    assert slow.high == slow.total * slow.band.factor


def test_a_tensor_mode_that_was_never_measured_widens_the_band_in_words() -> None:
    settings = {"parallel.tp": 4, "cluster.gpus_per_node": 4, "training.micro_batch_size": 2}
    times = [timed({**settings, "parallel.tensor_mode": mode}) for mode in ("1d", "2d")]
    told = "tensor_mode 2d: no run of it was measured"
    assert [told in time.extrapolates for time in times] == [False, True]
    one, grid = (time.high / time.total for time in times)
    assert grid > one


@pytest.mark.parametrize("cluster", preset_names("clusters"))
@pytest.mark.quick(12)
def test_every_cluster_and_runtime_is_estimated_or_refused_in_words(cluster: str) -> None:
    """Two nodes' worth of layouts, at a dtype that a V100 has and one that it has not."""
    layout = {"parallel.tp": 2, "parallel.pp": 2, "parallel.zero": 1, "training.micro_batch_size": 2}
    for runtime in preset_names("runtimes"):
        for dtype in ("fp16", "bf16"):
            settings = {
                **GPT,
                **layout,
                "cluster": cluster,
                "cluster.nodes": 2,
                "training.dtype": dtype,
                "training.runtime": runtime,
                "training.global_batch_size": 64,
            }
            plan = make_plan(job_of(settings))
            if plan.estimate is None:
                assert dtype == "bf16" and {check.rule for check in plan.errors} == {"dtype-on-device"}
                continue
            time = plan.estimate.time
            if isinstance(time, str):
                assert "no bf16 rate" in time or "has no bandwidth" in time
            else:
                parts = list(time.parts().values())
                assert all(isfinite(part) and part >= 0 for part in parts), (runtime, parts)
                assert time.total == pytest.approx(sum(parts))
                assert 0 < time.low < time.total < time.high < 100
                assert 0 < time.mfu <= time.hfu < 1


def test_figures_explain_the_step() -> None:
    job = job_of({**TINY, "parallel.tp": 2, "parallel.pp": 2, "training.global_batch_size": 4})
    layout = JobLayout.of(job)
    figures = {figure.name: figure for figure in explain_time(layout)}
    time = find_step_time(layout)
    assert isinstance(time, StepTime)
    assert figures["time.step"].value == time.total
    parts = [figures[f"time.{part.name}"].value for part in PARTS if part.name != "ep"]
    assert parts == list(time.parts().values()) and sum(parts) == pytest.approx(time.total)
    assert figures["time.compute"].numbers == f"4 x {seconds_text(time.compute / 4)}"
    assert figures["time.tp"].numbers == seconds_text(time.tp)  # some of it is sent once a step
    assert figures["time.high"].value == time.high
    block = [f.value for name, f in figures.items() if name.startswith("time.blocks.")]
    assert 0 < sum(block) < time.total
    assert figures["time.stage-1.forward"].value > figures["time.stage-0.forward"].value
    assert explain_time(JobLayout.of(job_of({**GPT}))) == []
