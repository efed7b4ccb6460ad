"""Axolotl's YAML: a plan as one, and one as a job.

Spelling, meanings and limits: axolotl 0.19, utils/schemas/, loaders/ and utils/distributed.py; the rest as
in trainer_keys.py and peft_keys.py. A model is read in the type that it trains in: without FSDP (which
trains fp32 copies) and DeepSpeed all-parameter training has bf16 parameters and moments. `adapter: qlora`
alone quantises in 4 bits, `lora` alone in 8. `gradient_checkpointing: offload` keeps the inputs of layers
in host memory. cp is ring attention, whose packed micro batch has one row.

By hand, rank 32, alpha 16 over nf4:

>>> read = read_axolotl("{base_model: Qwen/Qwen2.5-7B, adapter: qlora, load_in_4bit: true, lora_r: 32, "
...                     "lora_alpha: 16, lora_target_linear: true, sequence_len: 4096}")
>>> [read.settings["training.adapter." + key] for key in ("kind", "rank", "base_precision")]
['qlora', 32, 'nf4']
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mpctl.core.errors import Issue
from mpctl.interop.config_text import nested, read_yaml, unreadable, yaml_text
from mpctl.interop.emitted import ForeignLauncher, plan_notes
from mpctl.interop.limits import LauncherLimits, dp_degrees, refused
from mpctl.interop.mapping import NO_SETTINGS, ForeignKey, KeyReader, ReadJob, written
from mpctl.interop.peft_keys import (
    BASES,
    KINDS,
    adapter_rows,
    is_nested,
    peft_refusals,
    read_base,
    read_names,
    saved_of,
    stored_as,
    targets_of,
)
from mpctl.interop.trainer_keys import (
    DATASET,
    DTYPES,
    MODEL,
    OPTIMIZERS,
    Trained,
    attention_word,
    deepspeed_table,
    hub_id,
    leave_to_data,
    read_deepspeed,
    read_global_batch,
    read_trainer,
    set_trained,
    sharded_by_deepspeed,
    sharding_refusals,
    trainer_notes,
    trainer_refusals,
    trainer_rows,
    unread_keys,
    uses_deepspeed,
    uses_fsdp,
)
from mpctl.model.layout.topology import zero_stage
from mpctl.plan.estimate.loss import loss_way
from mpctl.plan.planning.plan import Overrides, Plan
from mpctl.spec.job import JobSpec
from mpctl.spec.runtime import job_profile

LIMITS = LauncherLimits(
    "Axolotl",
    cp_comm=("p2p",),
    pp=False,
    sequence_parallel=False,
    dtypes=DTYPES,
    recompute=("none", "full"),
    offload=True,
    dropout=False,
    zero_size="dp",
    adapters=KINDS,
    bases=(*BASES, "int4-gptq"),
    optimizers=tuple(OPTIMIZERS),
    host=("offload_optimizer", "offload_parameters"),
    bf16_states=True,
    losses=("unfused", "fused", "linear"),
    tiled_mlp=True,
)
F = "fsdp_config."


def trained_by(job: JobSpec) -> Trained:
    """Data type and fp32 copies of the parameters that Axolotl trains (module)."""
    t = job.training
    if uses_deepspeed(job):
        return sharded_by_deepspeed(job)
    if t.adapter is None:
        return Trained("fp32" if uses_fsdp(job) or t.dtype == "tf32" else t.chosen_dtype)
    keeps = not uses_fsdp(job) or t.adapter.stored_as == "nf4"  # else FSDP 2 makes them fp32
    return Trained("bf16" if t.adapter.dtype == "bf16" and keeps else "fp32")


def _if_fsdp(value: int | str) -> Callable[[JobSpec], int | str | None]:
    """A constant, where FSDP 2 shards."""
    return lambda job: value if uses_fsdp(job) else None


def _gathers_again(job: JobSpec) -> bool | None:
    return zero_stage(job) == 3 if uses_fsdp(job) else None


def _mesh_size(axis: str) -> Callable[[JobSpec], int | None]:
    """The size of an axis of the mesh: of tp and cp above 1, of dp where more than one axis is."""

    def size(job: JobSpec) -> int | None:
        replicas, shards = dp_degrees(job)
        sizes = {"replicas": replicas, "shards": shards, **job.sizes}
        is_mesh = uses_fsdp(job) and (job.sizes["tp"] > 1 or job.sizes["cp"] > 1 or replicas > 1)
        return sizes[axis] if is_mesh and sizes[axis] > 1 else None

    return size


def _checkpointing(job: JobSpec) -> bool | str:
    t = job.training
    return "offload" if t.recompute == "full" and t.offload_activations else t.recompute == "full"


ADAPTER_ROWS = (
    ForeignKey("adapter", value=lambda job: "qlora" if stored_as(job) == "nf4" else "lora"),
    ForeignKey("load_in_4bit", value=lambda job: stored_as(job) == "nf4" or None),
    ForeignKey("load_in_8bit", value=lambda job: stored_as(job) == "int8" or None),
    ForeignKey("gptq", value=lambda job: stored_as(job) == "int4-gptq" or None),
    ForeignKey(
        "bnb_config_kwargs.bnb_4bit_use_double_quant", "training.adapter.double_quantization", bool, value=is_nested
    ),
    *adapter_rows(
        rank="lora_r", dropout="lora_dropout", dora="peft_use_dora", rslora="peft_use_rslora", default={"rank": 8}
    ),
    ForeignKey("lora_target_linear", value=lambda job: targets_of(job) is None or None),
    ForeignKey("lora_target_modules", value=targets_of),
    ForeignKey("lora_modules_to_save", value=saved_of),
    ForeignKey(
        "peft_autocast_adapter_dtype",
        value=lambda job: None if uses_deepspeed(job) else trained_by(job).dtype == "fp32",
    ),
)
LOSSES = {"liger_fused_linear_cross_entropy": "linear", "cut_cross_entropy": "linear", "liger_cross_entropy": "fused"}
LIGER_PLUGIN = "axolotl.integrations.liger.LigerPlugin"


def _if_loss(way: str, value: object) -> Callable[[JobSpec], object]:
    """A value of jobs whose loss is computed so; TRL's profile plans linear where a job says nothing."""
    return lambda job: value if loss_way(job.training, job_profile(job.training)) == way else None


