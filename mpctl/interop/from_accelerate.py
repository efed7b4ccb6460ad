"""A config of Hugging Face's accelerate as the settings of a job: FSDP, DeepSpeed, Megatron-LM or DDP.

Keys: accelerate 1.15, commands/config/config_args.py and commands/launch.py, whose flags have the same
names. The model, the length and the batch are the script's: its flags are read as transformers'
TrainingArguments where the launch line has them, and are mpctl's options elsewhere.

>>> read = read_accelerate("{distributed_type: FSDP, mixed_precision: bf16, num_machines: 2, num_processes: 16, "
...                        "fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true}}")
>>> [read.settings[key] for key in ("parallel.zero", "cluster.gpus_per_node", "training.runtime")]
[3, 8, 'fsdp2']
"""

from __future__ import annotations

from mpctl.interop.command_line import split_command
from mpctl.interop.config_text import Flags, read_yaml, unreadable
from mpctl.interop.mapping import NO_SETTINGS, ForeignKey, KeyReader, ReadJob
from mpctl.interop.shell import is_script
from mpctl.interop.trainer_keys import leave_to_data, read_global_batch, read_optimizer, trainer_rows, unread_keys
from mpctl.plan.planning.plan import Overrides

TYPES = {"--use_fsdp": "FSDP", "--use_deepspeed": "DEEPSPEED", "--use_megatron_lm": "MEGATRON_LM"}
STRATEGIES = {
    "FULL_SHARD": 3,
    "SHARD_GRAD_OP": 2,
    "NO_SHARD": 0,
    "HYBRID_SHARD": 3,
    "HYBRID_SHARD_ZERO2": 2,
    "true": 3,
    "false": 2,
}
"""ZeRO's stage by FSDP 1's strategy, or by whether FSDP 2 gathers parameters again."""
PEFT = ("use_peft", "lora_", "load_in_")
NUMBERED = dict(zip("12345", STRATEGIES, strict=False))
SIZES, MEGATRON = "parallelism_config_", "megatron_lm_"
DTYPES = {"no": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}
OPTIMIZER, PARAMETERS = "training.offload_optimizer", "training.offload_parameters"
HOST = {
    "offload_optimizer_device": (OPTIMIZER,),
    "offload_param_device": (PARAMETERS,),
    "fsdp_offload_params": (OPTIMIZER, PARAMETERS),
}
TRAINER = (
    ForeignKey("max_seq_length", "model.seq_length", int),
    ForeignKey("block_size", "model.seq_length", int),
    ForeignKey("model_name_or_path", "model"),
    *trainer_rows(
        length="max_length",
        batch="per_device_train_batch_size",
        optimizer="optim",
        schedule="lr_scheduler_type",
        rate=None,
    ),
)
"""Flags of a script with transformers' TrainingArguments."""
OF_ACCELERATE = {
    *("distributed_type", "mixed_precision", "num_machines", "num_processes", *HOST, "zero_stage"),
    *("fsdp_version", "fsdp_reshard_after_forward", "fsdp_sharding_strategy", "fsdp_activation_checkpointing"),
    *("fsdp_auto_wrap_policy", "fsdp_state_dict_type", "fsdp_cpu_ram_efficient_loading", "fsdp_use_orig_params"),
    *("fsdp_transformer_layer_cls_to_wrap", "fsdp_sync_module_states", "fsdp_min_num_params"),
    *("zero3_init_flag", "zero3_save_16bit_model", "deepspeed_multinode_launcher", "deepspeed_hostfile"),
    *(f"{SIZES}{axis}_size" for axis in ("dp_replicate", "dp_shard", "cp", "tp", "sp")),
    *(f"{SIZES}cp_comm_strategy", "use_fsdp", "use_deepspeed", "use_megatron_lm", "multi_gpu"),
}
"""Keys of accelerate that are read, or change no plan."""


