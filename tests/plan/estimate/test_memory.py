"""Bytes a rank holds, against arXiv 2205.05198 worked out by hand, and published peaks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.pipeline.schedule.orders import actions
from mpctl.plan.estimate.activation_shapes import activation_shapes
from mpctl.plan.estimate.activations import ChunkBytes, stage_chunks
from mpctl.plan.estimate.explain import explain_memory
from mpctl.plan.estimate.memory import StageMemory, layout_memory, peak_activations, peak_with_gradients
from mpctl.plan.estimate.saved import layer_activations
from mpctl.plan.planning.plan import load_plan, make_plan
from mpctl.spec.job import JobSpec
from tests.jobs import job_of

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
    "training.runtime": "megatron-2022",
}
SBH = 50_331_648  # 2048 x 4 x 6144
SCORES = 5_368_709_120  # 5 a s^2 b = 5 x 64 x 2048 x 2048 x 4
TP = {"parallel.tp": 8}
SP = {**TP, "parallel.sequence_parallel": True}
SELECTIVE, FULL = {"training.recompute": "selective"}, {"training.recompute": "full"}
GPU = {"launch.device": "cuda"}
OURS = {"training.runtime": "mpctl", "model.attention": "flash", "launch.device": "cpu"}


def layer_bytes(job: JobSpec, stack: int = 0) -> float:
    """Of one layer, statistics of norms left out, which the paper does not count."""
    layout = JobLayout.of(job)
    shapes = activation_shapes(layout)
    saved = layer_activations(shapes, layout.table.stacks[stack].block_of(0)).saved
    return shapes.bytes_of(k for k in saved if "statistics" not in k.name and k.name != "sums")


# Rows of table 2, each multiplied out; without scores also without dropout, as flash is run.
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
        ({"model.attention": "flash"}, 32 * SBH),
        ({"model.attention": "flash", "training.dropout": 0.1}, 34 * SBH),
        ({"training.dtype": "fp32"}, (4 * 16 + 2) * SBH + SCORES * 9 // 5),  # masks stay a byte
        # fp8 operands: norms 4 + 2, q k v 6, context 2 and its operand 1, MLP 8 and its operand 4
        ({"model.attention": "flash", "training.dtype": "fp8"}, 27 * SBH),
        # a causal rank of cp 2 has 5/8 of its pairs: 1 and 4 of 4 blocks of keys
        ({"parallel.cp": 2}, 17 * SBH + SCORES * 5 // 16),
        # ours: the same tensors; with attention dropout q, k and v are copied for their products
        ({**OURS, "training.dropout": 0.1}, 34 * SBH),
        ({**OURS, "training.dropout": 0.1, "training.attention_dropout": 0.1}, 34 * SBH + SCORES + 2048 * 2048),
        # on a GPU a kernel forms them block by block
        ({**OURS, **GPU, "training.dropout": 0.1, "training.attention_dropout": 0.1}, 34 * SBH),
        ({**OURS, **GPU, **SELECTIVE, "training.attention_dropout": 0.1}, 32 * SBH),
        ({**OURS, **SP, **FULL}, 2 * SBH // 8),
        ({**OURS, **TP, **FULL, "training.partition_activations": True}, 2 * SBH // 8),
        ({**OURS, **FULL, "training.offload_activations": True}, 0),
        # gated: 2 f and f of bf16 in place of 4 h and 4 h; of turned q and k copies
        ({**OURS, "model.activation": "swiglu", "model.ffn": 6144}, (16 + 6) * SBH),
        ({**OURS, "model.activation": "relu"}, 24 * SBH),
        ({**OURS, "model.kv_heads": 8}, 32 * SBH - 4 * SBH * 7 // 8),
    ],
)
def test_activations_of_a_layer(settings: dict[str, Any], by_hand: int) -> None:
    job = job_of({**GPT_22B, **settings})
    assert layer_bytes(job) == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "hidden", "heads", "ratio", "saved"), [("175B", 12288, 96, 80, 0.70), ("530B", 20480, 128, 64, 0.65)]
)
def test_share_saved_by_selective_recomputation(name: str, hidden: int, heads: int, ratio: int, saved: float) -> None:
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
        ({"parallel.schedule": "zero-bubble"}, [4, 3.5, 3, 2.5]),
        ({"parallel.vpp": 3}, [15 / 3, 13 / 3, 11 / 3, 9 / 3]),
    ],
)
def test_micro_batches_in_flight(settings: dict[str, Any], by_stage: list[float]) -> None:
    """4 stages. 1F1B: a stage is p - stage - 1 forwards ahead and does one more. Zero-bubble: it
    also keeps half (deferred) of as many as its number, for their weights' gradients.

    Interleaved, 3 chunks: the first stage meets a micro batch again after p others, so that it does
    (v-1) p forwards of its first chunks before the last one's; the first backward returns after
    2 (p-1) more hops, in each of which it does a forward; and one more: 8 + 6 + 1 chunks of a third
    of the layers, p (1 + (p-1)/(p v)) = 5 micro batches. Each further stage is 2 hops nearer to the
    last: 2 chunks less. What an action has besides, 7, is there once.
    """
    job = job_of({"parallel.pp": 4, "training.global_batch_size": 16, **settings})
    share = 1 / job.parallel.vpp
    chunks = [ChunkBytes(share, share + 7, share / 2, share + 7)] * job.parallel.vpp
    found = [peak_of(job, chunks, stage) for stage in range(4)]
    assert [held for held, _, _ in found] == pytest.approx(by_stage)
    assert [peak for _, peak, _ in found] == pytest.approx([held + 7 for held in by_stage])


@pytest.mark.parametrize("chunk", [ChunkBytes(5, 9, 3, 8), ChunkBytes(1, 4, 3, 6)])
@pytest.mark.parametrize("batch", [1, 2, 3, 16])
@pytest.mark.parametrize("pp", [2, 4])
def test_zero_bubble_holds_what_its_order_of_actions_leaves(pp: int, batch: int, chunk: ChunkBytes) -> None:
    """A micro batch keeps `saved` from its forward to the backward that leaves weights' gradients,
    whose most is split_peak, and then `deferred`. In the second shape, as under full recomputation,
    what is deferred is more than what was saved; few micro batches never fill the pipeline."""
    job = job_of({"parallel.pp": pp, "training.global_batch_size": batch, "parallel.schedule": "zero-bubble"})
    for stage in range(pp):
        held = kept = peak = 0.0
        for kind, *_ in actions("zero-bubble", stage=stage, stages=pp, microbatches=batch):
            if kind == "backward_input":
                peak = max(peak, held - chunk.saved + chunk.split_peak)
            held += {
                "forward": chunk.saved,
                "backward_input": chunk.deferred - chunk.saved,
                "backward_weight": -chunk.deferred,
            }[kind]
            kept, peak = max(kept, held), max(peak, held)
        assert peak_of(job, [chunk], stage)[:2] == (kept, peak)


@pytest.mark.parametrize(("chunks", "held"), [((10, 1), 21), ((1, 10), 12), ((5, 5), 15)])
def test_chunks_of_unequal_size_are_held_as_the_schedule_holds_them(chunks: tuple[float, ...], held: float) -> None:
    """Stage 1 of 2, 2 chunks, 2 micro batches: F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 B0.0 B1.0."""
    job = job_of({"parallel.pp": 2, "parallel.vpp": 2, "training.global_batch_size": 2})
    sizes = [ChunkBytes(size, size) for size in chunks]
    assert peak_of(job, sizes, 1)[:2] == (held, held)


def peak_of(job: JobSpec, chunks: Sequence[ChunkBytes], stage: int) -> tuple[float, float, int]:
    p = job.parallel
    return peak_activations(p.schedule, stage, p.pp, job.num_microbatches, chunks)


def stages(settings: dict[str, Any]) -> tuple[StageMemory, ...]:
    estimate = make_plan(job_of(settings)).estimate
    assert estimate is not None
    return estimate.memory


def test_the_source_of_cross_attention_is_held_where_it_is_read() -> None:
    """T5 on 4 stages of a layer each, s and q of 64, fp32, flash, zero-bubble. The encoder's end adds to its stage
    what the norm saves, and no result, which it sends on. Deferred of a decoder's layer: inputs and gradients of
    its six products, qkv 1 + 3, output 1 + 1, query 1 + 1, key_value 0 + 2, output 1 + 1, MLP 1 + 4 and 4 + 1 of
    [b, s, h]; and the source."""
    sizes = {"layers": 2, "decoder_layers": 2, "hidden": 64, "heads": 4, "ffn": 256, "vocab": 1000}
    lengths = {"seq_length": 64, "decoder_seq_length": 64}
    model = {f"model.{key}": value for key, value in (sizes | lengths | {"family": "t5", "attention": "flash"}).items()}
    layout = JobLayout.of(job_of({**model, **OURS, "parallel.pp": 4, "parallel.schedule": "zero-bubble"}))
    shapes = activation_shapes(layout)
    first, last, decoder, _ = [stage_chunks(layout, stage, shapes)[0] for stage in range(4)]
    one = shapes.own_bytes()
    assert last.saved - first.saved == one * (1 + 2 / 64)  # input, means and deviations
    assert decoder.deferred == 23 * one


def test_a_first_stage_holds_all_layers_activations_without_interleaving() -> None:
    """Section 4.2.3: p micro batches of L/p layers each are L layers, whatever p is; what differs
    are the embedding's mask and the batch's ids of p micro batches, and the head."""
    one = {**GPT_22B, **SP, "training.global_batch_size": 64}
    layers = 48 * (34 * SBH + SCORES) / 8
    for pp in (2, 4, 8):
        first = stages({**one, "parallel.pp": pp})[0]
        assert first.activation_bytes == pytest.approx(layers, rel=2e-3)
        assert first.activation_bytes >= layers


def test_states_are_18_bytes_a_parameter_in_mixed_precision() -> None:
    """2 weights, 4 gradients (fp32), 4 master copy, 8 for Adam's two moments."""
    (only,) = stages({"training.dtype": "bf16"})
    count = only.parameters
    parts = (only.parameter_bytes, only.gradient_bytes, only.optimizer_bytes)
    assert parts == (2 * count, 4 * count, 12 * count)
    beside = only.activation_bytes + only.working_bytes
    assert only.allocated_bytes == 18 * count + beside
    assert only.allocated_bytes < only.reserved_bytes < only.device_bytes
    (full,) = stages({"training.dtype": "fp32", "launch.device": "cpu"})
    parts = (full.parameter_bytes, full.gradient_bytes, full.optimizer_bytes)
    assert parts == (4 * count, 4 * count, 8 * count)
    assert full.allocated_bytes == full.device_bytes  # on a CPU there is nothing besides


