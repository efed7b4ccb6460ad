"""Bytes, FLOP and seconds of adapters and frozen bases, by hand and beside measured tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.estimate.activation_shapes import activation_shapes
from mpctl.plan.estimate.activations import stage_chunks
from mpctl.plan.estimate.base_weights import held_weights, stored_bits
from mpctl.plan.estimate.flops import model_and_hardware_flops, part_flops
from mpctl.plan.estimate.gradient_messages import GradientMessages
from mpctl.plan.estimate.layer_messages import LayerMessages
from mpctl.plan.estimate.saved import layer_activations
from mpctl.plan.estimate.states import find_states
from mpctl.plan.estimate.step import StepTime
from mpctl.plan.estimate.time import step_time_model
from mpctl.plan.planning.adapters import adapter_entry, adapter_text
from mpctl.plan.planning.explain import explain
from mpctl.plan.planning.plan import make_plan
from mpctl.plan.planning.summary import plan_summary
from mpctl.spec.adapter import AdapterSpec
from mpctl.spec.load import load_job
from mpctl.spec.runtime import AdapterCosts, MemoryPasses, get_profile
from tests.plan.estimate.test_time import DEVICE, IDEAL, NONE, timed

# A layer has 4096 (q) + 2 x 1024 (k, v) + 4096 (o) + 3 x 8192 (gate, up, down) = 34,816 weights in products
# and 128 in norms; two tables of 1000 x 64 and a norm around.
LLAMA: dict[str, Any] = {
    "model.family": "gpt",
    "model.layers": 2,
    "model.hidden": 64,
    "model.heads": 8,
    "model.kv_heads": 2,
    "model.ffn": 128,
    "model.vocab": 1000,
    "model.vocab_divisor": 1,
    "model.seq_length": 32,
    "model.activation": "swiglu",
    "model.position": "rotary",
    "model.norm": "rmsnorm",
    "model.bias": False,
    "model.tied_embeddings": False,
    "training.dtype": "bf16",
    "launch.device": "cpu",
}
PRODUCTS, REST = 2 * 34_816, 2 * 64_000 + 2 * 128 + 64

OF_QV = 2 * (4 * 64 + 64 * 4 + 4 * 64 + 16 * 4)  # two layers: A and B of q, of v


def adapted(adapter: Mapping[str, Any], costs: AdapterCosts | None = None, **settings: Any) -> JobLayout:
    job = load_job(None, {**LLAMA, "training.adapter": {"rank": 4, **adapter}, **settings})
    layout = JobLayout.of(job)
    if costs is not None:
        profile = layout.profile.model_copy(update={"adapters": costs})
        layout.__dict__["profile"] = profile
    return layout


def saved(layout: JobLayout) -> dict[str, float]:
    """Bytes of what a layer saves, by name."""
    shapes = activation_shapes(layout)
    tensors = layer_activations(shapes, layout.table.stacks[0].block_of(1)).saved
    found: dict[str, float] = {}
    for tensor in tensors:
        found[tensor.name] = found.get(tensor.name, 0.0) + shapes.bytes_of([tensor])
    return found


def of_adapter(layout: JobLayout) -> dict[str, float]:
    return {name.replace("lora.", ""): size for name, size in saved(layout).items() if ".lora" in name}


# X is 32 x 64 x 2 bytes, X A 32 x 4 x 2.
def test_a_frozen_product_saves_no_input_and_adapters_share_one() -> None:
    layout = adapted({"targets": ["q_proj", "k_proj", "v_proj"]})
    assert of_adapter(layout) == {
        "attention.qkv.query.A input": 4096,
        "attention.qkv.query.B input": 256,
        "attention.qkv.key.B input": 256,
        "attention.qkv.value.B input": 256,
    }
    plain = saved(JobLayout.of(load_job(None, LLAMA)))
    gone = {name: size for name, size in plain.items() if name not in saved(layout)}
    assert gone == {"attention.qkv input": 4096, "mlp.up input": 4096, "mlp.down input": 8192}


def test_nothing_is_saved_below_the_first_adapter() -> None:
    """Of the first layer its first norm; with adapters of the MLP alone both norms and attention."""

    def chunk(targets: str) -> float:
        layout = adapted({"targets": targets})
        return stage_chunks(layout, 0, activation_shapes(layout))[0].saved

    def layer(targets: str, *names: str) -> float:
        kept = saved(adapted({"targets": targets}))
        return sum(size for name, size in kept.items() if not name.startswith(names) or not names)

    ends = chunk("q_proj") - layer("q_proj") - layer("q_proj", "attention_norm")
    attention = ("attention_norm", "mlp_norm", "queries", "keys", "turned", "context", "sums")
    assert chunk("mlp") - ends == layer("mlp") + layer("mlp", *attention)


def test_the_context_is_kept_for_its_product_by_an_adapter_alone() -> None:
    """Torch's kernel keeps its result, and on a CPU the next product another copy of it."""
    attention = {"targets": ["q_proj", "o_proj"]}
    assert saved(adapted(attention))["context"] == 2 * saved(adapted({"targets": "q_proj"}))["context"] == 2 * 4096


