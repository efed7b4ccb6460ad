"""What a layout sends: 4 all-reduces and 8 phi a block, in exact bytes, and nothing for tp 1."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.model.families.gpt.ops import HIDDEN
from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.operators.blocks import head, lookup
from mpctl.plan.estimate.communication import MessageCount, local_parameters, phi_bytes, shared_parameters
from mpctl.plan.estimate.layer_messages import block_traffic
from mpctl.plan.estimate.messages import StepMessages
from mpctl.plan.planning.document import communication_entry
from mpctl.plan.planning.plan import Plan, load_plan, make_plan
from tests.jobs import GPT, job_of

MIB = 2**20


@pytest.fixture(scope="module")
def golden() -> Plan:
    return load_plan("two-nodes-16-gpus")


def messages(plan: Plan, stage: int) -> list[MessageCount]:
    assert plan.estimate is not None
    return list(plan.estimate.messages[stage])


@given(
    tp=st.sampled_from([2, 3, 4, 6, 12]),
    micro=st.integers(1, 8),
    dtype=st.sampled_from([("fp32", 4), ("bf16", 2), ("fp16", 2)]),
    cp=st.sampled_from([1, 2, 4]),
)
def test_a_block_all_reduces_four_times(tp: int, micro: int, dtype: tuple[str, int], cp: int) -> None:
    job = job_of({"parallel.tp": tp, "parallel.cp": cp, "training.micro_batch_size": micro, "training.dtype": dtype[0]})
    phi = micro * (1024 // cp) * 768 * dtype[1]
    layout = JobLayout.of(job)
    block = block_traffic(layout, layout.table.stacks[0])
    assert block.whole.phi_bytes == phi_bytes(layout, layout.table.stacks[0]) == phi
    assert set(block.parts) == {"attention", "mlp"}
    for part in block.parts.values():
        assert (part.all_reduces, part.volume_phi, part.volume_bytes) == (2, 4, 4 * phi)
    whole = block.whole
    assert (whole.all_reduces, whole.volume_phi, whole.volume_bytes) == (4, 8, 8 * phi)
    assert whole.ring_bytes_per_rank * tp == 4 * 2 * (tp - 1) * phi


def test_one_rank_of_tp_sends_nothing() -> None:
    job = job_of({"parallel.dp": 4})
    layout = JobLayout.of(job)
    block = block_traffic(layout, layout.table.stacks[0])
    whole = block.whole
    totals = (whole.all_reduces, whole.volume_phi, whole.volume_bytes, whole.ring_bytes_per_rank)
    assert totals == (0, 0, 0, 0)
    assert whole.phi_bytes == 1024 * 768 * 4


def test_f_and_g_of_each_product() -> None:
    """arXiv 1909.08053, figure 3: columns reduce backward (f), rows forward (g)."""
    layer = JobLayout.of(job_of(GPT)).table.stacks[0].block_of(0)
    ends = (lookup(HIDDEN), head(HIDDEN, tied=True))
    axes = {p.name: (p.forward_axes, p.backward_axes) for p in (*layer.products, *ends)}
    assert axes == {
        "attention.qkv": ((), ("tp",)),
        "attention.output": (("tp",), ()),
        "mlp.up": ((), ("tp",)),
        "mlp.down": (("tp",), ()),
        "embedding.word": (("tp",), ()),
        "head": ((), ("tp",)),
    }


def test_bytes_of_the_golden_case(golden: Plan) -> None:
    """GPT-2 medium: micro batch 4 x sequence 1024 x hidden 1024 x 2 bytes = 8 MiB."""
    assert golden.estimate is not None
    entry = communication_entry(golden.estimate)
    part = {"all_reduces": 2, "volume_phi": 4, "volume_bytes": 32 * MIB}
    assert entry["phi_bytes"] == 8 * MIB
    assert entry["layer"] == {
        "attention": part,
        "mlp": part,
        "all_reduces": 4,
        "volume_phi": 8,
        "volume_bytes": 64 * MIB,
        "ring_bytes_per_rank": 32 * MIB,  # 4 x 2 (2 - 1)/2 x 8 MiB
    }


def test_messages_of_each_stage_of_the_golden_case(golden: Plan) -> None:
    """8 micro batches, 6 layers a stage; stage 0 looks tokens up, stage 3 has head and loss."""
    blocks = ("tp", "blocks", 8 * MIB, 8 * 6 * 4)
    norm = ("tp", "gradient norm", 8, 1)
    status = ("world", "status", (3 + 16) * 8, 1)
    ends = {
        0: [("tp", "embedding.word", 8 * MIB, 8)],
        3: [("tp", "head", 8 * MIB, 8), ("tp", "loss", 4 * 1024 * 4, 3 * 8)],
    }
    words = ("pp", "shared parameters", 50432 // 2 * 1024 * 4, 1)
    across = [("pp", "gradient norm", 8, 1)]
    for stage in range(4):
        sends = ("pp", "stages", 8 * MIB, 8 if stage in ends else 16)
        found = [(m.axis, m.what, m.bytes, m.count) for m in messages(golden, stage)]
        inside = [m for m in found if m[0] not in ("pp", "dp_cp")]
        assert sorted(inside) == sorted([blocks, norm, status, *ends.get(stage, [])])
        between = [m for m in found if m[0] == "pp"]
        assert between == [sends, *([words] if stage in ends else []), *across]
        gradients = [(what, size) for axis, what, size, _ in found if axis == "dp_cp"]
        own = 4 * golden.estimate.memory[stage].parameters
        words_alone = 1 if stage in ends else 0
        assert {what for what, _ in gradients} == {"gradients"}
        assert sum(size * count for axis, _, size, count in found if axis == "dp_cp") == own
        assert sum(size > 25 * MIB for _, size in gradients) == words_alone


def test_gradients_are_reduced_in_the_reduction_dtype(golden: Plan) -> None:
    """Stage 1: 6 layers of 12 h^2 + 13 h over tp 2; norms and row-parallel biases are not split."""
    h = 1024
    split = 12 * h * h + (3 + 4) * h  # four matrices; biases of qkv and of the MLP's first
    whole = (4 + 2) * h  # two norms; biases of both outputs
    gradients = [m for m in messages(golden, 1) if m.axis == "dp_cp"]
    assert sum(m.bytes * m.count for m in gradients) == 6 * (split // 2 + whole) * 4
    halved = load_plan("two-nodes-16-gpus", {"training.gradient_dtype": "bf16"})
    half = [m for m in messages(halved, 1) if m.axis == "dp_cp"]
    assert 2 * sum(m.bytes * m.count for m in half) == sum(m.bytes * m.count for m in gradients)
    assert len(half) < sum(m.count for m in gradients)  # buckets are of equal bytes


@pytest.mark.parametrize("settings", [{}, {"parallel.tp": 1}, {"parallel.dp": 1}])
def test_one_rank_alone_sends_nothing_at_all(settings: dict[str, int]) -> None:
    assert messages(make_plan(job_of(settings)), 0) == []


@given(tp=st.sampled_from([1, 2, 4]), pp=st.sampled_from([1, 2, 3, 4, 6]))
def test_ranks_hold_every_split_weight_once_and_every_other_one_tp_times(tp: int, pp: int) -> None:
    job = job_of({"parallel.tp": tp, "parallel.pp": pp})
    layout, table = JobLayout.of(job), JobLayout.of(job).table
    held = sum(tp * local_parameters(layout, stage) for stage in range(pp))
    whole = sum(w.numel for w in table.weights() if not w.is_split)
    word = next(table.weights())
    copies = word.numel if pp > 1 else 0  # the last stage's word table
    assert held == table.numel + (tp - 1) * whole + copies


@given(tp=st.sampled_from([1, 2, 4]), pp=st.sampled_from([1, 2, 3, 4]), stage=st.integers(0, 3))
def test_parameters_of_a_rank_are_those_of_its_named_weights(tp: int, pp: int, stage: int) -> None:
    """What local_parameters multiplies out, stage_weights names one by one."""
    job = job_of({"parallel.tp": tp, "parallel.pp": pp})
    stage = min(stage, pp - 1)
    layout = JobLayout.of(job)
    expected = sum(weight.local_numel(layout.views) for weight in layout.stage_parameters(stage))
    assert local_parameters(layout, stage) == expected


def test_messages_of_a_forward_alone() -> None:
    """Of 8 phi a block half is forward; words are looked up, the head sends only backward; the loss
    is forward. Recomputation and gathers for weights' gradients are backward."""
    for split, kind in ((False, "all_reduce"), (True, "reduce_scatter")):
        job = job_of({"parallel.tp": 2, "parallel.sequence_parallel": split, "training.recompute": "full"})
        layout = JobLayout.of(job)
        counts = {(m.what, m.kind): m.count for m in StepMessages.of(layout).forward_of(0, 1)}
        gathers = {("blocks", "all_gather"): 24, ("head", "all_gather"): 1} if split else {}
        assert counts == {("blocks", kind): 24, ("embedding.word", kind): 1, ("loss", "all_reduce"): 3, **gathers}