MEGATRON_ROWS = (
    ForeignKey(f"{MEGATRON}tp_degree", "parallel.tp", int, 1),
    ForeignKey(f"{MEGATRON}pp_degree", "parallel.pp", int, 1),
    ForeignKey(f"{MEGATRON}context_parallel_size", "parallel.cp", int, 2),
    ForeignKey(f"{MEGATRON}expert_model_parallel_size", "parallel.ep", int),
    ForeignKey(f"{MEGATRON}expert_tensor_parallel_size", "parallel.etp", int),
    ForeignKey(f"{MEGATRON}decoder_last_pipeline_num_layers", "parallel.last_stage_layers", int),
    ForeignKey(f"{MEGATRON}use_distributed_optimizer", "parallel.zero", bool, False, {0: False, 1: True}),
    ForeignKey(f"{MEGATRON}optimizer_cpu_offload", "training.offload_optimizer", bool),
    ForeignKey(f"{MEGATRON}overlap_cpu_optimizer_d2h_h2d", "training.offload_overlap", bool),
    ForeignKey(f"{MEGATRON}gradient_clipping", "training.clip_norm", float, 1.0),
    ForeignKey(f"{MEGATRON}attention_dropout", "training.attention_dropout", float),
    ForeignKey(f"{MEGATRON}hidden_dropout", "training.dropout", float),
)
"""Keys and defaults of MegatronLMPlugin (utils/dataclasses.py)."""
OF_MEGATRON = {
    *(row.key for row in MEGATRON_ROWS),
    *(f"{MEGATRON}recompute_{name}" for name in ("granularity", "method", "num_layers", "activations")),
    *(f"{MEGATRON}{name}" for name in ("sequence_parallelism", "num_micro_batches", "use_precision_aware_optimizer")),
    *(f"{MEGATRON}{name}" for name in ("no_load_optim", "no_save_optim", "eod_mask_loss", "calculate_per_token_loss")),
    *(f"{MEGATRON}{name}" for name in ("attention_softmax_in_fp32", "use_rotary_position_embeddings")),
}
"""Its keys that are read, or change no plan."""


def read_accelerate(text: str, typed: Overrides = NO_SETTINGS) -> ReadJob:
    """The job of a config, or of `accelerate launch`'s flags. Raises InputError with every value
    that no setting says."""
    values = launch_values(text)
    reader = KeyReader(values, "accelerate")
    if not {"distributed_type", "num_processes", "mixed_precision"} & {*values}:
        message = "a config of accelerate has distributed_type and num_processes, and this text neither"
        raise unreadable(message, "give its file as @FILE: ~/.cache/huggingface/accelerate/default_config.yaml")
    read_ranks(reader)
    words = reader.value("mixed_precision", "no")
    if words not in DTYPES:
        reader.wrong("mixed_precision", f"{words!r} is not known", f"use {', '.join(DTYPES)}")
    reader.settings["training.dtype"] = DTYPES.get(words, "bf16")
    runtime = read_sharding(reader)
    leave_to_data(reader)
    reader.read(TRAINER, defaults=False)
    read_global_batch(reader, typed)
    if reader.is_on("gradient_checkpointing") or reader.is_on("fsdp_activation_checkpointing"):
        reader.settings["training.recompute"] = "full"
    if reader.has("optim"):
        read_optimizer(reader, "optim")
    known = {row.key for row in TRAINER} | OF_ACCELERATE | {"gradient_checkpointing"}
    rest = unread_keys(reader, (*known, *OF_MEGATRON))
    if adapter := [text for text in rest if text.startswith(PEFT)]:
        reader.nearest(adapter[0].split()[0], "adapters are TRL's flags", "read them: --from trl")
    return reader.job(runtime, rest)


def launch_values(text: str) -> Flags:
    """The values of a config or a launch line by the last part of their names, which are all different."""
    if not is_script(text):
        return {name.rsplit(".", 1)[-1]: words for name, words in read_yaml(text).items()}
    line = split_command(text, {})
    kinds = [kind for flag, kind in TYPES.items() if flag in line.launcher] or ["MULTI_GPU"]
    values = {name.lstrip("-"): words for name, words in {**line.flags, **line.launcher}.items()}
    mixed = next((kind for kind in ("bf16", "fp16") if kind in values), "no")
    return {"distributed_type": (kinds[0],), "mixed_precision": (mixed,), **values}


