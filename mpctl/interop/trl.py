"""TRL's supervised fine-tuning: a plan as a script with accelerate's config, SFT's and the command, and
such files and lines as a job.

Spelling, meanings and limits: trl 1.16, trainer/sft_config.py, trainer/model_config.py, scripts/sft.py
and cli/; the rest as in trainer_keys.py, peft_keys.py and accelerate.py. `dtype` is the type in which the
model is read: fp32 where all of it is trained, computed in bf16. TRL has A and B in fp32, in bf16 over
a quantised base and under ZeRO 3 of DeepSpeed. `packing` fills rows (strategy bfd), which context
parallelism refuses.

By hand, batch 2, 4 accumulation steps and 8 processes are a global batch of 64:

>>> read = read_trl("accelerate launch --num_processes 8 -m trl.scripts.sft --max_length 2048 --use_peft "
...                 "--per_device_train_batch_size 2 --gradient_accumulation_steps 4", {})
>>> [read.settings[key] for key in ("training.global_batch_size", "training.adapter.rank", "model.seq_length")]
[64, 16, 2048]
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from mpctl.core.errors import Issue
from mpctl.interop.accelerate import config_tree, variables_of
from mpctl.interop.config_text import Flags, Tree, nested, read_yaml, unreadable, yaml_text
from mpctl.interop.emitted import ForeignLauncher, plan_notes
from mpctl.interop.from_accelerate import OF_ACCELERATE, launch_values, read_ranks, read_sharding
from mpctl.interop.limits import LauncherLimits
from mpctl.interop.mapping import NO_SETTINGS, ForeignKey, KeyReader, ReadJob, written
from mpctl.interop.peft_keys import (
    BASES,
    KINDS,
    adapter_rows,
    is_nested,
    peft_refusals,
    read_base,
    read_default_targets,
    read_names,
    saved_of,
    stored_as,
    targets_of,
)
from mpctl.interop.shell import is_script
from mpctl.interop.trainer_keys import (
    ARGUMENTS,
    DATASET,
    DTYPES,
    LIGER,
    LIGER_ROWS,
    MODEL,
    OPTIMIZERS,
    TORCH,
    Trained,
    attention_word,
    hub_id,
    leave_to_data,
    read_global_batch,
    read_liger,
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
from mpctl.interop.trl_python import is_python, is_unsloth, python_values
from mpctl.plan.planning.plan import Overrides, Plan
from mpctl.spec.job import JobSpec

LIMITS = LauncherLimits(
    "TRL",
    cp_comm=("p2p", "all_gather"),
    pp=False,
    tp=False,
    sequence_parallel=False,
    dtypes=DTYPES,
    recompute=("none", "full"),
    dropout=False,
    zero_size="dp",
    adapters=KINDS,
    bases=BASES,
    optimizers=tuple(OPTIMIZERS),
    host=("offload_optimizer", "offload_parameters"),
    bf16_states=True,
    losses=("fused", "linear"),
    offload=True,
)


def trained_by(job: JobSpec) -> Trained:
    """Data type and fp32 copies of the parameters that TRL trains (module)."""
    t = job.training
    if uses_deepspeed(job):
        return sharded_by_deepspeed(job)
    is_low = (t.adapter.is_quantized if t.adapter else t.master_weights is False) and t.dtype == "bf16"
    return Trained("bf16" if is_low else "fp32")


def _read_as(job: JobSpec) -> str:
    """The type in which the model is read."""
    t = job.training
    base = t.adapter.stored_as if t.adapter else None
    if t.adapter:
        return TORCH[base] if base in TORCH else TORCH[t.chosen_dtype]
    return TORCH[trained_by(job).dtype]


def _offloads(job: JobSpec) -> bool | None:
    """Inputs of recomputed layers in host memory, which transformers has since 5.16."""
    return True if job.training.offload_activations and job.training.recompute == "full" else None


ADAPTER_ROWS = (
    ForeignKey("use_peft", value=True),
    *adapter_rows(
        rank="lora_r",
        dropout="lora_dropout",
        dora="use_dora",
        rslora="use_rslora",
        default={"rank": 16, "alpha": 32, "dropout": 0.05},
    ),
    ForeignKey("lora_target_modules", value=lambda job: targets_of(job) or ["all-linear"]),
    ForeignKey("lora_modules_to_save", value=saved_of),
    ForeignKey("load_in_4bit", value=lambda job: stored_as(job) == "nf4" or None),
    ForeignKey("load_in_8bit", value=lambda job: stored_as(job) == "int8" or None),
    ForeignKey("use_bnb_nested_quant", "training.adapter.double_quantization", bool, value=is_nested),
    ForeignKey(
        "bnb_4bit_quant_storage",
        value=lambda job: _read_as(job) if stored_as(job) == "nf4" and uses_fsdp(job) else None,
    ),
)
ROWS = (
    ForeignKey("model_name_or_path", value=hub_id),
    ForeignKey("dtype", value=_read_as),
    ForeignKey("attn_implementation", value=lambda job: "sdpa" if job.parallel.cp > 1 else attention_word(job)),
    ForeignKey("dataset_name", value=DATASET),
    ForeignKey("output_dir", value="output"),
    *trainer_rows(
        length="max_length",
        batch="per_device_train_batch_size",
        optimizer="optim",
        schedule="lr_scheduler_type",
        rate=2e-5,
    ),
    ForeignKey("packing", value=lambda job: job.parallel.cp == 1),
    ForeignKey("pad_to_multiple_of", value=lambda job: job.parallel.cp * 2 if job.parallel.cp > 1 else None),
    ForeignKey("gradient_checkpointing", "training.recompute", bool, True, {"none": False, "full": True}),
    ForeignKey("gradient_checkpointing_kwargs.offload", value=_offloads),
    ForeignKey("loss_type", value=lambda job: "nll" if job.training.cross_entropy == "linear" else None),
    *LIGER_ROWS,
)
DEFAULTS = {"max_length": ("1024",), "per_device_train_batch_size": ("8",)}
OF_SCHEDULE = {row.key for row in ROWS if row.key.startswith(ARGUMENTS)}
OFFLOADS = ("offload", "fsdp_activation_checkpointing_offload")
OLDER = {"max_seq_length": "max_length", "torch_dtype": "dtype"}
CONFIGS = {
    "single_gpu": ("NO", 0),
    "multi_gpu": ("MULTI_GPU", 0),
    "fsdp1": ("FSDP", 3),
    "fsdp2": ("FSDP", 3),
    **{f"zero{stage}": ("DEEPSPEED", stage) for stage in (1, 2, 3)},
}
"""TRL's accelerate_configs/: kind and stage of ZeRO."""