# ---------------------------------------------------------------- between stages

Pipe = list[tuple[str, str, int, int]]


def between(settings: dict[str, Any]) -> list[Pipe]:
    """Kind, what, bytes and count of each stage's messages over pp."""
    plan = make_plan(job_of(settings))
    assert plan.estimate is not None, plan.errors
    return [[(m.kind, m.what, m.bytes, m.count) for m in stage if m.axis == "pp"] for stage in plan.estimate.messages]


NORM = ("all_reduce", "gradient norm", 8, 1)
TWO: dict[str, Any] = {"parallel.pp": 2, "training.global_batch_size": 4}


def test_two_stages_of_a_gpt() -> None:
    """4 micro batches of [1, 1024, 768] float32: 3 MiB forward from stage 0, 3 MiB backward from
    stage 1; the word table, padded to 50304 rows, is on both. One stage sends nothing."""
    sends = ("send", "stages", 3 * MIB, 4)
    words = ("all_reduce", "shared parameters", 50304 * 768 * 4, 1)
    assert between(TWO) == [[sends, words, NORM]] * 2
    assert between({**TWO, "model.tied_embeddings": False}) == [[sends, NORM]] * 2
    assert between({**TWO, "parallel.pp": 1}) == [[]]


def test_a_middle_stage_sends_both_ways() -> None:
    three = between({**TWO, "parallel.pp": 3})
    assert [stage[0] for stage in three] == [("send", "stages", 3 * MIB, n) for n in (4, 8, 4)]
    assert [len(stage) for stage in three] == [3, 2, 3]  # the middle one has no word table