def _has_liger(job: JobSpec) -> list[str] | None:
    return [LIGER_PLUGIN] if loss_way(job.training, job_profile(job.training)) in ("fused", "linear") else None


LOSS_ROWS = (
    ForeignKey("plugins", value=_has_liger),
    ForeignKey("liger_fused_linear_cross_entropy", value=_if_loss("linear", True)),
    ForeignKey("liger_cross_entropy", value=_if_loss("fused", True)),
    ForeignKey("tiled_mlp", value=lambda job: True if job.training.tiled_mlp else None),
    ForeignKey("tiled_mlp_num_shards", "training.tiled_mlp", int),
)
ROWS = (
    ForeignKey("base_model", value=hub_id),
    ForeignKey("attn_implementation", value=attention_word),
    ForeignKey("datasets", value=lambda job: [{"path": DATASET, "type": "chat_template"}]),
    ForeignKey("output_dir", value="output"),
    *trainer_rows(
        length="sequence_len", batch="micro_batch_size", optimizer="optimizer", schedule="lr_scheduler", rate=None
    ),
    ForeignKey("sample_packing", value=True),
    ForeignKey("pad_to_sequence_len", value=True),
    ForeignKey("gradient_checkpointing", value=_checkpointing),
    ForeignKey("fsdp_version", value=_if_fsdp(2)),
    ForeignKey(f"{F}reshard_after_forward", value=_gathers_again),
    ForeignKey(f"{F}auto_wrap_policy", value=_if_fsdp("TRANSFORMER_BASED_WRAP")),
    ForeignKey(f"{F}state_dict_type", value=_if_fsdp("SHARDED_STATE_DICT")),
    ForeignKey(f"{F}offload_params", value=lambda job: (uses_fsdp(job) and job.training.offload_parameters) or None),
    ForeignKey("dp_replicate_size", value=_mesh_size("replicas")),
    ForeignKey("dp_shard_size", value=_mesh_size("shards")),
    ForeignKey("tensor_parallel_size", "parallel.tp", int, 1, value=_mesh_size("tp")),
    ForeignKey("context_parallel_size", "parallel.cp", int, 1, value=_mesh_size("cp")),
    *LOSS_ROWS,
    ForeignKey("deepspeed", value=lambda job: deepspeed_table(job) if uses_deepspeed(job) else None),
)
ATTENTION = ("flash_attention", "sdp_attention", "eager_attention", "xformers_attention", "flex_attention")
"""Older switches of attn_implementation."""
FSDP = (
    "version",
    "fsdp_version",
    "reshard_after_forward",
    "fsdp_reshard_after_forward",
    "sharding_strategy",
    "fsdp_sharding_strategy",
    "offload_params",
    "fsdp_offload_params",
    "activation_checkpointing",
    "fsdp_activation_checkpointing",
    "auto_wrap_policy",
    "transformer_layer_cls_to_wrap",
    "state_dict_type",
    "final_state_dict_type",
    "cpu_ram_efficient_loading",
    "sync_module_states",
    "use_orig_params",
    "fsdp_auto_wrap_policy",
    "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_state_dict_type",
    "fsdp_cpu_ram_efficient_loading",
    "fsdp_sync_module_states",
    "fsdp_use_orig_params",
)
"""Keys of fsdp_config that are read, or change no plan."""


