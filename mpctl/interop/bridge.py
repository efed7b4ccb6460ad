"""A plan as a function over a recipe of Megatron-Bridge: it edits the recipe's ConfigContainer.

Spelling: megatron-bridge 0.6.2, src/megatron/bridge/training/config.py and models/gpt_provider.py;
the fields of cfg.model are those of Megatron-Core's TransformerConfig. The layouts that it can
express are those of Megatron-LM's flags (megatron.py).

Its log (training/utils/train_utils.py) has a block headed `---- Task Configuration ----`, YAML of a
table for each part (training/config.py, ConfigContainer.print_yaml): numbers, words and lists of words
become Megatron-LM's arguments (BRIDGE). A sample's length is the data's, the model's the most positions.

By hand, tp 4 is `cfg.model.tensor_model_parallel_size = 4`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from mpctl.core.errors import Issue
from mpctl.interop.config_text import Source, Value, python_value
from mpctl.interop.emitted import ForeignLauncher, plan_notes
from mpctl.interop.limits import find_order, refused
from mpctl.interop.log_formats import LauncherLog, PrintedConfig, StepFormat
from mpctl.interop.mapping import ReadJob
from mpctl.interop.megatron import SCHEDULES, megatron_refusals
from mpctl.interop.megatron_experts import expert_flags, expert_notes, latent_flags
from mpctl.interop.megatron_flags import (
    FSDP_STRATEGIES,
    LR_SCHEDULES,
    NORMS,
    ORDERS,
    POSITIONS,
    layout_by_cost,
    variants,
)
from mpctl.interop.megatron_log import printed_job
from mpctl.model.layout.topology import zero_copies, zero_stage
from mpctl.plan.planning.plan import Plan
from mpctl.spec.job import JobSpec
from mpctl.spec.training import CORE

PRECISION = {
    "bf16": "bf16_mixed",
    "fp16": "fp16_mixed",
    "fp8": "bf16_with_fp8_delayed_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}
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
    yield from megatron_refusals(plan, "Megatron-Bridge")
    model = plan.job.model
    if model is not None and model.position == "none":
        message = "Megatron-Bridge has learned_absolute and rope"
        yield refused("model.position", "none", message, "use learned or rotary")


def _notes(plan: Plan) -> Iterator[str]:
    job = plan.job
    yield from plan_notes(plan, "Megatron-Core", schedules=SCHEDULES)
    if zero_stage(job) > 1:
        yield f"approximated: ZeRO {zero_stage(job)} is Megatron-FSDP, other code than ZeRO 1's"
    if job.training.reduced_dtype == "bf16" and job.training.dtype != "fp32":
        yield "bf16_mixed reduces gradients in fp32: take its config with grad_reduce_in_fp32=False"
    yield from expert_notes(job)
    if job.model is not None and job.model.is_mla:
        yield "its provider must be an MLAModelProvider: take a recipe with latent attention"
    yield "on any GPT recipe: cfg = recipe(); lay_out(cfg); pretrain(cfg, forward_step)"
    yield "not here: data, tokenizer, checkpoints, logging: the recipe's"


def _body(plan: Plan) -> str:
    fields = [*_layout(plan), *_shape(plan.job), *_training(plan.job)]
    lines = [f"    cfg.{name} = {python_value(value)}" for name, value in fields]
    modules = {"torch.": "torch", "megatron.core.activations.": "megatron.core.activations"}
    used = [name for start, name in modules.items() if any(start in line for line in lines)]
    imports = [*(f"import {name}" for name in used), *[""] * (2 * bool(used))]
    return "\n".join([*imports, "def lay_out(cfg):", *lines, "    return cfg"])


def _layout(plan: Plan) -> Fields:
    p, t = plan.job.parallel, plan.job.training
    yield "model.tensor_model_parallel_size", p.tp
    yield "model.pipeline_model_parallel_size", p.pp
    yield "model.context_parallel_size", p.cp
    if (by_cost := layout_by_cost(plan.job)) is not None:
        yield "model.pipeline_model_parallel_layout", by_cost
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
    for flag, value in expert_flags(plan.job):
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
    yield "ddp.grad_reduce_in_fp32", t.reduced_dtype == "fp32"
    yield "dist.use_tp_pp_dp_mapping", find_order(job, ORDERS) == "tp-cp-pp-dp"
    if stage > 1:
        yield "dist.use_megatron_fsdp", True
    yield "optimizer.optimizer", "adam"
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
    if t.dtype == "fp8" and t.fp8_recipe == "tensorwise":
        yield "mixed_precision", "bf16_with_fp8_current_scaling_mixed"
    elif t.dtype in PRECISION:
        yield "mixed_precision", PRECISION[t.dtype]


TABLES = ("optimizer", "scheduler", "rng", "mixed_precision", "model", "train", "dist", "ddp")
"""Tables of Megatron-Bridge's config; where several have a key, the last one counts."""
BRIDGE = {
    "gated_linear_unit": "swiglu",
    "num_moe_experts": "num_experts",
    "layernorm_epsilon": "norm_epsilon",
    "seq_length": "max_position_embeddings",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "bias_activation_fusion": "bias_gelu_fusion",
}
"""Names of Megatron-LM's arguments, where Megatron-Bridge has another."""
_WORDS = {"true": "True", "false": "False", "null": "None"}