@pytest.mark.parametrize(
    ("gradient_dtype", "dtype", "each"),
    [
        (None, "bf16", 4),
        ("bf16", "bf16", 2),
        ("fp32", "bf16", 4),
        (None, "fp8", 2),
        ("fp32", "fp8", 4),
        ("fp32", "fp16", 4),
    ],
)
def test_gradients_of_megatron_core_are_narrow_where_the_job_or_fp8_says_so(
    gradient_dtype: str | None, dtype: str, each: int
) -> None:
    job = {"training.runtime": "megatron-core", "training.dtype": dtype}
    if gradient_dtype:
        job["training.gradient_dtype"] = gradient_dtype
    (only,) = layout_memory(JobLayout.of(job_of(job)))
    assert only.gradient_bytes == each * only.parameters


@pytest.mark.parametrize("runtime", ["mpctl", "megatron-core"])
@pytest.mark.parametrize(("zero", "shared"), [(0, 0), (1, 1), (2, 2), (3, 3)])
def test_zero_shares_optimizer_then_gradients_then_parameters(zero: int, shared: int, runtime: str) -> None:
    dp = 7  # shares are rounded up, ours bucket by bucket
    base = {"training.dtype": "bf16", "parallel.dp": dp, "training.runtime": runtime}
    (plain,), (split,) = stages(base), stages({**base, "parallel.zero": zero})
    names = ("optimizer_bytes", "gradient_bytes", "parameter_bytes")
    for position, name in enumerate(names):
        whole = getattr(plain, name)
        expected = whole / dp if position < shared else whole
        assert getattr(split, name) == pytest.approx(expected, rel=1e-4)
        assert getattr(split, name) >= expected
    assert split.activation_bytes == plain.activation_bytes