def test_an_adapter_of_the_last_product_keeps_what_its_product_need_not() -> None:
    down = adapted({"targets": ["down_proj"]})
    assert of_adapter(down)["mlp.down.A input"] == 32 * 128 * 2
    remade = adapted({"targets": ["down_proj"]}, AdapterCosts(remakes_activation=True))
    assert set(of_adapter(remade)) == {"mlp.down.B input"}


def test_relus_result_is_kept_by_the_activation_where_its_product_is_frozen() -> None:
    relu = {"model.activation": "relu"}
    plain, frozen = JobLayout.of(load_job(None, {**LLAMA, **relu})), adapted({"targets": "q_proj"}, **relu)
    assert saved(plain)["mlp.down input"] == saved(frozen)["mlp result"] == 32 * 128 * 2


def test_some_software_keeps_the_input_of_every_dequantised_product() -> None:
    costs = AdapterCosts(base_inputs=4)
    kept = saved(adapted({"kind": "qlora", "targets": "q_proj"}, costs))
    products = ("attention.qkv", "attention.output", "mlp.up", "mlp.down")
    inputs = {f"{name} input": kept[f"{name} input"] for name in products}
    assert inputs == {  # 32 x 64 x 4, down 32 x 128 x 4
        "attention.qkv input": 8192,
        "attention.output input": 8192,
        "mlp.up input": 8192,
        "mlp.down input": 16_384,
    }
    plain = saved(adapted({"targets": "q_proj"}, costs))
    assert not inputs.keys() & plain.keys()


def test_an_activations_input_may_be_kept_in_eight_bits() -> None:
    def kept(*, narrow: bool, dtype: str = "fp8") -> float:
        costs = AdapterCosts(narrow_activation=narrow)
        settings = {"training.dtype": dtype, "training.runtime": "megatron-core"}
        return saved(adapted({"base_precision": "fp8"}, costs, **settings))["mlp up"]

    assert kept(narrow=False) == 2 * 32 * 128 * 2  # gate and up
    assert kept(narrow=True) == 2 * 32 * 128
    assert kept(narrow=True, dtype="bf16") == kept(narrow=False, dtype="bf16")