def _refusals(plan: Plan) -> Iterator[Issue]:
    job, p = plan.job, plan.job.parallel
    yield from LIMITS.refusals(plan)
    yield from trainer_refusals(job, "Axolotl", trained_by(job))
    yield from peft_refusals(job, "Axolotl", dtypes=False)
    yield from sharding_refusals(job, "Axolotl")
    adapter = job.training.adapter
    if p.tp > 1 and not uses_fsdp(job):
        yield refused("parallel.tp", p.tp, "Axolotl splits layers with FSDP 2 alone here", "use zero 2 or 3, or tp 1")
    elif p.tp > 1 and adapter and adapter.is_quantized:
        yield refused("parallel.tp", p.tp, "bitsandbytes' weights are not split over tp", "use tp 1, or base bf16")
    elif p.tp > 1 and job.training.optimizer.startswith("paged"):
        yield refused("parallel.tp", p.tp, "Axolotl has no paged optimizer over tp", "use optimizer adamw")
    if p.cp > 1 and job.training.micro_batch_size > 1:
        size, message = job.training.micro_batch_size, "ring attention packs one row of a micro batch"
        yield refused("training.micro_batch_size", size, message, "use micro_batch_size 1, or cp 1")


def _notes(plan: Plan) -> Iterator[str]:
    job = plan.job
    yield from plan_notes(plan, "Axolotl", divisor=0)
    yield from trainer_notes(job, trained_by(job))
    if job.parallel.cp > 1:
        yield "cp needs flash attention 2 and the package ring-flash-attn"
    ranks = f"--nproc_per_node {job.cluster.gpus_per_node}"
    if job.cluster.nodes > 1:
        ranks += f' --nnodes {job.cluster.nodes} --node_rank "$NODE_RANK" --master_addr "$MASTER_ADDR"'
    yield f"start it: axolotl train FILE --launcher torchrun -- {ranks}"


def _body(plan: Plan) -> str:
    job = plan.job
    rows = (*ROWS[:1], *(ADAPTER_ROWS if job.training.adapter else ()), *ROWS[1:])
    return yaml_text(nested(written(job, rows)))


