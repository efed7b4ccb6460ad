"""Plans of 2d, 2.5d and 3d tensor parallelism: messages, FLOP, memory and time of one rank."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.operators.matmul import head_bytes, lookup_bytes, product_bytes, table_bytes
from mpctl.plan.estimate.activation_shapes import activation_shapes
from mpctl.plan.estimate.communication import Message, transfers
from mpctl.plan.estimate.flops import step_flops
from mpctl.plan.estimate.layer_messages import NORMS, block_traffic
from mpctl.plan.estimate.messages import StepMessages, step_messages
from mpctl.plan.estimate.network import Network
from mpctl.plan.estimate.saved import layer_activations
from mpctl.plan.estimate.step import StepTime
from mpctl.plan.estimate.time import find_step_time, step_time_model
from mpctl.plan.planning.document import communication_entry
from mpctl.plan.planning.explain import explain
from mpctl.plan.planning.plan import make_plan
from mpctl.spec.runtime import OverlapShares, get_profile
from tests.jobs import job_of

MIB = 2**20
WIDE: dict[str, Any] = {
    "model.layers": 2,
    "model.hidden": 256,
    "model.heads": 8,
    "model.vocab": 1000,
    "model.seq_length": 128,
    "training.micro_batch_size": 8,
    "cluster.preset": "selene",
    "cluster.nodes": 1,
    "cluster.step_factor": 1.0,
    "training.dtype": "fp32",
}
GRIDS: dict[str, dict[str, Any]] = {
    "2d": {"parallel.tensor_mode": "2d", "parallel.tp": 4},
    "2.5d": {"parallel.tensor_mode": "2.5d", "parallel.tp": 8},
    "3d": {"parallel.tensor_mode": "3d", "parallel.tp": 8},
}
RANKS = {"1d": 1, "2d": 4, "2.5d": 8, "3d": 8}
LLAMA = {
    "model.norm": "rmsnorm",
    "model.position": "rotary",
    "model.bias": False,
    "model.tied_embeddings": False,
    "model.kv_heads": 4,
    "model.activation": "swiglu",
}


def layout_of(*settings: dict[str, Any]) -> JobLayout:
    merged = {key: value for some in (WIDE, *settings) for key, value in some.items()}
    ranks = merged.get("parallel.tp", 1) * merged.get("parallel.pp", 1)
    ranks *= merged.get("parallel.dp", 1)
    return JobLayout.of(job_of({"cluster.gpus_per_node": ranks, **merged}))


def counted(layout: JobLayout, stage: int = 0) -> list[tuple[str, str, str, int, int]]:
    return [(m.axis, m.kind, m.what, m.bytes, m.count) for m in step_messages(layout)[stage]]


def test_a_step_in_2d_by_hand() -> None:
    """q=2, 8 samples of 128 positions, h 256, float32: X's block 4 x 128 x 128, W's h x h / 4."""
    found = counted(layout_of(GRIDS["2d"], {"model.layers": 1}))
    x, w, rows = 4 * 128 * 128 * 4, 128 * 128 * 4, 4 * 128
    blocks = [m for m in found if m[2] == "blocks"]
    assert blocks == [
        ("col", "all_gather", "blocks", 2 * rows * 2 * 4, 2),
        ("col", "all_reduce", "blocks", 2 * rows * 4, 2),
        ("col", "broadcast", "blocks", x, 2 * 3 * 2),  # q x 3 products with h inputs, twice
        ("col", "broadcast", "blocks", 4 * x, 2 * 2),
        ("col", "reduce", "blocks", x, 2 * 3),
        ("col", "reduce", "blocks", 4 * x, 2),
        ("row", "broadcast", "blocks", w, 2 * 2),
        ("row", "broadcast", "blocks", 3 * w, 2 * 2),
        ("row", "broadcast", "blocks", 4 * w, 2 * 2 * 2),
        ("row", "reduce", "blocks", w, 2),
        ("row", "reduce", "blocks", 3 * w, 2),
        ("row", "reduce", "blocks", 4 * w, 2 * 2),
    ]
    others = {m for m in found if m[2] != "blocks"}
    logits = rows * 512 * 4  # 1024 words, padded, over q
    assert {m for m in others if m[2] in ("embedding.word", "head", "loss", "norms")} == {
        ("row", "reduce_scatter", "embedding.word", 8 * 128 * 128 * 4, 1),
        ("row", "all_gather", "embedding.word", 8 * 128 * 128 * 4, 1),
        ("row", "broadcast", "head", 512 * 128 * 4, 4),
        ("row", "reduce", "head", 512 * 128 * 4, 2),
        ("col", "broadcast", "head", logits, 2),
        ("col", "reduce", "head", logits, 2),
        ("col", "all_reduce", "loss", rows * 4, 3),
        ("col", "all_gather", "norms", 2 * rows * 2 * 4, 1),
        ("col", "all_reduce", "norms", 2 * rows * 4, 1),
    }
    assert ("tp", "all_reduce", "gradient norm", 8, 1) in others
    assert {m[:3] for m in others if m[2] == "partial gradients"} == {("row", "all_reduce", "partial gradients")}


@pytest.mark.parametrize("mode", GRIDS)
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_full_recomputation_sends_every_forward_message_of_a_layer_again(mode: str, family: str) -> None:
    model = LLAMA if family == "llama" else {}
    for dropout in (0.0, 0.1):
        own = {"training.dropout": dropout}
        plain = layout_of(GRIDS[mode], model, own)
        full = layout_of(GRIDS[mode], model, own, {"training.recompute": "full"})
        stack, flow = plain.table.stacks[0], plain.table.flows[0].runs[0][1]
        sent = StepMessages.of(plain).layers.block(stack, flow)
        again = StepMessages.of(full).layers.block(stack, flow)
        forward = sum(m.bytes * m.count for m in sent if m.phase == "forward")
        assert sum(m.bytes * m.count for m in again if m.phase == "recompute") == forward > 0
        assert [m for m in again if m.phase != "recompute"] == sent


@pytest.mark.parametrize("mode", GRIDS)
def test_a_validation_sends_the_forward_alone(mode: str) -> None:
    found = StepMessages.of(layout_of(GRIDS[mode])).forward_of(0, 1)
    kinds = {(m.what, m.kind) for m in found}
    of_norms = {(what, "all_gather") for what in ("blocks", "norms")}
    assert of_norms <= kinds and not any(what == "partial gradients" for what, _ in kinds)
    assert (("blocks", "reduce") in kinds) is False


@pytest.mark.parametrize("mode", GRIDS)
def test_a_rank_computes_its_part_of_every_product(mode: str) -> None:
    """1/P of products and scores: also in 2.5d, whose depths hold equal weights."""
    one = {"model.vocab_divisor": 1024}  # as many padded words on any number of ranks
    whole, part = layout_of(one), layout_of(GRIDS[mode], {"model.vocab_divisor": 128})
    ranks = part.job.parallel.tp
    assert part.table.numel == whole.table.numel
    assert step_flops(part, 0) * ranks == pytest.approx(step_flops(whole, 0), rel=1e-12)
    timer, alone = (step_time_model(layout).operators for layout in (part, whole))
    product = part.table.stacks[0].block_of(0).products[0]
    m, k, n = timer.shape(product)
    full = alone.shape(product)
    assert full == (8 * 128, 256, 768)
    assert m * k * n * timer.steps * ranks == full[0] * full[1] * full[2]


@pytest.mark.parametrize("mode", GRIDS)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_layer_keeps_its_part_of_the_activations(mode: str, recompute: str, family: str) -> None:
    """Within 2 %: norms' statistics are cut over samples alone, the table of rotations is not."""
    own = {"training.recompute": recompute, "training.dropout": 0.1}
    model = LLAMA if family == "llama" else {}
    sizes = []
    for layout in (layout_of(own, model), layout_of(own, model, GRIDS[mode])):
        shapes = activation_shapes(layout)
        saved = layer_activations(shapes, layout.table.stacks[0].block_of(0)).saved
        sizes.append(shapes.bytes_of(saved))
    assert sizes[1] * RANKS[mode] == pytest.approx(sizes[0], rel=0.02)