# Rows of the table of what is kept, measured with peft 0.21: see each.
@pytest.mark.parametrize(
    ("costs", "adapter", "of_one"),
    [
        ({}, {}, 256),  # bf16 adapters share X: X A alone
        ({"input_copy": "training"}, {"dtype": "fp32"}, 4096 + 256),  # autocast: a bf16 copy of X for each
        ({"input_copy": "adapter"}, {"dtype": "fp32"}, 2 * (4096 + 256)),  # no autocast: a float32 copy
        ({"mask_bytes": 1}, {"dropout": 0.1}, 4096 + 2048 + 256),  # dropped X and its mask
        # two results [T, out], and norms
        ({"dora_results": 2}, {"kind": "dora"}, 256 + 2 * 32 * 16 * 2 + 16 * 4),
    ],
)
def test_what_software_keeps_for_the_second_adapter_of_an_input(
    costs: dict[str, Any], adapter: dict[str, Any], of_one: float
) -> None:
    found = of_adapter(adapted({"targets": ["q_proj", "v_proj"], **adapter}, AdapterCosts(**costs)))
    assert sum(size for name, size in found.items() if ".value." in name) == of_one


def test_a_wider_base_is_copied_for_each_product_until_its_backward() -> None:
    found = saved(adapted({"targets": "q_proj", "base_precision": "fp32"}))
    copies = {name: size for name, size in found.items() if "weight copy" in name}
    assert sum(copies.values()) == 2 * 34_816
    assert not any("weight copy" in name for name in saved(adapted({"targets": "q_proj", "base_precision": "nf4"})))


# ------------------------------------------------------------------------------ states


@pytest.mark.parametrize(
    ("adapter", "bits"),
    [
        ({"kind": "qlora"}, 4.127),
        ({"kind": "qlora", "double_quantization": False}, 4.5),
        ({"base_precision": "int8"}, 8 + 32 / 64),
        ({"base_precision": "fp8"}, 8),
        ({"base_precision": "int4-gptq"}, 4.15625),
        ({}, 16),
        ({"base_precision": "fp32"}, 32),
    ],
)
def test_bits_a_weight(adapter: dict[str, Any], bits: float) -> None:
    assert stored_bits(AdapterSpec.model_validate(adapter), 64, "bf16") == pytest.approx(bits, abs=1e-4)


def test_states_of_lora_by_hand() -> None:
    layout = adapted({"targets": ["q_proj", "v_proj"]})
    held = held_weights(layout, 0)
    assert (held.adapter, held.full, held.stored, held.rest) == (OF_QV, 0, PRODUCTS, REST)
    states = find_states(layout, 0)
    assert states.parameters == 2 * (PRODUCTS + REST + OF_QV)
    assert states.gradients == 4 * OF_QV
    assert states.optimizer == 12 * OF_QV  # master and two moments in float32


def test_states_of_a_quantised_base_and_float32_adapters() -> None:
    layout = adapted(
        {"kind": "qlora", "targets": ["q_proj", "v_proj"], "dtype": "fp32", "double_quantization": False},
        AdapterCosts(unquantized_dtype="fp32"),
    )
    states = find_states(layout, 0)
    assert states.parameters == PRODUCTS * 4.5 / 8 + 4 * (REST + OF_QV)
    assert states.optimizer == 8 * OF_QV


@pytest.mark.parametrize("runtime", ["trl", "deepspeed", "unsloth"])
def test_trainers_keep_embeddings_and_head_in_16_bits(runtime: str) -> None:
    """trl 1.16, trainer/: no prepare_model_for_kbit_training; Unsloth casts what has gradients alone."""
    qlora = {"kind": "qlora", "targets": ["q_proj", "v_proj"], "double_quantization": False}
    states = find_states(adapted(qlora, get_profile(runtime).adapters), 0)
    assert states.parameters == PRODUCTS * 4.5 / 8 + 2 * REST + 4 * OF_QV


def test_modules_to_save_are_trained_in_full() -> None:
    layout = adapted({"targets": "q_proj", "modules_to_save": "lm_head"})
    assert held_weights(layout, 0).full == 64_000
    assert not held_weights(adapted({"targets": "q_proj"}), 0).full


SHARDED = {"cluster.gpus_per_node": 4, "training.global_batch_size": 4}


