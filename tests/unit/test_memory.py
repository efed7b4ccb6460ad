"""Bytes a rank holds, against arXiv 2205.05198 worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.estimate.memory import StageMemory, held_bytes, layer_activation_bytes
from mpctl.families.gpt.ops import operator_table
from mpctl.families.t5.ops import operator_table as t5_table
from mpctl.plan import load_plan, make_plan
from mpctl.spec.job import JobSpec
from tests.unit.jobs import job_of, shape_of

# arXiv 2205.05198, table 3, the 22B row: h 6144, a 64, L 48, tp 8, s 2048, micro batch 4, v 51200.
GPT_22B: dict[str, Any] = {
    "model.layers": 48,
    "model.hidden": 6144,
    "model.heads": 64,
    "model.vocab": 51200,
    "model.seq_length": 2048,
    "model.attention": "unfused",
    "training.micro_batch_size": 4,
    "training.dtype": "fp16",
    "training.dropout": 0.1,
}
SBH = 50_331_648  # 2048 x 4 x 6144
SCORES = 5_368_709_120  # 5 a s^2 b = 5 x 64 x 2048 x 2048 x 4
TP = {"parallel.tp": 8}
SP = {**TP, "parallel.sequence_parallel": True}
SELECTIVE, FULL = {"training.recompute": "selective"}, {"training.recompute": "full"}


def layer_bytes(job: JobSpec) -> float:
    (stack,) = operator_table(shape_of(job), tp=job.parallel.tp).stacks
    return layer_activation_bytes(job, shape_of(job), stack)


# Rows of table 2, each multiplied out.
@pytest.mark.parametrize(
    ("settings", "by_hand"),
    [
        ({}, 34 * SBH + SCORES),  # 7,079,985,152
        (TP, 13 * SBH + SCORES // 8),  # 10 + 24/8 = 13: 1,325,400,064
        (SP, 34 * SBH // 8 + SCORES // 8),  # 884,998,144
        ({**TP, **SELECTIVE}, 654_311_424),  # 13 sbh
        ({**SP, **SELECTIVE}, 213_909_504),  # 34/8 sbh
        (FULL, 100_663_296),  # 2 sbh
        ({**TP, **FULL}, 100_663_296),  # the input is replicated over tp
        ({"model.attention": "flash"}, 34 * SBH),
        ({"model.attention": "flash", "training.attention_dropout": 0.1}, 34 * SBH + SCORES),
        ({"training.dtype": "fp32"}, 2 * (34 * SBH + SCORES)),
        ({"parallel.cp": 2}, (34 * SBH + SCORES) // 2),
    ],
)
def test_activations_of_a_layer(settings: dict[str, Any], by_hand: int) -> None:
    job = job_of({**GPT_22B, **settings})
    assert layer_bytes(job) == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "hidden", "heads", "ratio", "saved"),
    [("175B", 12288, 96, 80, 0.70), ("530B", 20480, 128, 64, 0.65)],
)
def test_share_saved_by_selective_recomputation(
    name: str, hidden: int, heads: int, ratio: int, saved: float
) -> None:
    """Section 5: 5as/h is 80 for GPT-3 and 64 for MT-NLG against 34, so that recomputing the
    attention core saves 70 % and 65 % of their activations. Printed to two digits."""
    shape = {**GPT_22B, **SP, "model.hidden": hidden, "model.heads": heads}
    kept, less = job_of(shape), job_of({**shape, **SELECTIVE})
    whole = layer_bytes(kept)
    assert 5 * heads * 2048 == ratio * hidden
    assert whole * 8 == 2048 * 4 * hidden * (34 + ratio)
    assert 1 - layer_bytes(less) / whole == pytest.approx(saved, abs=5e-3)


@pytest.mark.parametrize(
    ("settings", "by_stage"),
    [
        ({}, [4, 3, 2, 1]),
        ({"training.global_batch_size": 2}, [2, 2, 2, 1]),
        ({"parallel.schedule": "gpipe"}, [16, 16, 16, 16]),
        ({"parallel.schedule": "zero-bubble"}, [4, 4, 4, 4]),
        ({"parallel.vpp": 3}, [15 / 3, 13 / 3, 11 / 3, 9 / 3]),
    ],
)
def test_micro_batches_in_flight(settings: dict[str, Any], by_stage: list[float]) -> None:
    """4 stages. 1F1B: a stage is p - stage - 1 forwards ahead and does one more. Zero-bubble: it
    also keeps, for their weights' gradients, as many as its number.

    Interleaved, 3 chunks: the first stage meets a micro batch again after p others, so that it does
    (v-1) p forwards of its first chunks before the last one's; the first backward returns after
    2 (p-1) more hops, in each of which it does a forward; and one more: 8 + 6 + 1 chunks of a third
    of the layers, p (1 + (p-1)/(p v)) = 5 micro batches. Each further stage is 2 hops nearer to the
    last: 2 chunks less.
    """
    job = job_of({"parallel.pp": 4, "training.global_batch_size": 16, **settings})
    chunks = [1 / job.parallel.vpp] * job.parallel.vpp
    assert [held_bytes(job, chunks, stage=stage) for stage in range(4)] == pytest.approx(by_stage)


@pytest.mark.parametrize(("chunks", "held"), [((10, 1), 21), ((1, 10), 12), ((5, 5), 15)])
def test_chunks_of_unequal_size_are_held_as_the_schedule_holds_them(
    chunks: tuple[float, ...], held: float
) -> None:
    """Stage 1 of 2, 2 chunks, 2 micro batches: F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 B0.0 B1.0."""
    job = job_of({"parallel.pp": 2, "parallel.vpp": 2, "training.global_batch_size": 2})
    assert held_bytes(job, chunks, stage=1) == held


def test_a_decoders_chunk_weighs_less_than_an_encoders() -> None:
    """T5, 2 stages of 2 chunks: stage 0 holds 6 encoder layers and 6 decoder layers; it does all
    but one of its 4 forwards before its first backward, and its decoder's F1 after that."""
    t5 = {
        "model.family": "t5", "model.position": "relative", "model.decoder_layers": 12,
        "model.decoder_seq_length": 256, "parallel.pp": 2, "parallel.vpp": 2,
        "training.global_batch_size": 2,
    }  # fmt: skip
    job = job_of(t5)
    model = shape_of(job)
    encoder, decoder = (layer_activation_bytes(job, model, s) for s in t5_table(model, tp=1).stacks)
    assert decoder < encoder
    first = stages(t5)[0]
    assert first.activation_bytes == round(6 * (2 * encoder + 2 * decoder))