@pytest.mark.parametrize("runtime", ["fsdp", "torchtitan"])
def test_fsdp_gathers_a_copy_in_the_training_dtype(runtime: str) -> None:
    """4 bytes of the shard; ZeRO 2 keeps a copy of 2 bytes after the forward, ZeRO 3 a layer's."""
    base = {"training.dtype": "bf16", "parallel.dp": 4, "training.runtime": runtime}
    (two,), (three,) = (stages({**base, "parallel.zero": zero}) for zero in (2, 3))
    count = three.parameters
    assert three.parameter_bytes == pytest.approx(4 * count / 4, rel=1e-4)
    assert two.parameter_bytes == three.parameter_bytes + 2 * count
    assert two.gradient_bytes == three.gradient_bytes == pytest.approx(4 * count / 4, rel=1e-4)


def test_a_pipeline_of_fsdp2_keeps_parameters_and_adds_up_gradients() -> None:
    """torch.distributed.pipelining scatters a stage's gradients after its last backward."""
    job = {
        "training.dtype": "bf16",
        "training.runtime": "torchtitan",
        "parallel.pp": 2,
        "parallel.dp": 4,
        "training.global_batch_size": 32,
    }
    for zero in (2, 3):
        first, _ = stages({**job, "parallel.zero": zero})
        count = first.parameters
        assert first.parameter_bytes == pytest.approx((4 / 4 + 2) * count, rel=1e-4)
        assert first.working_bytes > 4 * count  # float32 sums of whole gradients
    first, _ = stages({**job, "parallel.zero": 3, "training.runtime": "fsdp"})
    assert first.parameter_bytes == pytest.approx(4 / 4 * count, rel=1e-4)