@pytest.mark.parametrize("mode", GRIDS)
def test_stages_hand_on_their_own_part(mode: str) -> None:
    layout = layout_of(GRIDS[mode], {"parallel.pp": 2})
    whole = 8 * 128 * 256 * 4
    assert {t.sizes for t in transfers(layout)} == {(whole // RANKS[mode],)}


@pytest.mark.parametrize("mode", GRIDS)
def test_a_blocks_traffic_sums_over_parts_axes_and_kinds(mode: str) -> None:
    layout = layout_of(GRIDS[mode])
    block = block_traffic(layout, layout.table.stacks[0])
    assert list(block.parts) == ["attention", "mlp", NORMS]
    kinds = [kind for part in block.parts.values() for kind in part.by_kind()]
    assert sum(k.volume_bytes for k in kinds) == block.whole.volume_bytes
    assert sum(k.ring_bytes_per_rank for k in kinds) == block.whole.ring_bytes_per_rank
    assert block.whole.phi_bytes == 8 * 128 * 256 * 4


@pytest.mark.parametrize("mode", GRIDS)
def test_seconds_of_a_grid_are_its_messages_over_the_links(mode: str) -> None:
    """At 1 GB/s without latency: rings send (n-1)/n of each phase, a broadcast the full message."""
    link = {"bandwidth": 1e9, "latency": 0.0, "start": 0.0, "efficiency": 1.0}
    layout = layout_of(GRIDS[mode], {"cluster.intra_node": link, "training.recompute": "full"})
    profile = get_profile("mpctl")
    still = OverlapShares(tp=0, pp=0, dp=0, buckets=True)
    time = find_step_time(layout, profile.model_copy(update={"overlap": still}))
    assert isinstance(time, StepTime), time
    expected = 0.0
    for m in StepMessages.of(layout).counted()[0]:
        ranks = layout.group_sizes[m.axis]
        share = {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0, "reduce": 1.0}
        if m.axis not in ("world", "dp_cp"):
            expected += m.count * m.bytes * share.get(m.kind, (ranks - 1) / ranks) / 1e9
    assert time.tp == pytest.approx(expected, rel=1e-9)


def test_steps_of_summa_hide_messages_of_each_other() -> None:
    """One of q = 2 steps overlaps with a product: at most half of the messages or of its time."""
    layout, profile = layout_of(GRIDS["2d"]), get_profile("mpctl")
    seconds = []
    for share in (0.0, 1.0):
        overlap = profile.overlap.model_copy(update={"tp": share, "drag": 0.0})
        time_model = step_time_model(layout, profile.model_copy(update={"overlap": overlap}))
        stack, flow = layout.table.stacks[0], layout.table.flows[0].runs[0][1]
        work = time_model.operators.block(stack, flow)
        sent = time_model.operators.messages.block(stack, flow)
        seconds.append((work, sum(map(time_model.operators.network.seconds, _forward(sent)))))
    (plain, sent_ahead), (hidden, _) = seconds
    saved = plain.tp_forward - hidden.tp_forward
    assert 0 < saved <= min(sent_ahead, plain.forward) / 2
    assert hidden.forward == plain.forward
    assert hidden.tp_backward < plain.tp_backward


def _forward(messages: list[Message]) -> list[Message]:
    return [m for m in messages if m.phase == "forward" and m.cover == "product"]


def test_groups_of_a_grid_find_their_links() -> None:
    """3d on 2 nodes of 4: `weight` and `input` lie in a node, `output` between two; a union of
    weight and output has two ranks on each."""
    layout = layout_of(GRIDS["3d"], {"cluster.nodes": 2, "cluster.gpus_per_node": 4})
    network = Network(layout.job.cluster, layout.topology)
    spans = {a: (network.route(a).ranks, network.route(a).domains) for a in layout.grid.groups}
    assert spans == {
        "weight": (2, 1),
        "input": (2, 1),
        "output": (2, 2),
        "weight-input": (4, 1),
        "weight-output": (4, 2),
    }
    assert (network.route("tp").ranks, network.route("tp").domains) == (8, 2)


def test_a_broadcast_sends_the_full_message_along_a_ring() -> None:
    """8 MB over 4 ranks at 100 GB/s and 1 us: 80 + 3 us; a gather moves 3/4 of it."""
    link = {"bandwidth": 1e11, "latency": 1e-6, "start": 0.0, "efficiency": 1.0}
    layout = layout_of({"parallel.tp": 4, "cluster.intra_node": link})
    network = Network(layout.job.cluster, layout.topology)
    found = {
        kind: network.seconds(Message("tp", kind, "", 8_000_000)) for kind in ("broadcast", "reduce", "all_gather")
    }
    assert found == pytest.approx({"broadcast": 83e-6, "reduce": 83e-6, "all_gather": 63e-6})


def test_buffers_of_a_product_by_hand() -> None:
    """x 8, w 4, y 2 bytes. 2d, q=2: dX with a buffer and two partial dW, 8 + 8 + 2 x 4, or two
    partial dX and a buffer of w, 20; q=3: two buffers and three sums, 8 + 16 + 12, or 24 + 8.
    3d, l=2: 2 x (2 + 2 x 8 + 4) and dX and dW, 12."""
    shapes = {mode: activation_shapes(layout_of(grid)) for mode, grid in GRIDS.items()}
    shapes["1d"] = activation_shapes(layout_of())
    shapes["3x3"] = shapes["2d"]._replace(side=3)
    bytes_of = {mode: product_bytes(own, x=8, w=4, y=2) for mode, own in shapes.items()}
    assert bytes_of == {"1d": 12, "2d": 24, "2.5d": 24, "3x3": 36, "3d": 56}
    assert head_bytes(shapes["2d"], x=8, w=4, y=20) == 20 + 4 + 8 + 2 * 4
    assert head_bytes(shapes["3d"], x=8, w=4, y=20) == 2 * (20 + 2 * 8 + 4) + 8 + 4


@pytest.mark.parametrize("mode", GRIDS)
def test_parts_of_matrices_and_words_are_those_of_the_parameters(mode: str) -> None:
    layout = layout_of(GRIDS[mode])
    shapes, stack = activation_shapes(layout), layout.table.stacks[0]
    of = {w.name: 4 * w.local_numel(layout.views) for w in stack.block_of(0).weights}
    for product in stack.block_of(0).products:
        assert product.matrix_bytes(shapes) == of[f"{product.name}.weight"]
    assert table_bytes(shapes) == 4 * stack.entry.weights[0].local_numel(layout.views)
    vectors = shapes.dims["looked_up"] * 128 * shapes.dims["hidden"] * 4  # before samples are scattered
    lookup = next(m for m in StepMessages.of(layout).layers.end(layout.table.flows[0].entry))
    assert (lookup.what, lookup.bytes) == ("embedding.word", vectors)
    assert lookup_bytes(shapes, "seq") == vectors + max(vectors, table_bytes(shapes))


@pytest.mark.parametrize("mode", GRIDS)
def test_a_plan_explains_a_grid_by_part_axis_and_kind(mode: str) -> None:
    """The explained figures equal those of the JSON, and the block is the sum of its rows."""
    plan = make_plan(layout_of(GRIDS[mode]).job)
    assert plan.estimate is not None, plan.errors
    entry = communication_entry(plan.estimate)
    figures = {f.name: f.value for f in explain(plan, ["communication.block", "memory.blocks"])}
    for sum_of, key in (("volume", "volume_bytes"), ("ring", "ring_bytes_per_rank")):
        told = figures.pop(f"communication.block.{sum_of}")
        rows = {n: v for n, v in figures.items() if n.startswith("communication.block.")}
        assert told == entry["layer"][key]
        assert told == sum(value for name, value in rows.items() if name.endswith(f".{sum_of}"))
    formulas = {f.name: f.formula for f in explain(plan, ["memory.blocks"])}
    samples = RANKS[mode] // 2
    assert formulas["memory.blocks.queries"] == f"batch / {samples} x seq x inner / 2 x value"
    assert formulas["memory.blocks.mlp-up-input"] == f"batch / {samples} x seq x hidden / 2 x value"