def test_chunks_have_more_boundaries() -> None:
    """2 stages of 2 chunks: activations 0 1, 1 0 and 0 1, gradients back: 3 each, whoever sends."""
    for stage in between({**TWO, "parallel.vpp": 2}):
        assert stage[0] == ("send", "stages", 3 * MIB, 3 * 4)


def test_a_message_between_stages_is_the_ranks_own_tensor() -> None:
    """In the training dtype, of its part of the sequence over cp, and over tp where that splits it;
    shared parameters are its rows, in the reduction dtype."""
    wide = {**TWO, "parallel.tp": 2, "parallel.cp": 2, "training.dtype": "bf16"}
    words = ("all_reduce", "shared parameters", 50432 // 2 * 768 * 4, 1)
    for is_split in (False, True):
        sends = ("send", "stages", 3 * MIB // 4 // (1 + is_split), 4)
        found = between({**wide, "parallel.sequence_parallel": is_split})
        assert found == [[sends, words, NORM]] * 2


T5: dict[str, Any] = {
    "model.family": "t5",
    "model.position": "relative",
    "model.norm": "rmsnorm",
    "model.bias": False,
    "model.decoder_layers": 12,
    "model.decoder_seq_length": 256,
    "parallel.pp": 3,
    "training.global_batch_size": 4,
}


def test_three_stages_of_a_t5() -> None:
    """8 layers a stage: encoder 0-7; encoder 8-11, decoder 0-3; decoder 4-11. Behind the first goes
    the encoder's state, 1024 x 768 x 4; behind the second the decoder's, 256 long, and the
    encoder's result. Words are looked up by stages 0 and 1 and are the head of 2; the encoder's
    relative table of 32 x 12 is on 0 and 1, the decoder's on 1 and 2."""
    encoder, decoder = ("send", "stages", 3 * MIB), ("send", "stages", 3 * MIB // 4)
    words = ("all_reduce", "shared parameters", 50304 * 768 * 4, 1)
    table = ("all_reduce", "shared parameters", 32 * 12 * 4, 1)
    assert between(T5) == [
        [(*encoder, 4), words, table, NORM],
        [(*decoder, 4), (*encoder, 8), (*table[:3], 2), words, NORM],
        [(*decoder, 4), (*encoder, 4), table, words, NORM],
    ]


def test_a_stage_that_ends_with_the_encoder_hands_on_its_result_alone() -> None:
    found = between({**T5, "parallel.pp": 2})
    words = ("all_reduce", "shared parameters", 50304 * 768 * 4, 1)
    assert found == [[("send", "stages", 3 * MIB, 4), words, NORM]] * 2


def test_frozen_parameters_send_no_gradients_and_share_none() -> None:
    """Nothing trained on stage 0: stage 1 sends nothing. With its last layer trained it does."""
    forward, words = ("send", "stages", 3 * MIB, 4), "shared parameters"
    frozen = ["embedding.*", "layers.[0-5].*"]
    assert between({**TWO, "training.freeze": frozen}) == [[forward, NORM], [NORM]]
    some = between({**TWO, "training.freeze": ["embedding.*", "layers.[0-4].*"]})
    assert some == [[forward, NORM]] * 2
    held = between({**TWO, "training.freeze": ["layers.*"]})
    assert [[m[1] for m in stage] for stage in held] == [["stages", words, "gradient norm"]] * 2


@given(pp=st.sampled_from([1, 2, 3, 4, 6]), vpp=st.sampled_from([1, 2]), t5=st.booleans())
def test_what_is_shared_is_what_several_stages_name(pp: int, vpp: int, t5: bool) -> None:
    job = job_of(
        {
            **(T5 if t5 else {}),
            "model.layers": 24,
            "parallel.pp": pp,
            "parallel.vpp": vpp if pp > 1 else 1,
            "model.decoder_layers": 24 if t5 else None,
            "training.global_batch_size": 12,
        }
    )
    layout = JobLayout.of(job)
    names: dict[str, list[int]] = {}
    for stage in range(pp):
        for weight in layout.stage_parameters(stage):
            names.setdefault(weight.name, []).append(stage)
    shared = {s.weight.name: list(s.stages) for s in shared_parameters(layout)}
    assert shared == {name: held for name, held in names.items() if len(held) > 1}
    assert shared == {name: list(held) for name, held in layout.shared_parameters.items()}