def test_gradients_that_add_up_are_whole_while_their_chunk_goes_backward() -> None:
    """Stage 0 of 2, 2 chunks that save 1. With 2 micro batches all 4 forwards come first; chunk 1
    is scattered before chunk 0 begins: 4 + 10 then 2 + 7. With 4 micro batches, chunk 1 has two to
    come when chunk 0's first goes backward: 10 + 7 and the 4 then in flight."""
    chunks = [ChunkBytes(1.0, 1.0), ChunkBytes(1.0, 1.0)]
    assert peak_with_gradients("interleaved", 0, 2, 2, chunks, [7.0, 10.0]) == 14
    assert peak_with_gradients("interleaved", 0, 2, 2, chunks, [17.0, 10.0]) == 19
    order = list(actions("interleaved", stage=0, stages=2, microbatches=4, chunks=2))
    begins = next(at for at, one in enumerate(order) if (one.kind, one.chunk) == ("backward", 0))
    held = sum(1 if one.kind == "forward" else -1 for one in order[:begins])
    assert peak_with_gradients("interleaved", 0, 2, 4, chunks, [7.0, 10.0]) == held + 17


def test_memory_of_the_golden_case() -> None:
    """Flash attention: 6 layers, 4 - stage in flight, sbh (8 + 24/2) of 4 x 1024 x 1024."""
    estimate = load_plan("two-nodes-16-gpus").estimate
    assert estimate is not None
    sbh = 4 * 1024 * 1024
    held = [stage.activation_bytes for stage in estimate.memory]
    assert held[:3] == pytest.approx([6 * flight * 20 * sbh for flight in (4, 3, 2)], rel=5e-3)
    logits = 2 * 4 * 1024 * 50432 // 2
    assert held[3] == pytest.approx(6 * 20 * sbh + 4 * sbh + logits, rel=5e-3)
    h, rows = 1024, 50432 // 2
    layers = 6 * ((12 * h * h + 7 * h) // 2 + 6 * h)
    counts = [layers + (rows + 1024) * h, layers, layers, layers + rows * h + 2 * h]
    assert [stage.parameters for stage in estimate.memory] == counts


# (job, peak, part of it that may be missed). Zero Bubble PP, arXiv 2401.10241, table 4, in GB;
# Megatron-Core 0.14 on 8 B200 (SimuMax v1.2's measurements), GiB.
ZB = {
    "cluster.preset": "zb-a100-roce",
    "cluster.nodes": 2,
    "cluster.gpus_per_node": 8,
    "model.layers": 46,
    "model.hidden": 5120,
    "model.heads": 40,
    "model.vocab": 50304,
    "model.seq_length": 1024,
    "model.attention": "unfused",
    "parallel.pp": 16,
    "training.micro_batch_size": 1,
    "training.global_batch_size": 48,
    "training.dtype": "fp16",
    "training.runtime": "megatron-core",
}
LLAMA_70B = {
    "cluster.preset": "b200-node",
    "cluster.nodes": 1,
    "cluster.gpus_per_node": 8,
    "model.layers": 12,
    "model.hidden": 8192,
    "model.ffn": 28672,
    "model.heads": 64,
    "model.kv_heads": 8,
    "model.vocab": 128256,
    "model.seq_length": 4096,
    "model.activation": "swiglu",
    "model.tied_embeddings": False,
    "model.position": "rotary",
    "model.norm": "rmsnorm",
    "model.bias": False,
    "parallel.zero": 1,
    "training.global_batch_size": 16,
    "training.dtype": "bf16",
    "training.runtime": "megatron-core",
}


@pytest.mark.parametrize(
    ("settings", "measured"),
    [
        (ZB, 32e9),
        ({**LLAMA_70B, "parallel.tp": 4, "parallel.dp": 2, "parallel.sequence_parallel": True}, 39.07 * 2**30),
        ({**LLAMA_70B, "parallel.pp": 2, "parallel.dp": 4}, 66.55 * 2**30),
    ],
)
def test_published_peaks(settings: dict[str, Any], measured: float) -> None:
    peak = max(stage.allocated_bytes for stage in stages(settings))
    assert peak == pytest.approx(measured, rel=0.04)


def test_every_figure_is_the_sum_of_those_below() -> None:
    job = load_plan("two-nodes-16-gpus").job
    found = {f.name: f for f in explain_memory(JobLayout.of(job))}
    parts = [f.value for name, f in found.items() if name.startswith("memory.blocks.")]
    assert found["memory.blocks"].value == sum(parts) > 0
    states = ("parameters", "gradients", "optimizer", "activations", "working", "software", "workspaces")
    whole = sum(found[f"memory.stage-3.{name}"].value for name in states)
    assert found["memory.stage-3.allocated"].value == whole
    assert found["memory.blocks.queries"].numbers == "4 x 1024 x 512 x 2 B"


@pytest.mark.parametrize(("name", "factor"), [("gpt3-175b-1024", "1.1"), ("demo", "1")])
def test_the_reserve_of_the_allocator_is_the_stated_factor(name: str, factor: str) -> None:
    """CPU ranks reserve nothing beyond their allocated bytes."""
    job = load_plan(name).job
    found = {f.name: f for f in explain_memory(JobLayout.of(job))}
    reserved, allocated = (found[f"memory.stage-0.{part}"] for part in ("reserved", "allocated"))
    assert reserved.numbers.rpartition(" x ")[2] == factor
    assert reserved.value == pytest.approx(allocated.value * float(factor))