def read_ranks(reader: KeyReader) -> None:
    """Nodes, and ranks of a node."""
    machines, total = int(reader.number("num_machines", int, 1)), int(reader.number("num_processes", int, 0))
    if total < 1 or machines < 1:
        return
    if total % machines:
        reader.wrong("num_processes", f"{total} processes do not divide over {machines} machines", "use a multiple")
    reader.settings |= {"cluster.nodes": machines, "cluster.gpus_per_node": max(total // machines, 1)}


def read_sharding(reader: KeyReader) -> str:
    """Set ZeRO, the sizes of the axes and what is in host memory; return the runtime that stands for the
    plug-in."""
    s, kind = reader.settings, reader.value("distributed_type", "NO")
    for name, settings in HOST.items():
        device = reader.value(name, "none").lower()
        if device in ("cpu", "true"):
            s.update(dict.fromkeys(settings, True))
        elif device not in ("none", "false"):
            reader.wrong(name, f"{device}: states on a disk are not planned", "use none or cpu")
    for axis in ("tp", "cp"):
        s[f"parallel.{axis}"] = int(reader.number(f"{SIZES}{axis}_size", int, 1))
    if (size := int(reader.number(f"{SIZES}sp_size", int, 1))) > 1:
        s |= {"parallel.cp": size, "parallel.cp_comm": "a2a"}  # Ulysses, which accelerate runs with DeepSpeed
    strategy = f"{SIZES}cp_comm_strategy"
    if reader.has(strategy) and size == 1 and s["parallel.cp"] != 1:
        known = {"allgather": "all_gather", "alltoall": "p2p"}  # torch's "alltoall" sends around a ring
        if (word := reader.value(strategy)) in known:
            s["parallel.cp_comm"] = known[word]
        else:
            reader.wrong(strategy, f"{word!r} is not known", f"use {', '.join(known)}")
    if kind == "MEGATRON_LM":
        return _read_megatron(reader)
    if kind == "DEEPSPEED":
        if reader.has("deepspeed_config_file"):
            file = reader.value("deepspeed_config_file")
            reader.wrong("deepspeed_config_file", f"{file} is another file", f"give it: --from deepspeed @{file}")
        s["parallel.zero"] = int(reader.number("zero_stage", int, 2))
        return "deepspeed"
    s["parallel.zero"] = _read_fsdp(reader) if kind == "FSDP" else 0
    if kind not in ("FSDP", "MULTI_GPU", "NO", "MULTI_CPU"):
        reader.wrong("distributed_type", f"{kind!r} is not read", f"use {', '.join((*TYPES.values(), 'MULTI_GPU'))}")
    return "fsdp2" if kind != "FSDP" or reader.value("fsdp_version", "1") == "2" else "fsdp"


def _read_fsdp(reader: KeyReader) -> int:
    s, name = reader.settings, "fsdp_reshard_after_forward"
    name = name if reader.has(name) else "fsdp_sharding_strategy"
    strategy = reader.value(name, "FULL_SHARD")
    strategy = NUMBERED.get(strategy, strategy)
    if strategy not in STRATEGIES:
        reader.wrong(name, f"{strategy!r} is not known", f"use {', '.join(STRATEGIES)}")
    shard = int(reader.number(f"{SIZES}dp_shard_size", int, 0))
    if int(reader.number(f"{SIZES}dp_replicate_size", int, 1)) > 1 and shard > 0:
        cp = s["parallel.cp"]
        s["parallel.zero_size"] = shard * (cp if isinstance(cp, int) else 1)
    elif strategy.startswith("HYBRID") and "cluster.gpus_per_node" in s:
        s["parallel.zero_size"] = s["cluster.gpus_per_node"]
    return STRATEGIES.get(strategy, 3)


def _read_megatron(reader: KeyReader) -> str:
    reader.read(MEGATRON_ROWS)
    s, key = reader.settings, f"{MEGATRON}context_parallel_size"
    if not reader.has(key):
        reader.nearest(key, "is absent: planned as 2, accelerate's default", "write it in the config")
    s["parallel.sequence_parallel"] = reader.is_on(f"{MEGATRON}sequence_parallelism") and s["parallel.tp"] != 1
    if reader.is_on(f"{MEGATRON}use_precision_aware_optimizer"):
        s["training.optimizer_dtype"] = "fp32"
    if reader.is_on(name := f"{MEGATRON}use_custom_fsdp"):
        reader.nearest(name, "planned as the distributed optimizer alone: its strategy is not in the config")
    if reader.has(name := f"{MEGATRON}num_micro_batches"):
        reader.flags["gradient_accumulation_steps"] = reader.flags[name]
    _read_recompute(reader)
    return "megatron-core"


def _read_recompute(reader: KeyReader) -> None:
    """Every layer where the config says nothing: accelerate's default. recompute_activations is not passed on."""
    activations, key = f"{MEGATRON}recompute_activations", f"{MEGATRON}recompute_granularity"
    word = reader.value(key, "full")
    if word not in ("selective", "full"):
        reader.wrong(key, f"{word!r} is not known", "use selective or full")
    reader.settings["training.recompute"] = word
    if not reader.has(key):
        told = f" and {activations} changes nothing" if reader.has(activations) else ""
        reader.nearest(key, f"is absent: planned as full, accelerate's default{told}", "write it in the config")
    method, per = (reader.value(f"{MEGATRON}recompute_{name}") for name in ("method", "num_layers"))
    if word == "full" and (method or "uniform", per or "1") != ("uniform", "1"):
        message = f"{method} with {per or 1} layers: a job recomputes every layer from its input"
        reader.wrong(f"{MEGATRON}recompute_method", message, f"use uniform with {MEGATRON}recompute_num_layers 1")