def test_zero_3_leaves_a_base_in_nf4_whole_and_shares_the_rest() -> None:
    qlora = {"kind": "qlora", "targets": "q_proj", "double_quantization": False}
    whole, shared = adapted(qlora), adapted(qlora, **{**SHARDED, "parallel.zero": 3})
    stored, rest = PRODUCTS * 4.5 / 8, 2 * (REST + 2 * 512)
    assert find_states(whole, 0).parameters == stored + rest
    padding = 1.1  # slices of a multiple of 64 elements
    assert stored + rest / 4 <= find_states(shared, 0).parameters < stored + padding * rest / 4


def test_software_that_shares_floats_alone_leaves_the_stored_bits_whole() -> None:
    qlora = {"kind": "qlora", "targets": "q_proj", "double_quantization": False}
    settings = {**SHARDED, "parallel.zero": 3, "training.runtime": "fsdp2"}
    shared = find_states(adapted(qlora, **settings), 0).parameters
    whole = find_states(adapted(qlora, AdapterCosts(shards_quantized=False), **settings), 0).parameters
    assert whole - shared == pytest.approx(PRODUCTS * 4.5 / 8 * 3 / 4, abs=2)


# ------------------------------------------------------------------------------ FLOP and seconds


def test_flop_of_a_layer_are_4n_and_6a() -> None:
    """Measured by torch's FlopCounterMode on a linear layer with peft's adapter: 2N + 2a forward, 2N + 4a
    backward a token; attention's scores stay."""
    layout = adapted({"targets": "all-linear"})
    flow = layout.table.flows[0].runs[-1][1]
    each = 2 * (4 * 64 + 64 * 4) + 2 * (4 * 64 + 16 * 4) + 2 * (4 * 64 + 128 * 4) + (4 * 128 + 64 * 4)
    scores = 2 * 2 * 32 * 32 * 64
    assert part_flops(layout, flow, ("forward",)) == 32 * (2 * 34_816 + 2 * each) + scores
    assert part_flops(layout, flow) == 32 * (4 * 34_816 + 6 * each) + 3 * scores


QV = {"rank": 4, "targets": ["query_key_value"]}  # one adapter over qkv: A [4, 64], B [192, 4]
FREE = AdapterCosts(inputs=NONE, results=NONE)


def adapter_time(adapter: dict[str, Any], costs: AdapterCosts = FREE, bandwidth: float = 1e9) -> StepTime:
    device = {**DEVICE, "memory_bandwidth": bandwidth}
    settings = {"cluster.device": device, "training.adapter": {**QV, **adapter}}
    return timed(settings, IDEAL.model_copy(update={"adapters": costs}))


def test_a_base_is_dequantised_for_each_pass_whatever_the_batch() -> None:
    """Two layers of 49,152 weights, of which the first needs no dX of qkv: in nf4 0.5625 bytes are read and 4
    of float32 written, of 49,152 forward, 49,152 and 36,864 back."""
    plain, stored = (adapter_time({"kind": kind, "double_quantization": False}) for kind in ("lora", "qlora"))
    passes = 3 * 49_152 + 49_152 - 64 * 192
    assert stored.compute - plain.compute == pytest.approx(passes * (4 + 4.5 / 8) / 1e9)
    half = FREE.model_copy(update={"dequantize": {"nf4": 0.5}})
    slow = adapter_time({"kind": "qlora", "double_quantization": False}, half)
    assert slow.compute - stored.compute == pytest.approx(stored.compute - plain.compute)


def test_passes_over_inputs_and_results_of_adapters() -> None:
    """16 rows of 64 inputs and 192 results in float32; the first layer's input has no gradient."""
    one = MemoryPasses(forward=1, backward=1)
    moved = {"inputs": (2 + 1) * 16 * 64 * 4, "results": (2 + 2) * 16 * 192 * 4}
    plain = adapter_time({})
    for name, size in moved.items():
        beside = adapter_time({}, FREE.model_copy(update={name: one}))
        assert beside.compute - plain.compute == pytest.approx(size / 1e9)
    dropped = adapter_time({"dropout": 0.1}, FREE.model_copy(update={"dropout": one}))
    assert dropped.compute - plain.compute == pytest.approx(moved["inputs"] / 1e9)


