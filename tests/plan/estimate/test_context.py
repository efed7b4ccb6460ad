"""parallel.cp_comm in a plan: bytes a rank sends, over which links, what hides it, what is saved."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.core.topology import Topology
from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.layout.topology import join_cp_groups
from mpctl.plan.estimate.activation_shapes import activation_shapes
from mpctl.plan.estimate.messages import step_messages
from mpctl.plan.estimate.time import step_time_model
from mpctl.plan.planning.plan import make_plan
from mpctl.plan.planning.traffic import sent_bytes
from tests.jobs import job_of

LAYERS, SEQ, HEADS, KV, SIZE = 2, 8192, 16, 8, 64
JOB: dict[str, Any] = {
    "cluster.preset": "dgx-h100",
    "cluster.nodes": 2,
    "training.runtime": "megatron-core",
    "training.dtype": "bf16",
    "training.recompute": "none",
    "training.micro_batch_size": 1,
    "model.layers": LAYERS,
    "model.hidden": 1024,
    "model.heads": HEADS,
    "model.kv_heads": KV,
    "model.seq_length": SEQ,
    "model.attention": "flash",
    "parallel.tp": 2,
}


def laid(comm: str | None, cp: int = 4, **others: Any) -> JobLayout:
    stated = {"parallel.cp_comm": comm} if comm else {}
    return JobLayout.of(job_of({**JOB, "parallel.cp": cp, **stated, **others}))


def sent(layout: JobLayout, axis: str = "cp") -> float:
    """Bytes that a rank sends in one step of one micro batch, a layer."""
    own = [message for message in step_messages(layout)[0] if message.axis == axis]
    return sent_bytes(own, layout.group_sizes) / LAYERS


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_bytes_are_those_of_transformer_engine(cp: int) -> None:
    """t = 8192 / cp; tp 2 leaves 8 query and 4 kv heads of 64: K + V 512 columns, Q and O 512 each."""
    t = SEQ // cp
    ring, exchanged = (cp - 1) * t * 512 * 2, (cp - 1) / cp * t * (512 + 512 + 512) * 2
    assert sent(laid("p2p", cp)) == 3 * ring
    assert sent(laid("all_gather", cp)) == 3 * ring
    assert sent(laid(None, cp)) == 2 * ring  # as before a job could say it
    if cp < 8:
        assert sent(laid("a2a", cp)) == 2 * exchanged
    inner = {"parallel.cp_a2a_size": 2}
    if cp > 2:
        both = laid("a2a+p2p", cp, **inner)
        assert sent(both, "cp_a2a") == 2 * (1 / 2) * t * 1536 * 2
        assert sent(both, "cp_p2p") == 3 * (cp // 2 - 1) * t * 512 * 2


def test_recomputed_layers_send_their_forward_again() -> None:
    t, ring = SEQ // 4, 3 * SEQ // 4 * 1024
    full = {"training.recompute": "full"}
    assert sent(laid("p2p", **full)) == 4 * ring
    assert sent(laid("a2a", **full)) == 3 * 3 / 4 * t * 1536 * 2


def test_mpctls_layers_gather_once() -> None:
    own = {"training.runtime": "mpctl", "training.dtype": "bf16"}
    assert step_messages(laid("all_gather", **own)) == step_messages(laid(None, **own))
    kinds = {message.kind for message in step_messages(laid("a2a", **own))[0] if message.axis == "cp"}
    assert kinds == {"all_to_all"}


def test_inner_groups_are_neighbours() -> None:
    cut = join_cp_groups(Topology.of({"tp": 2, "cp": 4, "dp": 2}, gpus_per_node=4), 2)
    assert [list(group) for group in cut.groups("cp_a2a")][:4] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert list(cut.group(0, "cp_p2p")) == [0, 4]


def seconds(layout: JobLayout) -> float:
    """Exposed messages over cp of a layer and micro batch."""
    block = step_time_model(layout).operators.block(layout.table.stacks[0], layout.table.flows[0].runs[0][1])
    return block.cp_forward + block.cp_backward


def test_an_exchange_stays_within_nodes_and_its_ring_leaves_them() -> None:
    """cp 8 of tp 2 is on two nodes of 8."""
    inner = {"parallel.cp_a2a_size": 4}
    network = step_time_model(laid("a2a+p2p", 8, **inner)).operators.network
    assert [network.route(axis).domains for axis in ("cp_a2a", "cp_p2p", "cp")] == [1, 2, 2]
    assert seconds(laid("a2a+p2p", 8, **inner)) > 0


def test_attention_hides_a_ring_and_no_gather() -> None:
    long = {"model.seq_length": 1 << 17}  # in short parts the latency of 3 x 7 messages outweighs it
    assert 0 < seconds(laid("p2p", 8, **long)) < seconds(laid("all_gather", 8, **long))


def test_what_is_saved_and_needed() -> None:
    """a2a keeps the projection's own input; all_gather holds keys and values twice and their gradients."""
    t, saved, needs = SEQ // 4, {}, {}
    for comm in ("p2p", "all_gather", "a2a"):
        layout = laid(comm)
        (core,) = layout.table.flows[0].runs[0][1].part.cores
        shapes = activation_shapes(layout)
        saved[comm], needs[comm] = shapes.bytes_of(core.saved(shapes, set())), core.needs(shapes)
    assert saved["a2a"] - saved["p2p"] == t * 512 * 2
    assert saved["all_gather"] == saved["p2p"]
    assert needs["all_gather"] - needs["p2p"] == (3 * 4 - 4) * t * 512 * 2
    assert needs["a2a"] == 3 * t * 1024 * 2


def test_a_plan_says_how_ranks_meet() -> None:
    plan = make_plan(laid("a2a+p2p", 8, **{"parallel.cp_a2a_size": 4}).job)
    plan.require_legal()
    assert plan.estimate.time is not None


def test_kv_heads_that_ranks_share_are_repeated() -> None:
    """DeepSpeed's Ulysses on 8 ranks, 16 heads and 2 kv heads of 64: a rank has 1024 positions of all heads, with
    four copies of each kv head, and then all 8192 of 2 heads and of the one kv head that they read."""
    t, cp, deepspeed = SEQ // 8, 8, {"training.runtime": "deepspeed", "parallel.tp": 1}
    layouts = {kv: laid("a2a", cp, **deepspeed, **{"model.kv_heads": kv}) for kv in (2, 8)}
    queries, exchanged = t * 16 * 64 * 2, t * 2 * 8 * 64 * 2  # 8 kv heads: 2 x 4 copies
    assert [layout.kv_copies for layout in layouts.values()] == [4, 1]
    for layout in layouts.values():
        assert sent(layout) == 2 * (cp - 1) / cp * (2 * queries + exchanged)
    saved, needs = {}, {}
    for kv, layout in layouts.items():
        (core,) = layout.table.flows[0].runs[0][1].part.cores
        shapes = activation_shapes(layout)
        tensors = core.saved(shapes, set())
        saved[kv] = sum(shapes.bytes_of([one]) for one in tensors if "keys and values" in one.name)
        needs[kv] = core.needs(shapes)
    assert saved[2] == SEQ * 2 * 64 * 2 == exchanged == saved[8]
    assert needs[2] == needs[8] == 3 * (queries + exchanged)
    make_plan(layouts[2].job).require_legal()