def stages(settings: dict[str, Any]) -> tuple[StageMemory, ...]:
    estimate = make_plan(job_of(settings)).estimate
    assert estimate is not None
    return estimate.memory


def test_a_first_stage_holds_all_layers_activations_without_interleaving() -> None:
    """Section 4.2.3: p micro batches of L/p layers each are L layers, whatever p is."""
    one = {**GPT_22B, **SP, "training.global_batch_size": 64}
    for pp in (1, 2, 4, 8):
        first = stages({**one, "parallel.pp": pp})[0]
        assert first.activation_bytes == 48 * (34 * SBH + SCORES) // 8


def test_states_are_18_bytes_a_parameter_in_mixed_precision() -> None:
    """2 weights, 4 gradients (fp32), 4 master copy, 8 for Adam's two moments."""
    (only,) = stages({"training.dtype": "bf16"})
    count = only.parameters
    parts = (only.parameter_bytes, only.gradient_bytes, only.optimizer_bytes)
    assert parts == (2 * count, 4 * count, 12 * count)
    assert only.total_bytes == 18 * count + only.activation_bytes
    (full,) = stages({"training.dtype": "fp32"})
    parts = (full.parameter_bytes, full.gradient_bytes, full.optimizer_bytes)
    assert parts == (4 * count, 4 * count, 8 * count)


@pytest.mark.parametrize(("zero", "shared"), [(0, 0), (1, 1), (2, 2), (3, 3)])
def test_zero_shares_optimizer_then_gradients_then_parameters(zero: int, shared: int) -> None:
    dp = 7  # shares are rounded up
    base = {"training.dtype": "bf16", "parallel.dp": dp}
    (plain,), (split,) = stages(base), stages({**base, "parallel.zero": zero})
    names = ("optimizer_bytes", "gradient_bytes", "parameter_bytes")
    for position, name in enumerate(names):
        whole = getattr(plain, name)
        assert getattr(split, name) == (-(-whole // dp) if position < shared else whole)
    assert split.activation_bytes == plain.activation_bytes


def test_memory_of_the_golden_case() -> None:
    """Flash attention: 6 layers, 4 - stage in flight, sbh (10 + 24/2) of 4 x 1024 x 1024."""
    estimate = load_plan("two-nodes-16-gpus").estimate
    assert estimate is not None
    sbh = 4 * 1024 * 1024
    held = [stage.activation_bytes for stage in estimate.memory]
    assert held == [6 * flight * 22 * sbh for flight in (4, 3, 2, 1)]
    h, rows = 1024, 50432 // 2
    layers = 6 * ((12 * h * h + 7 * h) // 2 + 6 * h)
    counts = [layers + (rows + 1024) * h, layers, layers, layers + rows * h + 2 * h]
    assert [stage.parameters for stage in estimate.memory] == counts