def read_axolotl(text: str, typed: Overrides = NO_SETTINGS) -> ReadJob:
    """The job of a config file. Raises InputError with every value that no setting says."""
    reader = KeyReader(read_yaml(text), "axolotl")
    if not reader.has("base_model"):
        raise unreadable("a config of Axolotl has base_model, and this text none", "give its file as @FILE")
    for name, words in {"sequence_len": "512", "micro_batch_size": "1", "bf16": "true"}.items():
        reader.flags.setdefault(name, (words,))
    if reader.value("bf16") in ("auto", "full"):
        reader.flags["bf16"] = ("true",)
    s = reader.settings
    leave_to_data(reader)
    reader.read(ROWS)
    if (model := reader.value("base_model")) != MODEL:
        s["model"] = model
    if reader.value("attn_implementation") == "eager" or reader.is_on("eager_attention"):
        s["model.attention"] = "unfused"
    if reader.has("rl"):
        reader.wrong("rl", f"{reader.value('rl')}: supervised fine-tuning is planned alone", "leave it out")
    read_trainer(reader, optimizer="optimizer", schedule="lr_scheduler", default_schedule="cosine")
    checkpoints = reader.value("gradient_checkpointing", "false")
    s["training.recompute"] = "none" if checkpoints == "false" else "full"
    if checkpoints.startswith("offload"):
        s["training.offload_activations"] = True
    _read_loss(reader)
    is_deepspeed = read_deepspeed(reader)
    has_fsdp = not is_deepspeed and _read_fsdp(reader)
    is_half = _read_adapter(reader, has_fsdp=has_fsdp) if reader.has("adapter") else not has_fsdp
    set_trained(s, is_half=is_half, has_masters=is_deepspeed)
    if not reader.is_on("sample_packing"):
        reader.nearest("sample_packing", "rows are planned full: without packing, shorter samples take less time")
    read_global_batch(reader, typed)
    known = {row.key for row in (*ROWS, *ADAPTER_ROWS)} | {*ATTENTION, *LOSSES, "fsdp", *(F + key for key in FSDP)}
    if s["training.cross_entropy"] == "unfused":  # they do something else
        known -= {"plugins"}
    known |= {name for name in reader.flags if name.startswith("deepspeed.")}
    return reader.job("deepspeed" if is_deepspeed else "trl", unread_keys(reader, known))


def _read_loss(reader: KeyReader) -> None:
    """transformers' loss over all logits, or that of Liger or Cut Cross Entropy."""
    found = (way for key, way in LOSSES.items() if reader.is_on(key))
    reader.settings["training.cross_entropy"] = next(found, "unfused")


def _read_adapter(reader: KeyReader, *, has_fsdp: bool) -> bool:
    """Set the adapter; whether A and B have 16 bits."""
    s, kind = reader.settings, reader.value("adapter")
    if kind not in ("lora", "qlora"):
        reader.wrong("adapter", f"{kind!r} is not planned", "use lora or qlora")
    reader.read(ADAPTER_ROWS)
    in_4_bits = kind == "qlora" and reader.is_on("load_in_4bit", default=True)
    nested_key, quant = (f"bnb_config_kwargs.bnb_4bit_{name}" for name in ("use_double_quant", "quant_type"))
    read_base(
        reader,
        in_4_bits=in_4_bits,
        in_8_bits=kind == "lora" and reader.is_on("load_in_8bit"),
        dora=reader.is_on("peft_use_dora"),
        nested=reader.is_on(nested_key, default=True),
        quant=quant,
    )
    if reader.is_on("gptq"):
        s["training.adapter.base_precision"] = "int4-gptq"
    read_names(reader, "lora_target_modules", "targets")
    if reader.is_on("lora_target_linear"):
        s["training.adapter.targets"] = ["all-linear"]
    read_names(reader, "lora_modules_to_save", "modules_to_save")
    return not reader.is_on("peft_autocast_adapter_dtype", default=True) and (in_4_bits or not has_fsdp)


def _read_fsdp(reader: KeyReader) -> bool:
    """Set ZeRO and its ranks by FSDP's keys, with or without fsdp_ before them; whether there are some."""
    s = reader.settings
    values = {name.removeprefix(F).removeprefix("fsdp_"): name for name in reader.flags if name.startswith(F)}
    if not values and reader.value("fsdp") in ("", "false"):  # an empty list is no FSDP
        return False
    strategy = reader.value(values.get("sharding_strategy", ""), "FULL_SHARD")
    again = reader.is_on(values.get("reshard_after_forward", ""), default=strategy != "SHARD_GRAD_OP")
    s["parallel.zero"] = 3 if again else 2
    if reader.is_on(values.get("offload_params", "")):
        s |= {"training.offload_optimizer": True, "training.offload_parameters": True}
    if reader.is_on(values.get("activation_checkpointing", "")):
        s["training.recompute"] = "full"
    shards = int(reader.number("dp_shard_size", int, 0))
    if int(reader.number("dp_replicate_size", int, 1)) > 1 and shards > 0:
        s["parallel.zero_size"] = shards * int(str(s.get("parallel.cp", 1)))
    return True


LAUNCHER = ForeignLauncher(
    "axolotl", "Axolotl 0.19", "yaml", _refusals, _notes, _body, read_axolotl, script="-m axolotl.cli.train"
)