def _refusals(plan: Plan) -> Iterator[Issue]:
    job = plan.job
    yield from LIMITS.refusals(plan)
    yield from trainer_refusals(job, "TRL", trained_by(job))
    yield from peft_refusals(job, "TRL", dtypes=True)
    yield from sharding_refusals(job, "TRL")


def _notes(plan: Plan) -> Iterator[str]:
    job = plan.job
    yield from plan_notes(plan, "TRL", divisor=0)
    yield from trainer_notes(job, trained_by(job))
    if job.parallel.cp > 1:
        yield "cp refuses packing: rows are padded to max_length where the data is shorter"
    if job.cluster.nodes > 1:
        yield "start it on each node with NODE_RANK and MASTER_ADDR set"


def _rows(job: JobSpec) -> tuple[ForeignKey, ...]:
    return (*ROWS, *(ADAPTER_ROWS if job.training.adapter else ()))


def _accelerate(job: JobSpec) -> Tree:
    return config_tree(job, deepspeed=uses_deepspeed(job), has_trainer=True)


def _body(plan: Plan) -> str:
    job = plan.job
    launch = "accelerate launch --config_file accelerate.yaml"
    if job.cluster.nodes > 1:
        launch += ' --machine_rank "$NODE_RANK" --main_process_ip "$MASTER_ADDR"'
    return "\n".join(
        [
            *("cat > accelerate.yaml <<'EOF'", yaml_text(_accelerate(job)), "EOF"),
            *("cat > sft.yaml <<'EOF'", yaml_text(nested(written(job, _rows(job)))), "EOF"),
            f"{launch} \\",
            "    -m trl.scripts.sft --config sft.yaml",
        ]
    )


def _config(plan: Plan) -> str:
    """TRL's config as JSON, which its parser reads as YAML."""
    return json.dumps(nested(written(plan.job, _rows(plan.job))), indent=2)


def _variables(plan: Plan) -> dict[str, str]:
    return variables_of(_accelerate(plan.job))


def read_trl(text: str, typed: Overrides = NO_SETTINGS) -> ReadJob:
    """The job of TRL's config, of a launch line, or of Python with an SFTConfig. Raises InputError with every
    value that no setting says."""
    values = _values(text)
    reader = KeyReader(values, "trl")
    known = {row.key for row in (*ROWS, *ADAPTER_ROWS)}
    if not known & {*values}:
        message = "TRL's config has keys such as model_name_or_path and max_length, and this text none"
        raise unreadable(message, "give its file as @FILE")
    if not reader.is_on("fp16"):
        values.setdefault("bf16", ("true",))  # TRL's default
    for name, words in DEFAULTS.items():
        values.setdefault(name, words)
    _read_configs(reader)
    read_ranks(reader)
    read_sharding(reader)
    s = reader.settings
    leave_to_data(reader)
    reader.read(ROWS)
    if (model := reader.value("model_name_or_path")) not in ("", MODEL):
        s["model"] = model
    if reader.value("attn_implementation", "sdpa") == "eager":
        s["model.attention"] = "unfused"
    if reader.has("activation_checkpointing"):  # its name since transformers 5.24
        s["training.recompute"] = "full" if reader.is_on("activation_checkpointing") else "none"
    if reader.is_on("fsdp_activation_checkpointing"):
        s["training.recompute"] = "full"
    read_trainer(reader, optimizer="optim", schedule="lr_scheduler_type")
    _read_loss(reader)
    if s["training.recompute"] == "full" and any(map(reader.is_on, OFFLOADS)):
        s["training.offload_activations"] = True
    is_low = _is_low(reader)
    if reader.is_on("use_peft"):
        if not is_unsloth(text):  # whose default is every linear module
            read_default_targets(reader, "lora_target_modules", str(typed.get("model", s.get("model", ""))))
        is_low = _read_adapter(reader) and not is_unsloth(text)  # which makes A and B fp32
    is_deepspeed = reader.value("distributed_type") == "DEEPSPEED"
    set_trained(s, is_half=is_low, has_masters=is_deepspeed)
    if not reader.is_on("packing"):
        reader.nearest("packing", "rows are planned full: without packing, shorter samples take less time")
    read_global_batch(reader, typed)
    known |= {*OFFLOADS, *(row.key.removeprefix(LIGER) for row in LIGER_ROWS)}
    known |= {*OF_ACCELERATE, "accelerate_config", "activation_checkpointing", "config", "config_file"}
    runtime = "deepspeed" if is_deepspeed else "unsloth" if is_unsloth(text) else "trl"
    return reader.job(runtime, unread_keys(reader, known))


