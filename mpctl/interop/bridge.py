"""A plan as a function over a recipe of Megatron-Bridge: it edits the recipe's ConfigContainer.

Spelling: megatron-bridge 0.6.2, src/megatron/bridge/training/config.py and models/gpt_provider.py;
the fields of cfg.model are those of Megatron-Core's TransformerConfig. What can be said is what
Megatron-LM's flags can say (megatron.py).

By hand, tp 4 is `cfg.model.tensor_model_parallel_size = 4`.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpctl.errors import Issue
from mpctl.interop.emitted import EmitTarget, Source, Value, plan_notes, python_value
from mpctl.interop.limits import find_order, refused_model
from mpctl.interop.megatron import LIMITS, SCHEDULES, layout_text, megatron_refusals
from mpctl.interop.megatron_flags import (
    FSDP_STRATEGIES,
    LR_SCHEDULES,
    NORMS,
    ORDERS,
    POSITIONS,
    variants,
)
from mpctl.layout.topology import zero_stage
from mpctl.planning.plan import Plan
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec

PRECISION = {
    "bf16": "bf16_mixed", "fp16": "fp16_mixed", "fp8": "bf16_with_fp8_delayed_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed", "nvfp4": "bf16_with_nvfp4_mixed",
}  # fmt: skip
CURRENT_SCALING = "bf16_with_fp8_current_scaling_mixed"  # of dtype fp8
ACTIVATIONS = {
    "gelu": Source("torch.nn.functional.gelu"), "gelu_tanh": Source("torch.nn.functional.gelu"),
    "swiglu": Source("torch.nn.functional.silu"),
    "relu2": Source("megatron.core.activations.squared_relu"),
}  # fmt: skip
Fields = Iterator[tuple[str, Value]]


def _refusals(plan: Plan) -> Iterator[Issue]:
    yield from megatron_refusals(plan, LIMITS, "Megatron-Bridge")
    model = plan.job.model
    if model is not None and model.position == "none":
        message = "Megatron-Bridge has learned_absolute and rope"
        yield refused_model("position", "none", message, "use learned or rotary")


def _notes(plan: Plan) -> Iterator[str]:
    job = plan.job
    yield from plan_notes(plan, "Megatron-Core", schedules=SCHEDULES)
    if zero_stage(job) > 1:
        yield f"approximated: ZeRO {zero_stage(job)} is Megatron-FSDP, other code than ZeRO 1's"
    if job.training.reduced_dtype == "bf16" and job.training.dtype != "fp32":
        yield "bf16_mixed reduces gradients in fp32: take its config with grad_reduce_in_fp32=False"
    yield "on any GPT recipe: cfg = recipe(); lay_out(cfg); pretrain(cfg, forward_step)"
    yield "not here: data, tokenizer, checkpoints, logging: the recipe's"


def _body(plan: Plan) -> str:
    fields = [
        *_in("model", _layout(plan)), *_in("model", _shape(plan.job)),
        *_in("train", _train(plan.job)), *_in("ddp", _replicas(plan.job)),
        *_in("dist", _ranks(plan.job)),
        *_in("optimizer", _optimizer(plan.job)), *_in("scheduler", _scheduler(plan.job)),
        *_in("rng", iter([("seed", plan.job.training.seed)])),
    ]  # fmt: skip
    if plan.job.training.dtype in PRECISION:
        training = plan.job.training
        is_current = training.dtype == "fp8" and training.fp8_recipe == "tensorwise"
        recipe = CURRENT_SCALING if is_current else PRECISION[training.dtype]
        fields.append(("mixed_precision", recipe))
    lines = [f"    cfg.{name} = {python_value(value)}" for name, value in fields]
    modules = {"torch.": "torch", "megatron.core.activations.": "megatron.core.activations"}
    used = [name for start, name in modules.items() if any(start in line for line in lines)]
    imports = [*(f"import {name}" for name in used), *[""] * (2 * bool(used))]
    return "\n".join([*imports, "def lay_out(cfg):", *lines, "    return cfg"])


def _in(part: str, fields: Fields) -> Fields:
    for name, value in fields:
        yield f"{part}.{name}", value


def _layout(plan: Plan) -> Fields:
    p, t = plan.job.parallel, plan.job.training
    by_cost = p.stage_balance == "cost" and p.pp > 1 and plan.stages is not None
    yield "tensor_model_parallel_size", p.tp
    yield "pipeline_model_parallel_size", p.pp
    yield "context_parallel_size", p.cp
    if by_cost and plan.stages is not None:
        yield "pipeline_model_parallel_layout", layout_text(plan.stages)
    yield "virtual_pipeline_model_parallel_size", p.vpp if p.vpp > 1 else None
    yield "sequence_parallel", p.sequence_parallel and p.tp > 1
    yield "num_layers_in_first_pipeline_stage", p.first_stage_layers
    yield "num_layers_in_last_pipeline_stage", p.last_stage_layers
    yield "account_for_embedding_in_pipeline_split", p.embedding_is_layer
    yield "account_for_loss_in_pipeline_split", p.loss_is_layer
    yield "recompute_granularity", None if t.recompute == "none" else t.recompute
    if t.recompute == "selective":
        yield "recompute_modules", ["core_attn"]
    if t.recompute == "full":
        yield from (("recompute_method", "uniform"), ("recompute_num_layers", 1))
    yield "distribute_saved_activations", t.partition_activations


def _shape(job: JobSpec) -> Fields:
    model, t = job.model, job.training
    if model is None:
        return
    yield "num_layers", model.layers
    yield "hidden_size", model.hidden
    yield "ffn_hidden_size", model.ffn
    yield "num_attention_heads", model.heads
    yield "num_query_groups", model.kv_heads
    yield "kv_channels", model.head_size
    yield "seq_length", model.seq_length
    yield from (("vocab_size", model.vocab), ("should_pad_vocab", True))
    yield "make_vocab_size_divisible_by", model.vocab_divisor
    yield from _positions(model)
    yield from (("normalization", NORMS[model.norm]), ("layernorm_epsilon", model.norm_epsilon))
    yield "activation_func", ACTIVATIONS[model.activation]
    yield "gated_linear_unit", model.gated
    yield "bias_activation_fusion", model.activation in ("gelu_tanh", "swiglu")
    yield "add_bias_linear", model.bias is True
    for variant in variants(model):
        yield variant.field, variant.value
    yield "share_embeddings_and_output_weights", model.tied_embeddings
    yield from (("hidden_dropout", t.dropout), ("attention_dropout", t.attention_dropout))
    yield "init_method_std", t.init_std


def _positions(model: ModelSpec) -> Fields:
    yield "position_embedding_type", POSITIONS[model.position]
    if model.position == "rotary":
        yield "rotary_base", int(model.rotary_base)
    if model.rotary_scaling is not None:
        yield from (("rope_scaling", True), ("rope_scaling_factor", model.rotary_scaling.factor))


def _train(job: JobSpec) -> Fields:
    yield "micro_batch_size", job.training.micro_batch_size
    yield "global_batch_size", job.training.global_batch_size
    yield "train_iters", job.training.steps


def _replicas(job: JobSpec) -> Fields:
    stage, p = job.parallel.zero, job.parallel
    yield "use_distributed_optimizer", stage > 0
    if stage > 1:
        yield from (
            ("use_megatron_fsdp", True),
            ("data_parallel_sharding_strategy", FSDP_STRATEGIES[stage]),
        )
    yield "overlap_grad_reduce", p.overlap_gradients
    yield "overlap_param_gather", p.overlap_gradients and stage > 0
    yield "grad_reduce_in_fp32", job.training.reduced_dtype == "fp32"


def _ranks(job: JobSpec) -> Fields:
    yield "use_tp_pp_dp_mapping", find_order(job, tuple(ORDERS)) == "tp-cp-pp-dp"
    if job.parallel.zero > 1:
        yield "use_megatron_fsdp", True


def _optimizer(job: JobSpec) -> Fields:
    t = job.training
    yield from (("optimizer", "adam"), ("use_distributed_optimizer", job.parallel.zero > 0))
    yield from (("lr", t.learning_rate), ("min_lr", t.lowest_rate))
    yield from (("weight_decay", t.weight_decay), ("clip_grad", t.clip_norm))
    yield from (("adam_beta1", t.beta1), ("adam_beta2", t.beta2), ("adam_eps", t.epsilon))


def _scheduler(job: JobSpec) -> Fields:
    t = job.training
    yield "lr_decay_style", LR_SCHEDULES[t.lr_schedule]
    yield from (("lr_warmup_iters", t.warmup_steps), ("lr_decay_iters", t.lr_decay_steps))
    if t.lr_schedule == "wsd":
        yield "lr_wsd_decay_iters", t.lr_wsd_decay_steps
        yield "lr_wsd_decay_style", t.lr_wsd_decay_style


TARGET = EmitTarget("megatron-bridge", "Megatron-Bridge 0.6", "python", _refusals, _notes, _body)
