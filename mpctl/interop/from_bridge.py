"""A config of Megatron-Bridge as the settings of a job: its YAML, or Python that sets fields of `cfg`.

Fields: megatron-bridge 0.6.2, training/config.py, and peft/ of main of 2026-08. What a recipe sets is not
in the text, the shape of the model above all: --model names it. Nothing is run.

>>> read = read_bridge("cfg.model.tensor_model_parallel_size = 2\\ncfg.peft = LoRA(dim=16, alpha=32)", {})
>>> [read.settings[key] for key in ("parallel.tp", "training.adapter.rank", "training.adapter.targets")]
[2, 16, ['linear_qkv', 'o_proj', 'linear_fc1', 'down_proj']]
"""

from __future__ import annotations

import re

from mpctl.core.errors import InputError
from mpctl.interop.bridge_peft import MODULES, read_bridge_adapter
from mpctl.interop.config_text import Flags, flat_values, python_calls, read_yaml, unreadable
from mpctl.interop.from_megatron import cut_as, find_replicas, read_instances
from mpctl.interop.mapping import NO_SETTINGS, ForeignKey, KeyReader, ReadJob
from mpctl.interop.megatron_experts import DISPATCHERS
from mpctl.interop.megatron_flags import LR_SCHEDULES, read_cp_comm, read_loss, read_recompute, read_strategy
from mpctl.interop.megatron_optimizers import BRIDGE_ROWS, BRIDGE_STATES, NAMES, read_states, require_aware
from mpctl.plan.planning.plan import Overrides

ROWS = (
    ForeignKey("model.tensor_model_parallel_size", "parallel.tp", int),
    ForeignKey("model.pipeline_model_parallel_size", "parallel.pp", int),
    ForeignKey("model.virtual_pipeline_model_parallel_size", "parallel.vpp", int),
    ForeignKey("model.context_parallel_size", "parallel.cp", int),
    ForeignKey("model.expert_model_parallel_size", "parallel.ep", int),
    ForeignKey("model.expert_tensor_parallel_size", "parallel.etp", int),
    ForeignKey("model.sequence_parallel", "parallel.sequence_parallel", bool),
    ForeignKey("model.num_layers_in_first_pipeline_stage", "parallel.first_stage_layers", int),
    ForeignKey("model.num_layers_in_last_pipeline_stage", "parallel.last_stage_layers", int),
    ForeignKey("model.account_for_embedding_in_pipeline_split", "parallel.embedding_is_layer", bool),
    ForeignKey("model.account_for_loss_in_pipeline_split", "parallel.loss_is_layer", bool),
    ForeignKey("model.overlap_moe_expert_parallel_comm", "training.moe_overlap", bool),
    ForeignKey("model.tp_comm_overlap", "parallel.tp_comm_overlap", bool),
    ForeignKey("comm_overlap.tp_comm_overlap", "parallel.tp_comm_overlap", bool),
    ForeignKey("comm_overlap.overlap_moe_expert_parallel_comm", "training.moe_overlap", bool),
    ForeignKey("model.moe_expert_rank_capacity_factor", "training.moe_capacity", float),
    ForeignKey("model.seq_length", "model.seq_length", int),
    ForeignKey("model.distribute_saved_activations", "training.partition_activations", bool),
    ForeignKey("model.hidden_dropout", "training.dropout", float),
    ForeignKey("model.attention_dropout", "training.attention_dropout", float),
    ForeignKey("train.micro_batch_size", "training.micro_batch_size", int),
    ForeignKey("train.global_batch_size", "training.global_batch_size", int),
    ForeignKey("train.train_iters", "training.steps", int),
    ForeignKey("ddp.overlap_grad_reduce", "parallel.overlap_gradients", bool),
    ForeignKey("optimizer.lr", "training.learning_rate", float),
    ForeignKey("optimizer.min_lr", "training.min_learning_rate", float),
    ForeignKey("optimizer.weight_decay", "training.weight_decay", float),
    ForeignKey("optimizer.clip_grad", "training.clip_norm", float),
    ForeignKey("optimizer.adam_beta1", "training.beta1", float),
    ForeignKey("optimizer.adam_beta2", "training.beta2", float),
    ForeignKey("optimizer.adam_eps", "training.epsilon", float),
    ForeignKey("scheduler.lr_decay_style", "training.lr_schedule", words=LR_SCHEDULES),
    ForeignKey("scheduler.lr_warmup_iters", "training.warmup_steps", int),
    ForeignKey("scheduler.lr_decay_iters", "training.lr_decay_steps", int),
    ForeignKey("rng.seed", "training.seed", int),
)
STRATEGY, ZERO, REDUCED = (
    "ddp.data_parallel_sharding_strategy",
    "ddp.use_distributed_optimizer",
    "ddp.grad_reduce_in_fp32",
)
OWN_REDUCED = "mixed_precision.grad_reduce_in_fp32"
FSDP = ("ddp.use_megatron_fsdp", "dist.use_megatron_fsdp")
INSTANCES = "ddp.num_distributed_optimizer_instances"
RECOMPUTE = tuple(f"model.recompute_{key}" for key in ("granularity", "modules", "method", "num_layers"))
KIND, BACKEND = "model.moe_token_dispatcher_type", "model.moe_flex_dispatcher_backend"
STASH, STASHED = "model.moe_paged_stash", "model.moe_paged_stash_buffer_size_factor_cuda"
ON_HOST = "model.moe_paged_stash_buffer_size_factor_cpu"
EVEN = "model.moe_router_force_load_balancing"
STAGES = "model.pipeline_model_parallel_layout"
MAPPING = "dist.use_tp_pp_dp_mapping"
CP_KEYS = ("model.cp_comm_type", "model.hierarchical_context_parallel_sizes")
LOSS = ("model.cross_entropy_loss_fusion", "model.cross_entropy_fusion_impl")
SPLITS, OFFLOADS = "optimizer.muon_split_qkv", "optimizer.optimizer_cpu_offload"
AWARE, STATES = (
    "optimizer.use_precision_aware_optimizer",
    {flag: f"optimizer.{name}" for flag, name in BRIDGE_STATES.items()},
)
SHARE, OVERLAPS = "optimizer.optimizer_offload_fraction", "optimizer.overlap_cpu_optimizer_d2h_h2d"
READ = (
    *(KIND, BACKEND, STASH, STASHED, ON_HOST, EVEN),
    *CP_KEYS,
    *LOSS,
    *(
        STRATEGY,
        ZERO,
        REDUCED,
        MAPPING,
        STAGES,
        "optimizer.use_distributed_optimizer",
        "optimizer.optimizer",
        SPLITS,
        OFFLOADS,
        SHARE,
        OVERLAPS,
        AWARE,
        *STATES.values(),
        "mixed_precision",
    ),
    *(*FSDP, *RECOMPUTE, INSTANCES, OWN_REDUCED, "ddp.overlap_param_gather"),
)
DTYPES = {"mxfp8": "mxfp8", "nvfp4": "nvfp4", "fp8": "fp8", "bf16": "bf16", "fp16": "fp16"}
"""Words in the names of mixed_precision, the narrowest first."""
_LAYOUT = re.compile(r"model\.(.*parallel|recompute|moe|cpu_offloading)|ddp\.|optimizer\.|dist\.|comm_overlap")