def _is_low(reader: KeyReader) -> bool:
    """Whether the model is read in 16 bits; `auto`, the type of its files, is planned as the one it trains in."""
    word, dtype = reader.value("dtype", "float32"), reader.settings["training.dtype"]
    if word == "auto" and not any(map(reader.is_on, ("load_in_4bit", "load_in_8bit"))):
        message = f"auto, the type of the model's files, is planned as {dtype}"
        reader.nearest("dtype", message, "name it where they have another type, such as dtype: float32")
    return word in ("bfloat16", "float16") or (word == "auto" and dtype == "bf16")


def _read_loss(reader: KeyReader) -> None:
    """Liger's loss, or TRL's in chunks, which both of its names of the plain loss mean since 1.16."""
    kind = reader.value("loss_type", "nll")
    if kind not in ("nll", "chunked_nll"):
        reader.nearest("loss_type", f"{kind}: planned as nll", "the bytes of its logits are nll's")
    if reader.has("loss_type"):
        reader.settings["training.cross_entropy"] = "linear"
    read_liger(reader, "use_liger_kernel")


def _read_configs(reader: KeyReader) -> None:
    """TRL's own configs of accelerate by name; a warning for a file that is not read."""
    name = reader.value("accelerate_config")
    if name in CONFIGS:
        kind, stage = CONFIGS[name]
        reader.flags |= {"distributed_type": (kind,), "fsdp_version": ("1" if name == "fsdp1" else "2",)}
        reader.flags |= {"zero_stage": (str(stage),)}
        return
    for key in ("config", "config_file", "accelerate_config"):
        if file := reader.value(key):
            hint = "write it in the script (cat > FILE <<EOF), or give its settings: --zero 3, --gpus 8xh100"
            reader.nearest(key, f"{file}: a script's other files are not read", hint)


def _read_adapter(reader: KeyReader) -> bool:
    """Set the adapter; whether A and B have 16 bits."""
    s = reader.settings
    reader.read(ADAPTER_ROWS)
    in_4_bits, in_8_bits = reader.is_on("load_in_4bit"), reader.is_on("load_in_8bit")
    nested_quant, dora = reader.is_on("use_bnb_nested_quant"), reader.is_on("use_dora")
    read_base(
        reader, in_4_bits=in_4_bits, in_8_bits=in_8_bits, dora=dora, nested=nested_quant, quant="bnb_4bit_quant_type"
    )
    read_names(reader, "lora_target_modules", "targets")
    read_names(reader, "lora_modules_to_save", "modules_to_save")
    names = {theirs: ours for ours, theirs in TORCH.items() if ours != "tf32"}
    base = names.get(reader.value("dtype", "float32"))
    is_cast = in_4_bits or in_8_bits or reader.value("distributed_type") == "DEEPSPEED"
    if not is_cast and base not in (None, s["training.dtype"]):
        s["training.adapter.base_precision"] = base
        if base == "fp32" and not reader.has("dtype"):
            hint = "write dtype: bfloat16 in the file, or plan it so: --set training.adapter.base_precision=bf16"
            message = (
                "without a dtype TRL reads the base in float32, whatever bf16 or --dtype say, and so it is planned"
            )
            reader.nearest("dtype", message, hint)
    return in_4_bits or in_8_bits


def _values(text: str) -> Flags:
    """The values by the last part of their names."""
    if not is_script(text) and is_python(text):
        return python_values(text)
    values = launch_values(text)
    table = " ".join(values.get(ARGUMENTS[:-1], ()))
    if table.startswith("{"):
        values = {**values, **read_yaml(table)}
    for older, name in OLDER.items():
        if older in values:
            values.setdefault(name, values.pop(older))
    return {ARGUMENTS + name if ARGUMENTS + name in OF_SCHEDULE else name: words for name, words in values.items()}


LAUNCHER = ForeignLauncher(
    "trl",
    "TRL 1.16",
    "shell",
    _refusals,
    _notes,
    _body,
    read_trl,
    script="-m trl.scripts.sft",
    given="--config {trl}",
    config=_config,
    variables=_variables,
)
