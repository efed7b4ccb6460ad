"""A plan as a function over a recipe of Megatron-Bridge: it edits the recipe's ConfigContainer.

Spelling: megatron-bridge 0.6.2, src/megatron/bridge/training/config.py and models/gpt_provider.py;
the fields of cfg.model are those of Megatron-Core's TransformerConfig. The layouts that it can
express are those of Megatron-LM's flags (megatron.py). Its log has Megatron-LM's line for each step.

By hand, tp 4 is `cfg.model.tensor_model_parallel_size = 4`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mpctl.core.errors import Issue
from mpctl.interop.bridge_peft import bridge_adapter_refusals, peft_lines
from mpctl.interop.config_text import Source, Value, python_value
from mpctl.interop.emitted import ForeignLauncher, plan_notes
from mpctl.interop.from_bridge import read_bridge, reduces_wide
from mpctl.interop.limits import find_order, overlaps_products, refused, splits_sequence
from mpctl.interop.megatron import LIMITS as MEGATRON
from mpctl.interop.megatron import SCHEDULES, megatron_refusals
from mpctl.interop.megatron_experts import expert_flags, expert_notes, latent_flags
from mpctl.interop.megatron_flags import (
    FSDP_STRATEGIES,
    LR_SCHEDULES,
    NORMS,
    ORDERS,
    POSITIONS,
    cp_sizes,
    loss_flags,
    pipeline_layout,
    variants,
)
from mpctl.interop.megatron_optimizers import gradients_of, optimizer_fields
from mpctl.model.layout.topology import zero_copies, zero_stage
from mpctl.plan.planning.plan import Plan
from mpctl.spec.job import JobSpec
from mpctl.spec.runtime import get_profile
from mpctl.spec.training import CORE

LIMITS = replace(
    MEGATRON, launcher="Megatron-Bridge", adapters=("lora", "dora"), losses=("unfused", "fused", "te", "linear")
)
"""Those of Megatron-LM, whose arguments.py alone refuses Transformer Engine's loss."""
PRECISION = {
    "bf16": "bf16_mixed",
    "fp16": "fp16_mixed",
    "fp8": "bf16_with_fp8_delayed_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}
GET = "get_mixed_precision_config"
ACTIVATIONS = {
    "gelu": Source("torch.nn.functional.gelu"),
    "gelu_tanh": Source("torch.nn.functional.gelu"),
    "swiglu": Source("torch.nn.functional.silu"),
    "relu2": Source("megatron.core.activations.squared_relu"),
}
Fields = Iterator[tuple[str, Value]]


FIELDS = {"--num-experts": "num_moe_experts"}
"""Fields of TransformerConfig with another name than their flag."""


def _refusals(plan: Plan) -> Iterator[Issue]:
    yield from megatron_refusals(plan, LIMITS)
    yield from bridge_adapter_refusals(plan.job)
    model = plan.job.model
    if model is not None and model.position == "none":
        message = "Megatron-Bridge has learned_absolute and rope"
        yield refused("model.position", "none", message, "use learned or rotary")


def _notes(plan: Plan) -> Iterator[str]:
    job = plan.job
    yield from plan_notes(plan, "Megatron-Core", schedules=SCHEDULES)
    if zero_stage(job) > 1:
        yield f"approximated: ZeRO {zero_stage(job)} is Megatron-FSDP, other code than ZeRO 1's"
    if (profile := get_profile(job.training.runtime)).runs.needs:
        yield f"planned for {profile.name}: take a recipe that sets it, or plan with --runtime megatron-core"
    yield from expert_notes(job)
    if job.model is not None and job.model.is_mla:
        yield "its provider must be an MLAModelProvider: take a recipe with latent attention"
    if job.training.adapter:
        yield "on any GPT recipe: cfg = recipe(); lay_out(cfg); finetune(cfg, forward_step)"
        yield "cfg.checkpoint.pretrained_checkpoint names the frozen model, which AutoBridge imports"
        if job.sizes["tp"] > 1:
            yield "approximated: A of column layers is cut over tp there, and gathered; the plan has it whole"
    else:
        yield "on any GPT recipe: cfg = recipe(); lay_out(cfg); pretrain(cfg, forward_step)"
    yield "not here: data, tokenizer, checkpoints, logging: the recipe's"


def _body(plan: Plan) -> str:
    fields = [*_layout(plan), *_shape(plan.job), *_training(plan.job)]
    lines = [f"    cfg.{name} = {python_value(value)}" for name, value in fields]
    modules = {"torch.": "torch", "megatron.core.activations.": "megatron.core.activations"}
    used = [name for start, name in modules.items() if any(start in line for line in lines)]
    named, peft = peft_lines(plan.job)
    called = (
        [f"from megatron.bridge.training.mixed_precision import {GET}"] if any(GET in line for line in lines) else []
    )
    imports = [*(f"import {name}" for name in used), *called, *([named] if named else [])]
    blank = [""] * (2 * bool(imports))
    return "\n".join([*imports, *blank, "def lay_out(cfg):", *lines, *peft, "    return cfg"])


def _layout(plan: Plan) -> Fields:
    p, t = plan.job.parallel, plan.job.training
    yield "model.tensor_model_parallel_size", p.tp
    yield "model.pipeline_model_parallel_size", p.pp
    yield "model.context_parallel_size", p.cp
    yield "model.cp_comm_type", p.stated_cp_comm
    yield "model.hierarchical_context_parallel_sizes", cp_sizes(plan.job)
    yield "model.pipeline_model_parallel_layout", pipeline_layout(plan.job)
    yield "model.virtual_pipeline_model_parallel_size", p.vpp if p.vpp > 1 else None
    yield "model.sequence_parallel", p.sequence_parallel and p.tp > 1
    yield "model.num_layers_in_first_pipeline_stage", p.first_stage_layers
    yield "model.num_layers_in_last_pipeline_stage", p.last_stage_layers
    yield "model.account_for_embedding_in_pipeline_split", p.embedding_is_layer
    yield "model.account_for_loss_in_pipeline_split", p.loss_is_layer
    yield "model.recompute_granularity", None if t.recompute == "none" else t.recompute
    if t.recompute == "selective":
        yield "model.recompute_modules", [*(t.recompute_modules or (CORE,))]
    if t.recompute == "full":
        yield "model.recompute_method", "uniform"
        yield "model.recompute_num_layers", 1
    yield "model.distribute_saved_activations", t.partition_activations
    for flag, value in (*loss_flags(plan.job), *expert_flags(plan.job)):
        yield _field(flag), value


def _field(flag: str) -> str:
    """Fields of TransformerConfig are named as the flags, but for FIELDS."""
    return f"model.{FIELDS.get(flag, flag[2:].replace('-', '_'))}"


def _shape(job: JobSpec) -> Fields:
    model, t = job.model, job.training
    if model is None:
        return
    yield "model.num_layers", model.layers
    yield "model.hidden_size", model.hidden
    yield "model.ffn_hidden_size", model.ffn
    yield "model.num_attention_heads", model.heads
    yield "model.num_query_groups", model.kv_heads
    yield "model.kv_channels", model.head_size
    yield "model.seq_length", model.seq_length
    yield "model.vocab_size", model.vocab
    yield "model.should_pad_vocab", True
    yield "model.make_vocab_size_divisible_by", model.vocab_divisor
    yield "model.position_embedding_type", POSITIONS[model.position]
    if model.position == "rotary":
        yield "model.rotary_base", int(model.rotary_base)
    if model.rotary_scaling is not None:
        yield "model.rope_scaling", True
        yield "model.rope_scaling_factor", model.rotary_scaling.factor
    yield "model.normalization", NORMS[model.norm]
    yield "model.layernorm_epsilon", model.norm_epsilon
    yield "model.activation_func", ACTIVATIONS[model.activation]
    yield "model.gated_linear_unit", model.gated
    yield "model.bias_activation_fusion", model.activation in ("gelu_tanh", "swiglu")
    yield "model.add_bias_linear", model.bias is True
    for flag, value in (*variants(job), *latent_flags(job)):
        yield _field(flag), value
    if model.is_mla and model.yarn_scaling is None:  # a provider's factor is 40
        yield "model.rotary_scaling_factor", 1.0
    yield "model.share_embeddings_and_output_weights", model.tied_embeddings
    yield "model.hidden_dropout", t.dropout
    yield "model.attention_dropout", t.attention_dropout
    yield "model.init_method_std", t.init_std


def _training(job: JobSpec) -> Fields:
    t, p, stage = job.training, job.parallel, job.parallel.zero
    yield "train.micro_batch_size", t.micro_batch_size
    yield "train.global_batch_size", t.global_batch_size
    yield "train.train_iters", t.steps
    yield "ddp.use_distributed_optimizer", stage > 0
    if (copies := zero_copies(job)) > 1:
        yield "ddp.num_distributed_optimizer_instances", copies
    if stage > 1:
        yield "ddp.use_megatron_fsdp", True
        yield "ddp.data_parallel_sharding_strategy", FSDP_STRATEGIES[stage]
    yield "ddp.overlap_grad_reduce", p.overlap_gradients
    yield "ddp.overlap_param_gather", p.overlap_gradients and stage > 0
    yield "ddp.grad_reduce_in_fp32", gradients_of(job) == "fp32"
    if splits_sequence(job):
        yield "model.tp_comm_overlap", overlaps_products(job)
    yield "dist.use_tp_pp_dp_mapping", find_order(job, ORDERS) == "tp-cp-pp-dp"
    if stage > 1:
        yield "dist.use_megatron_fsdp", True
    yield from ((f"optimizer.{name}", value) for name, value in optimizer_fields(job))
    yield "optimizer.use_distributed_optimizer", stage > 0
    yield "optimizer.lr", t.learning_rate
    yield "optimizer.min_lr", t.lowest_rate
    yield "optimizer.weight_decay", t.weight_decay
    yield "optimizer.clip_grad", t.clip_norm
    yield "optimizer.adam_beta1", t.beta1
    yield "optimizer.adam_beta2", t.beta2
    yield "optimizer.adam_eps", t.epsilon
    yield "scheduler.lr_decay_style", LR_SCHEDULES[t.lr_schedule]
    yield "scheduler.lr_warmup_iters", t.warmup_steps
    yield "scheduler.lr_decay_iters", t.lr_decay_steps
    if t.lr_schedule == "wsd":
        yield "scheduler.lr_wsd_decay_iters", t.lr_wsd_decay_steps
        yield "scheduler.lr_wsd_decay_style", t.lr_wsd_decay_style
    yield "rng.seed", t.seed
    yield from _precision(job)


def _precision(job: JobSpec) -> Fields:
    """The recipe of data types, by its name; as its config where it reduces gradients in another type, for what it
    says overwrites that of ddp."""
    t, is_wide = job.training, gradients_of(job) == "fp32"
    is_tensorwise = t.dtype == "fp8" and t.fp8_recipe == "tensorwise"
    name = "bf16_with_fp8_current_scaling_mixed" if is_tensorwise else PRECISION.get(t.dtype)
    if name is None or is_wide == reduces_wide(name):
        yield "mixed_precision", name
    else:
        yield "mixed_precision", Source(f'{GET}("{name}")')
        yield "mixed_precision.grad_reduce_in_fp32", is_wide


LAUNCHER = ForeignLauncher("megatron-bridge", "Megatron-Bridge 0.6", "python", _refusals, _notes, _body, read_bridge)