def test_zero_3_gathers_stored_bits_where_the_software_does() -> None:
    """By hand, of a layer: 34,816 weights of 4.5 bits and the rest, 128 in norms and 512 in A and B, in bf16."""
    qlora = {"kind": "qlora", "targets": "q_proj", "double_quantization": False}
    settings = {**SHARDED, "parallel.zero": 3, "training.runtime": "fsdp2"}

    def gathered(costs: AdapterCosts) -> set[int]:
        layout = adapted(qlora, costs, **settings)
        messages = GradientMessages(layout, layout.profile).chunk(0, 0)
        return {message.bytes for message in messages if message.what == "parameters"}

    stored = 34_816 * 4.5 / 8
    ends = 2 * (2 * 64_000 + 64)
    assert gathered(AdapterCosts()) == {round(stored / 2 + 640) * 2, ends}
    assert gathered(AdapterCosts(gathers_quantized=False)) == {2 * (34_816 + 640), ends}
    assert gathered(AdapterCosts(shards_quantized=False)) == {2 * 640, ends}


DORA = {"kind": "dora", "targets": ["q_proj", "v_proj"]}


def test_dora_has_a_trained_length_for_each_output() -> None:
    lora, dora = (held_weights(adapted({**DORA, "kind": kind}), 0).adapter for kind in ("lora", "dora"))
    assert (lora, dora - lora) == (OF_QV, 2 * (64 + 16))


@pytest.mark.parametrize(
    ("costs", "dropout", "passes"),
    [
        # of q and v, in 64, out 64 and 16: 2 r in out, or 2 r in (in + out)
        ({}, 0.0, 2 * 4 * 64 * (64 + 16)),
        ({"dora_base": True}, 0.0, 2 * 4 * 64 * (128 + 80)),
        ({}, 0.1, 2 * 4 * 64 * (64 + 16) + 1.5 * 32 * 2 * 64 * (64 + 16)),
        # W once more, forward and back but for the first layer's input: on average half of it
        ({"dora_base": True}, 0.1, 2 * 4 * 64 * (128 + 80) + 1.5 * 32 * 2 * 64 * (64 + 16)),
    ],
)
def test_flop_of_doras_norms_are_the_hardwares_alone(costs: dict[str, Any], dropout: float, passes: float) -> None:
    layout = adapted({**DORA, "dropout": dropout}, AdapterCosts(**costs))
    model, hardware = model_and_hardware_flops(layout)
    assert hardware - model == 2 * passes
    assert model == model_and_hardware_flops(adapted({**DORA, "kind": "lora"}))[0]


def test_messages_of_adapters_whose_rank_tp_cuts() -> None:
    """32 rows in bf16. Column, of q: X A [T, 4] gathered, its gradient and dX [T, 64] summed; row, of the
    output: X A summed, Y [T, 64] gathered, the gradient of X A summed. With sequence parallelism dX is
    scattered, and dY gathered."""
    narrow, wide = 32 * 4 * 2, 32 * 64 * 2

    def sent(targets: str, *, splits: bool) -> list[tuple[str, str, int]]:
        settings = {"parallel.tp": 2, "parallel.sequence_parallel": splits, "cluster.gpus_per_node": 2}
        layout = adapted({"targets": targets}, AdapterCosts(shards_rank=True), **settings)
        stack, flow = layout.table.stacks[0], layout.table.flows[0].runs[-1][1]
        messages = LayerMessages(layout, layout.profile).block(stack, flow)
        own = [m for m in messages if ".lora" in m.product]
        return sorted((m.phase, m.kind, m.bytes) for m in own)

    assert sent("q_proj", splits=False) == [
        ("backward", "all_reduce", narrow),
        ("backward", "all_reduce", wide),
        ("forward", "all_gather", narrow),
    ]
    assert sent("q_proj", splits=True)[1] == ("backward", "reduce_scatter", wide)
    row = [("backward", "all_reduce", narrow), ("forward", "all_gather", wide), ("forward", "all_reduce", narrow)]
    assert sent("o_proj", splits=False) == row
    assert sent("o_proj", splits=True) == [("backward", "all_gather", wide), *row]