def _printed_job(values: Mapping[str, str]) -> ReadJob | None:
    """The job of the configuration of a dump."""
    return printed_job(bridge_arguments(values))


def bridge_arguments(values: Mapping[str, str]) -> dict[str, str]:
    """The arguments of Megatron-LM that the tables of Megatron-Bridge's config are."""
    found = {
        BRIDGE.get(key, key): _WORDS.get(value, value)
        for table in TABLES
        for name, value in values.items()
        for first, _, key in [name.partition(".")]
        if first == table
    }
    found["seq_length"] = values.get("dataset.sequence_length", found.get("max_position_embeddings", "None"))
    shared = found.get("share_embeddings_and_output_weights")
    found["untie_embeddings_and_output_weights"] = str(shared == "False")
    groups = found.get("num_query_groups", "None")
    found["group_query_attention"] = str(groups not in ("None", found.get("num_attention_heads")))
    found["grad_reduce_in_bf16"] = str(found.get("grad_reduce_in_fp32") == "False")
    if found.get("vocab_size", "None") == "None":
        found["vocab_size"] = values.get("tokenizer.vocab_size", "None")
    return found


_TABLE = re.compile(r"(\w{1,40}):$")
_ENTRY = re.compile(r"  (\w{1,80}):(?: (.{1,2000}))?$")


def _read_dump(text: str, head: str, state: list[str], config: PrintedConfig) -> bool:
    """A line of Megatron-Bridge's YAML. state: the table and the key that it is in."""
    name = ".".join(state)
    if text.startswith("----"):
        return bool(head)
    if found := _TABLE.match(text):
        state[:] = [found[1]]
    elif state and (found := _ENTRY.match(text)):
        state[1:] = [found[1]]
        config.add(".".join(state), found[2] or "")
    elif text.startswith("  - ") and config.values.get(name, name)[:1] in ("", "["):
        listed = config.values[name].strip("[]")
        config.add(name, f"[{listed}{', ' if listed else ''}'{text[4:]}']")
    return True


LOG = LauncherLog(
    "megatron-bridge",
    "Megatron-Bridge",
    (StepFormat("Step Time :", {"seconds": ("Step Time",), "tflops": ("GPU utilization",)}),),
    beside=("megatron",),
    heads=("- Task Configuration -",),
    read=_read_dump,
    job=_printed_job,
)
LAUNCHER = ForeignLauncher("megatron-bridge", "Megatron-Bridge 0.6", "python", _refusals, _notes, _body, log=LOG)