def read_bridge(text: str, typed: Overrides = NO_SETTINGS) -> ReadJob:
    """The job of a config. Raises InputError with every value that no setting says."""
    values = _values(text)
    reader = KeyReader(values, "megatron-bridge")
    if not any(name.startswith(("model.", "train.", "peft")) for name in values):
        message = "a config of Megatron-Bridge has fields of model, train and peft, and this text none"
        raise unreadable(message, "give its YAML, or the Python that sets cfg, as @FILE")
    reader.read(ROWS)
    read_cp_comm(reader, *CP_KEYS)
    s = reader.settings
    if reader.value(STAGES, "None") not in ("None", "null"):
        try:
            s |= cut_as(reader.value(STAGES), {"parallel.pp": 1, **s}, STAGES)
        except InputError as error:
            reader.issues += error.issues
    if any(map(reader.is_on, FSDP)):
        s["parallel.zero"] = read_strategy(reader, STRATEGY)
    elif reader.has(ZERO):
        s["parallel.zero"] = int(reader.is_on(ZERO))
    if reader.has(INSTANCES):
        read_instances(reader, find_replicas(reader, {}, typed), INSTANCES)
    if reader.has(RECOMPUTE[0]):
        read_recompute(reader, reader.value(RECOMPUTE[0]), RECOMPUTE)
    _read_precision(reader)
    if s.get("parallel.tp") == 1:
        s["parallel.sequence_parallel"] = False
    _read_experts(reader)
    read_loss(reader, *LOSS)
    _read_adapter(reader)
    if "model" not in typed and "model.layers" not in typed:
        reader.nearest("model", "the recipe's shape is not in the text", "name it: --model NAME")
    if reader.is_on(MAPPING):
        s["parallel.order"] = "tp-cp-pp-dp"
    if (optimizer := reader.value("optimizer.optimizer", "adam")) not in NAMES.values():
        reader.wrong("optimizer.optimizer", f"{optimizer!r} is not read", "use adam or muon")
    if optimizer == "muon":
        s["training.optimizer"] = "muon"
        reader.read(BRIDGE_ROWS)
        s["training.muon.split_qkv"] = reader.is_on(SPLITS, True)
    require_aware(reader, AWARE, STATES.values(), is_on=reader.is_on(AWARE))
    if reader.is_on(AWARE):
        read_states(reader, STATES, on_host=reader.is_on(OFFLOADS))
    if reader.is_on(OFFLOADS):
        s["training.offload_optimizer"] = True
        s["training.offload_fraction"] = reader.number(SHARE, float, 1.0)
        s["training.offload_overlap"] = reader.is_on(OVERLAPS)
    known = {row.key for row in (*ROWS, *BRIDGE_ROWS)} | {*READ}
    left = [name for name in values if name not in known and not name.startswith(("peft", *MODULES))]
    rest = [name for name in left if _LAYOUT.match(name)]
    if apart := [name for name in left if name not in rest]:
        hint = "the shape is that of --model; data, checkpoints and logging do not change the plan"
        reader.warn("flags", "--from", f"{', '.join(apart)}: ignored", hint)
    return reader.job("megatron-bridge", (" ".join((name, *values[name])) for name in rest))