def test_figures_of_adapters_are_explained() -> None:
    settings = {**LLAMA, "cluster": "dgx-a100", "cluster.gpus_per_node": 1, "launch.device": "cuda"}
    plan = make_plan(load_job(None, {**settings, "training.adapter": {"kind": "qlora", "rank": 4}}))
    figures = {figure.name: figure for figure in explain(plan, [])}
    parts = [f"memory.stage-0.parameters.{name}" for name in ("adapters", "base", "rest")]
    assert sum(figures[name].value for name in parts) == pytest.approx(
        figures["memory.stage-0.parameters"].value, abs=1
    )
    assert figures["parameters.trained"].value + figures["parameters.frozen"].value == plan.estimate.parameters
    for name in ("adapters.forward", "adapters.backward", "base.forward", "base.backward"):
        assert figures[f"time.blocks.{name}"].value > 0
    assert "frozen products at 4N" in (plan_summary(plan).mfu_convention or "")


def test_the_line_of_a_plan() -> None:
    """arXiv 2106.09685's count: r (in + out) of each: 32 layers of Llama 3.1 8B."""
    layers = 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    plan = make_plan(
        load_job(None, {"model": "llama-3.1-8b", "training.adapter": {"rank": 16}, "training.dtype": "bf16"})
    )
    assert plan.layout is not None
    entry = adapter_entry(plan.layout)
    assert entry is not None and entry.trained_parameters == layers == 41_943_040
    text = (
        "LoRA rank 16, alpha 32 on all-linear: 41.94M trained of 8.072B, 0.52%, 80.0 MiB; base bf16, 16 bits a weight"
    )
    assert adapter_text(entry).startswith(text)


@pytest.mark.parametrize(("cluster", "slower"), [("rtx-6000-ada-node", 32e9 * 0.8 / 4e9), ("dgx-h100", 1.0)])
def test_gathers_over_pcie_may_be_bounded(cluster: str, slower: float) -> None:
    """Where nothing is hidden, what FSDP adds to replicas grows by as much; NVLink is not bounded."""
    job = {"cluster": cluster, "cluster.nodes": 1, "cluster.gpus_per_node": 2, "model": "llama-2-7b"}
    job |= {"training.runtime": "fsdp", "training.adapter.rank": 8, "training.micro_batch_size": 8}
    layout = JobLayout.of(load_job(None, job | {"parallel.zero": 3}))
    bare = layout.profile.model_copy(update={"overlap": layout.profile.overlap.model_copy(update={"zero": 0.0})})

    def gathers(most: float) -> float:
        costs = bare.adapters.model_copy(update={"pcie_gathers": most})
        time = step_time_model(layout, bare.model_copy(update={"adapters": costs}))
        return sum(found.dp_cp for found in time.passes[0])

    assert gathers(4e9) == pytest.approx(slower * gathers(0.0))


def test_an_adapter_of_the_head_alone_is_planned() -> None:
    """rank 4 of the head [vocab, 64]: A [4, 64], B [vocab, 4]."""
    layout = adapted({"targets": "lm_head"})
    vocab = next(w.shape[0] for w in layout.stage_parameters(0) if w.name == "head.lora.B.weight")
    assert held_weights(layout, 0).adapter == 4 * (64 + vocab)
    assert activation_shapes(layout).count(("rank",)) == 4