def reduces_wide(precision: str) -> bool:
    """Whether a recipe of data types reduces gradients in fp32, if nobody edits it."""
    return "fp16" not in precision


def _read_precision(reader: KeyReader) -> None:
    """The data types: of products, their scaling in fp8, and of gradients, where mixed_precision overwrites ddp."""
    s, name = reader.settings, reader.value("mixed_precision")
    if name:
        s["training.dtype"] = next((dtype for word, dtype in DTYPES.items() if word in name), "fp32")
    if s.get("training.dtype") == "fp8" and "delayed" not in name:
        s["training.fp8_recipe"] = "tensorwise"
        if "current" not in name:
            reader.nearest("mixed_precision", f"{name} is planned as tensorwise")
    says = {key: reader.is_on(key) for key in (OWN_REDUCED, REDUCED) if reader.has(key)}
    is_known = any(word in name for word in DTYPES)
    if not is_known and not says:
        return
    is_wide = says.get(OWN_REDUCED, reduces_wide(name) if is_known else says.get(REDUCED))
    if says.get(REDUCED, is_wide) != is_wide:
        reader.nearest(REDUCED, f"{says[REDUCED]} is overwritten by mixed_precision", f"set {OWN_REDUCED}")
    dtype = s.get("training.dtype")
    if not is_wide:
        s["training.gradient_dtype"] = "fp16" if dtype == "fp16" else "bf16"
    elif dtype not in (None, "bf16", "fp32"):  # the runtime's are narrow there
        s["training.gradient_dtype"] = "fp32"


def _read_experts(reader: KeyReader) -> None:
    """How rows reach experts, how many there is room for, and whether they are forced to be even."""
    s = reader.settings
    if kind := reader.value(KIND, "flex" if reader.has(BACKEND) else ""):
        found = reader.value(BACKEND, "deepep") if kind == "flex" else kind
        if found not in DISPATCHERS:
            reader.wrong(
                BACKEND if kind == "flex" else KIND, f"{found!r} is not read", "use deepep or hybridep of flex"
            )
        s["training.moe_dispatcher"] = found
    if reader.is_on(STASH):
        s["training.moe_stash"] = reader.number(STASHED, float, 1.1)
        if pages := abs(reader.number(ON_HOST, float, 0.0)):
            s["training.moe_stash_host"] = pages
    if reader.is_on(EVEN):
        s["training.moe_load"] = 1.0


def _read_adapter(reader: KeyReader) -> None:
    """cfg.peft: a class by its name in Python, by its path in YAML."""
    target = reader.value("peft._target_")
    if target:
        read_bridge_adapter(reader, target.rsplit(".", 1)[-1], "peft.")
    elif found := re.match(r"(?:\w+\.)*(\w+)\(", reader.value("peft")):
        read_bridge_adapter(reader, found[1], f"{found[1]}.")
    elif name := reader.value("peft"):
        reader.wrong("peft", f"{name!r} is not read", f"use {', '.join(MODULES)}, with their arguments")


def _values(text: str) -> Flags:
    """The fields by name, without cfg in front."""
    if "cfg." not in text:
        return read_yaml(text)
    calls, assigned = python_calls(text)
    fields = {name.removeprefix("cfg."): value for name, value in assigned.items() if name.startswith("cfg.")}
    fields = {name: value for name, value in fields.items() if value != "None"}
    return flat_values({**fields, **{name: value for name, value in calls.items() if name.split(".")[0] in MODULES}})
