"""Keys and limits that TRL, Axolotl and LLaMA-Factory share: those of transformers' Trainer.

Spelling, meanings and limits: transformers 5.23, training_args.py, trainer.py and optimization.py;
peft 0.21; accelerate 1.15. The three differ in names (`max_length`, `sequence_len`, `cutoff_len`), so
that each makes its rows here with its own.

A Trainer keeps no fp32 copies of 16-bit parameters: with `bf16: true` it computes in bf16 from
parameters in whatever type they were loaded, and moments and gradients have the type of the
parameters. DeepSpeed keeps the copies.

By hand, a cosine to 0 is `cosine`, one to 3e-5 `cosine_with_min_lr` with min_lr 3e-5, a line to 3e-5
`polynomial` with power 1 and lr_end 3e-5.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from mpctl.core.errors import InputError, Issue
from mpctl.interop.config_text import Tree, Value, word
from mpctl.interop.limits import refused
from mpctl.interop.mapping import ForeignKey, KeyReader, Settings
from mpctl.model.layout.topology import zero_copies, zero_stage
from mpctl.plan.planning.plan import Overrides
from mpctl.plan.planning.summary import model_name
from mpctl.plan.rules.check import listed
from mpctl.spec.base import DType
from mpctl.spec.job import JobSpec
from mpctl.spec.presets import find_file
from mpctl.spec.runtime import get_profile
from mpctl.spec.training import TrainingSpec

MODEL, DATASET = "MODEL", "DATASET"
"""Placeholders for the user to fill in."""
DTYPES = ("fp32", "tf32", "bf16", "fp16")
TORCH = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}
OPTIMIZERS = {
    "adamw": "adamw_torch_fused",
    "adamw-8bit": "adamw_bnb_8bit",
    "paged-adamw-8bit": "paged_adamw_8bit",
    "adamw-4bit": "adamw_torch_4bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
    "lion": "lion_32bit",
    "lion-8bit": "lion_8bit",
    "paged-lion-8bit": "paged_lion_8bit",
}
OTHER_OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_hf": "adamw",
    "adamw_8bit": "adamw-8bit",
    "adamw_torch_8bit": "adamw-8bit",
    "ao_adamw_8bit": "adamw-8bit",
    "ao_adamw_4bit": "adamw-4bit",
    "paged_adamw_32bit": "adamw",
}
"""Other words of theirs. torchao's 8-bit AdamW has blocks and scales as bitsandbytes' has."""
UNQUANTIZED = ("adamw", "sgd", "lion")
SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine", "wsd": "warmup_stable_decay"}
DECAYS = {"linear": "linear", "cosine": "cosine", "minus_sqrt": "1-sqrt"}
ARGUMENTS = "lr_scheduler_kwargs."


def uses_deepspeed(job: JobSpec) -> bool:
    """Whether DeepSpeed shards the job, which has ZeRO 1, and moments alone in host memory; else FSDP 2
    does, unless the runtime names DeepSpeed."""
    t, stage = job.training, zero_stage(job)
    return stage == 1 or (
        stage > 0 and (t.offload_optimizer != t.offload_parameters or get_profile(t.runtime).runs.deepspeed)
    )


def uses_fsdp(job: JobSpec) -> bool:
    """Whether FSDP 2 shards the job."""
    return zero_stage(job) > 0 and not uses_deepspeed(job)


class Trained(NamedTuple):
    """Data type of the trained parameters and their gradients, and whether fp32 copies are updated."""

    dtype: DType
    has_masters: bool = False

    @property
    def states(self) -> DType:
        """Data type of the moments."""
        return "fp32" if self.has_masters else self.dtype


def sharded_by_deepspeed(job: JobSpec) -> Trained:
    """DeepSpeed trains 16-bit parameters with fp32 copies."""
    half = job.training.dtype in ("bf16", "fp16")
    return Trained(job.training.chosen_dtype, has_masters=True) if half else Trained("fp32")


def optimizer_word(job: JobSpec) -> str:
    """The optimizer's name. bitsandbytes' kernels take no DTensor, so that FSDP 2 has torchao's."""
    name = job.training.optimizer
    return "adamw_torch_8bit" if name == "adamw-8bit" and uses_fsdp(job) else OPTIMIZERS[name]


def trainer_rows(
    *,
    length: str,
    batch: str,
    optimizer: str,
    schedule: str,
    rate: float | None,
    word: Callable[[JobSpec], str] = optimizer_word,
) -> tuple[ForeignKey, ...]:
    """The rows of a Trainer's keys, some by the launcher's own names. rate: its default; word: for an
    optimizer."""
    return (
        ForeignKey(length, "model.seq_length", int),
        ForeignKey(batch, "training.micro_batch_size", int),
        ForeignKey("gradient_accumulation_steps", value=lambda job: job.num_microbatches),
        ForeignKey("max_steps", "training.steps", int),
        ForeignKey("seed", "training.seed", int),
        ForeignKey(optimizer, value=word),
        ForeignKey("learning_rate", "training.learning_rate", float, rate),
        ForeignKey("weight_decay", "training.weight_decay", float, 0.0),
        ForeignKey("adam_beta1", "training.beta1", float, 0.9),
        ForeignKey("adam_beta2", "training.beta2", float, 0.999),
        ForeignKey("adam_epsilon", "training.epsilon", float, 1e-8),
        ForeignKey("max_grad_norm", "training.clip_norm", float, 1.0),
        ForeignKey("warmup_steps", "training.warmup_steps", int, 0),
        ForeignKey(schedule, value=_schedule),
        ForeignKey(f"{ARGUMENTS}min_lr", value=_if_schedule("cosine_with_min_lr", lambda t: t.lowest_rate)),
        ForeignKey(f"{ARGUMENTS}lr_end", value=_if_schedule("polynomial", lambda t: t.lowest_rate)),
        ForeignKey(f"{ARGUMENTS}power", value=_if_schedule("polynomial", lambda t: 1.0)),
        ForeignKey(f"{ARGUMENTS}num_decay_steps", value=_if_schedule(SCHEDULES["wsd"], lambda t: t.lr_wsd_decay_steps)),
        ForeignKey(f"{ARGUMENTS}decay_type", value=_if_schedule(SCHEDULES["wsd"], _decay)),
        ForeignKey(
            f"{ARGUMENTS}min_lr_ratio", value=_if_schedule(SCHEDULES["wsd"], lambda t: t.lowest_rate / t.learning_rate)
        ),
        ForeignKey("bf16", value=lambda job: job.training.dtype == "bf16"),
        ForeignKey("fp16", value=lambda job: True if job.training.dtype == "fp16" else None),
        ForeignKey("tf32", value=lambda job: True if job.training.dtype == "tf32" else None),
    )


LIGER = "liger_kernel_config."
LIGER_ROWS = (
    ForeignKey("use_liger_kernel", value=lambda job: True if job.training.cross_entropy == "fused" else None),
    ForeignKey(f"{LIGER}cross_entropy", value=lambda job: True if job.training.cross_entropy == "fused" else None),
    ForeignKey(
        f"{LIGER}fused_linear_cross_entropy", value=lambda job: False if job.training.cross_entropy == "fused" else None
    ),
)
"""Liger's kernels of a Trainer (transformers/integrations/liger.py): by default head and loss together."""


def read_liger(reader: KeyReader, key: str) -> None:
    """Set the loss where `key` turns Liger's kernels on: its cross entropy over whole logits, if that is asked for."""
    if not reader.is_on(key):
        return
    kernels = {name.removeprefix(LIGER) for name in reader.flags if reader.is_on(name)}  # TRL's reader drops tables
    is_whole = "cross_entropy" in kernels and "fused_linear_cross_entropy" not in kernels
    reader.settings["training.cross_entropy"] = "fused" if is_whole else "linear"


def _schedule(job: JobSpec) -> str:
    t = job.training
    if t.lowest_rate > 0:
        return {"cosine": "cosine_with_min_lr", "linear": "polynomial"}.get(t.lr_schedule, SCHEDULES[t.lr_schedule])
    return SCHEDULES[t.lr_schedule]


def _if_schedule(name: str, value: Callable[[TrainingSpec], object]) -> Callable[[JobSpec], object]:
    """The value of a job with this schedule."""
    return lambda job: value(job.training) if _schedule(job) == name else None


def _decay(t: TrainingSpec) -> str | None:
    return DECAYS.get(t.lr_wsd_decay_style)


def hub_id(job: JobSpec) -> str:
    """The model's id on Hugging Face's hub as it was named, else its preset's first, else a word to fill in."""
    if job.model and job.model.hub_id:
        return job.model.hub_id
    return next(iter(_preset_ids(job)), MODEL)


def _preset_ids(job: JobSpec) -> list[str]:
    """The ids of the models that the preset of a model's name stands for."""
    name = model_name(job)
    try:
        file = find_file("models", name) if name else None
        return file.hub_ids() if file else []
    except InputError:  # a file of the user's
        return []


def trainer_refusals(job: JobSpec, who: str, trained: Trained) -> Iterator[Issue]:
    """Issues of settings that no Trainer has. who: the launcher, for messages; trained: what it trains."""
    t = job.training
    if job.model is None:
        yield refused("model", "none", f"{who} loads a model", "name a model (--model NAME)")
    elif job.model.family != "gpt":
        yield refused("model.family", job.model.family, f"{who} tunes decoders here", "use --emit accelerate")
    if t.lr_decay_steps not in (None, t.steps):
        message = "the schedules of transformers end with the last step"
        yield refused("training.lr_decay_steps", t.lr_decay_steps, message, f"use {t.steps}, or leave it out")
    if t.lr_schedule == "wsd" and t.lr_wsd_decay_style not in DECAYS:
        style, message = t.lr_wsd_decay_style, "transformers decays linear, cosine or minus_sqrt"
        yield refused("training.lr_wsd_decay_style", style, message, "use cosine")
    if t.optimizer == "sgd" and t.momentum > 0:
        yield refused("training.momentum", t.momentum, "the Trainer's sgd has none", "use momentum 0")
    yield from _precision_refusals(t, who, trained)


def _precision_refusals(t: TrainingSpec, who: str, trained: Trained) -> Iterator[Issue]:
    dtype, half = trained.dtype, trained.dtype in ("bf16", "fp16")
    if t.adapter and t.adapter.dtype not in (None, dtype):
        message, hint = f"{who} trains A and B in {dtype} here", f"use {dtype}, or leave it out"
        yield refused("training.adapter.dtype", t.adapter.dtype, message, hint)
    if t.gradient_dtype not in (None, dtype) and not trained.has_masters:
        message, hint = f"gradients have the type of what is trained, {dtype}", f"use {dtype}, or leave it out"
        yield refused("training.gradient_dtype", t.gradient_dtype, message, hint)
    if t.master_weights and half and not trained.has_masters:
        message = f"{who} keeps no fp32 copies of {dtype} parameters here"
        yield refused("training.master_weights", "true", message, "use zero 2 or 3, or master_weights false")
    if t.master_weights is False and t.dtype in ("bf16", "fp16") and (trained.has_masters or not half):
        kept = "with fp32 copies" if trained.has_masters else "in fp32"
        yield refused("training.master_weights", "false", f"{who} trains parameters {kept} here", "leave it out")
    if t.optimizer in UNQUANTIZED and t.optimizer_dtype not in (None, trained.states):
        message, hint = f"moments are {trained.states} here", f"use {trained.states}, or leave it out"
        yield refused("training.optimizer_dtype", t.optimizer_dtype, message, hint)


def sharding_refusals(job: JobSpec, who: str) -> Iterator[Issue]:
    """Issues of what FSDP 2 and DeepSpeed under a Trainer do not shard."""
    p, t, stage = job.parallel, job.training, zero_stage(job)
    if p.cp > 1 and not uses_fsdp(job):
        yield refused("parallel.cp", p.cp, f"{who} splits sequences with FSDP 2 alone", "use zero 2 or 3, or cp 1")
    if zero_copies(job) > 1 and uses_deepspeed(job):
        message = f"{who} shards over a part of the ranks with FSDP 2 alone"
        yield refused("parallel.zero_size", p.zero_size, message, "use zero 2 or 3, or leave it out")
    if (t.offload_optimizer or t.offload_parameters) and stage == 0:
        message = f"{who} keeps in host memory what FSDP 2 or DeepSpeed shard"
        key = "offload_optimizer" if t.offload_optimizer else "offload_parameters"
        yield refused(f"training.{key}", "true", message, "use zero 2 or 3 on several ranks, or a paged optimizer")
    if t.adapter and t.adapter.stored_as == "int8" and stage == 3:
        message = "bitsandbytes' 8-bit weights are not sharded"
        yield refused("training.adapter.base_precision", "int8", message, "use nf4, or zero 0 to 2")


def attention_word(job: JobSpec, flash: str = "flash_attention_2", unfused: str = "eager") -> str:
    """The attention's name. FlashAttention 2 needs Ampere, before which NVIDIA's devices have no bf16: sdpa there."""
    if job.model is not None and job.model.attention != "flash":
        return unfused
    device = job.cluster.device
    is_old = device is not None and device.kind == "cuda" and "bf16" not in device.peak_flops
    return "sdpa" if is_old else flash


def _planned_dtype(job: JobSpec) -> Trained | None:
    """What the plan counts: fp32 parameters, or 16 bits with or without fp32 copies; None where that depends on
    other settings."""
    t, profile = job.training, get_profile(job.training.runtime)
    if t.adapter and (profile.adapters.dtype or profile.memory.stored_as(t)) == "fp32":
        return Trained("fp32")
    if t.master_weights is False and t.gradient_dtype == t.optimizer_dtype == t.dtype:
        return Trained(t.chosen_dtype)
    return None


def trainer_notes(job: JobSpec, trained: Trained) -> Iterator[str]:
    """Differences from the plan that every Trainer has."""
    t = job.training
    adapter = t.adapter
    asked = adapter.dtype if adapter else None
    if (
        asked is None
        and t.dtype in ("bf16", "fp16")
        and (adapter or trained.dtype != "fp32")
        and (_planned_dtype(job) != trained)
    ):
        what, masters = ("A and B" if adapter else "parameters"), " with fp32 copies" if trained.has_masters else ""
        values: dict[str, str] = {"training.adapter.dtype": trained.dtype} if adapter else {}
        if trained.dtype in ("bf16", "fp16"):
            values["training.master_weights"] = word(trained.has_masters)
            if not trained.has_masters:
                values |= {"training.gradient_dtype": trained.dtype, "training.optimizer_dtype": trained.dtype}
        yield (
            f"{what} are {trained.dtype}{masters} there, their gradients {trained.dtype}, moments {trained.states}: "
            f"plan them so by {' '.join(f'--set {key}={value}' for key, value in values.items())}"
        )
    if adapter and job.has_experts:
        yield (
            "PEFT's all-linear has the router too, and fuses the experts of some models into one adapter of "
            "twice the rank: name the modules where the plan must be exact (training.adapter.targets)"
        )
    yield f"rows of exactly {job.model.seq_length if job.model else 0} tokens are planned: packing makes them"
    if job.model and job.model.hub_id is None and (ids := _preset_ids(job)):
        others = f" (preset {job.model.name} is also {listed(ids[1:])})" if ids[1:] else ""
        yield f"the model is {ids[0]}, as its preset says{others}: name another by its id, --model OWNER/MODEL"
    yield f"fill in: {DATASET}" + (f", {MODEL}" if hub_id(job) == MODEL else "")


def leave_to_data(reader: KeyReader) -> None:
    """Take out what only the number of samples decides: steps of -1, and a warm-up as a part of them."""
    if reader.value("max_steps") == "-1":
        del reader.flags["max_steps"]
    words = reader.value("warmup_steps")
    if words.startswith("0.") and words.strip("0."):
        del reader.flags["warmup_steps"]
        reader.nearest("warmup_steps", f"{words} of the steps, which the data decides: planned without a warm-up")


def read_trainer(reader: KeyReader, *, optimizer: str, schedule: str, default_schedule: str = "linear") -> None:
    """Set what several keys of a Trainer say: precision, schedule, optimizer."""
    s = reader.settings
    names = [name for name in ("bf16", "fp16") if reader.is_on(name)]
    s["training.dtype"] = names[0] if names else "tf32" if reader.is_on("tf32") else "fp32"
    read_optimizer(reader, optimizer)
    _read_schedule(reader, schedule, default_schedule)


def read_optimizer(reader: KeyReader, key: str) -> None:
    """Set the optimizer by its name, by default AdamW."""
    word = reader.value(key, OPTIMIZERS["adamw"])
    found = {theirs: ours for ours, theirs in OPTIMIZERS.items()} | OTHER_OPTIMIZERS
    if word not in found:
        known = ", ".join((*OPTIMIZERS.values(), *OTHER_OPTIMIZERS))
        reader.wrong(key, f"{word!r} is none of those that a job can say", f"use {known}")
    else:
        reader.settings["training.optimizer"] = found[word]
    if word == "paged_adamw_32bit":
        reader.nearest(key, f"{word}: planned as AdamW whose states stay in device memory")


def _read_schedule(reader: KeyReader, key: str, default: str) -> None:
    s, word = reader.settings, reader.value(key, default)
    words = {theirs: ours for ours, theirs in SCHEDULES.items()}
    words |= {"constant": "constant", "cosine_with_min_lr": "cosine", "polynomial": "linear"}
    if word not in words:
        reader.nearest(key, f"{word}: planned as a constant learning rate, of the same time and memory")
    s["training.lr_schedule"] = words.get(word, "constant")
    rate = s.get("training.learning_rate")
    base = rate if isinstance(rate, float) else 0.0
    lowest = {
        "cosine_with_min_lr": (f"{ARGUMENTS}min_lr", 1.0),
        "polynomial": (f"{ARGUMENTS}lr_end", 1.0),
        SCHEDULES["wsd"]: (f"{ARGUMENTS}min_lr_ratio", base),
    }.get(word)
    if lowest and reader.has(lowest[0]):
        s["training.min_learning_rate"] = min(float(reader.number(lowest[0], float, 0.0)) * lowest[1], base)
    elif word not in ("constant", SCHEDULES["constant"]):
        s["training.min_learning_rate"] = 0.0
    if word == SCHEDULES["wsd"]:
        s["training.lr_wsd_decay_steps"] = int(reader.number(f"{ARGUMENTS}num_decay_steps", int, 1))
        decay = reader.value(f"{ARGUMENTS}decay_type", "cosine")
        s["training.lr_wsd_decay_style"] = {theirs: ours for ours, theirs in DECAYS.items()}.get(decay, "cosine")


def set_trained(settings: Settings, *, is_half: bool, has_masters: bool = False) -> None:
    """Say in a job that was read what its launcher trains, where that is not a plan's default. is_half:
    parameters, or A and B, have 16 bits; has_masters: and fp32 copies."""
    dtype = settings["training.dtype"]
    if dtype not in ("bf16", "fp16"):
        return
    is_half = is_half or has_masters
    if any(name.startswith("training.adapter.") for name in settings):
        settings["training.adapter.dtype"] = dtype if is_half else "fp32"
    if has_masters:
        settings["training.master_weights"] = True
    elif is_half:
        settings |= {"training.master_weights": False, "training.gradient_dtype": dtype}
        if settings.get("training.optimizer") in UNQUANTIZED and dtype == "bf16":
            settings["training.optimizer_dtype"] = dtype


def read_global_batch(reader: KeyReader, typed: Overrides) -> None:
    """The global batch of the Trainer's: micro batch x accumulation steps x dp."""
    s, key = reader.settings, "gradient_accumulation_steps"
    steps = int(reader.number(key, int, 1))
    micro = typed.get("training.micro_batch_size", s.get("training.micro_batch_size"))
    sizes = [typed.get(name, s.get(name)) for name in ("cluster.nodes", "cluster.gpus_per_node")]
    if not isinstance(micro, int) or not all(isinstance(size, int) for size in sizes):
        if steps > 1:
            message = f"{key} {steps} says nothing without the batch and the number of ranks"
            reader.nearest(key, message, "add --global-batch-size N, or --nodes N --gpus-per-node N")
        return
    world = int(str(sizes[0])) * int(str(sizes[1]))
    inner = 1
    for axis in ("tp", "cp", "pp"):
        inner *= int(str(typed.get(f"parallel.{axis}", s.get(f"parallel.{axis}", 1))))
    s["training.global_batch_size"] = micro * steps * max(world // inner, 1)


IGNORED = re.compile(
    r"task_type|use_reentrant|bias none|gradient_checkpointing_kwargs\.use_reentrant|random_state|"
    r"group_by_length false|train_dataset|strict|hf_|type_of_model|model_type|"
    r"template|max_samples|cache_dir|streaming|mix_strategy|mask_history|"
    r"media_dir|swanlab|use_swanlab|use_wandb|use_tensorboard|print_param|val_|tool_format|roles|tokens|loss_watchdog|"
    r"accelerator_config|assistant_only_loss|average_tokens_across_devices|chat_template|"
    r"completion_only_loss|compute_environment|data|ddp_timeout|debug|disable_tqdm|do_eval|do_train|"
    r"downcast_bf16|early_stopping|enable_cpu_affinity|eos_token|eval|full_determinism|greater_is_better|"
    r"hub|include_|label_names|load_best_model_at_end|log|machine_rank|main_process|"
    r"main_training_function|metric_for_best_model|mlflow|model_revision|num_epochs|num_train_epochs|"
    r"output_dir|overwrite_|pad_token|per_device_eval|plot_loss|preprocessing|project|push_to_hub|"
    r"rdzv_backend|remove_unused_columns|report_to|resume_from_checkpoint|run_name|same_network|save|"
    r"shuffle|skip_memory_metrics|special_tokens|test_datasets|tokenizer|tpu_|trackio|train_on|"
    r"truncation_mode|trust_remote_code|use_cpu|val_set_size|wandb|warmup_ratio"
)
"""Beginnings of keys, with their values, that change no plan: of data, checkpoints, evaluation and logging."""


def unread_keys(reader: KeyReader, known: Iterable[str], ignored: re.Pattern[str] = IGNORED) -> list[str]:
    """The keys that may change a plan, with their values; those that do not (`ignored`) are named in a warning."""
    left = [name for name in reader.flags if name not in set(known)]
    apart = [name for name in left if ignored.match(" ".join((name, *reader.flags[name])))]
    if apart:
        hint = "keys for data, checkpoints and logging, which do not change the plan"
        reader.warn("flags", "--from", f"{', '.join(apart)}: ignored", hint)
    return [" ".join((name, *reader.flags[name])) for name in left if name not in apart]


_STAGE = re.compile(r"z(?:ero)?[_-]?([123])(?!\d)")


def read_deepspeed(reader: KeyReader, key: str = "deepspeed") -> bool:
    """Set ZeRO by DeepSpeed's configuration, a table or a file by its usual name; whether there is one."""
    s = reader.settings
    table, file = f"{key}.zero_optimization.", reader.value(key)
    if not file and not any(name.startswith(f"{key}.") for name in reader.flags):
        return False
    if file:
        stage, name = _STAGE.search(file), file.rsplit("/", 1)[-1]
        if stage is None:
            reader.wrong(key, f"{file} is another file, which is not read", "write its table here, or give --zero N")
        else:
            reader.nearest(key, f"{file}: read by its name, as ZeRO {stage[1]}")
        s["parallel.zero"] = int(stage[1]) if stage else 0
        if "offload" in name:
            s["training.offload_optimizer"] = "params" not in name
            s["training.offload_parameters"] = s["parallel.zero"] == 3
        return True
    s["parallel.zero"] = int(reader.number(f"{table}stage", int, 0))
    for part, setting in (("offload_optimizer", "offload_optimizer"), ("offload_param", "offload_parameters")):
        device = reader.value(f"{table}{part}.device", "none")
        if device == "cpu":
            s[f"training.{setting}"] = True
        elif device != "none":
            reader.wrong(f"{table}{part}.device", f"{device}: states on a disk are not planned", "use none or cpu")
    return True


def deepspeed_table(job: JobSpec) -> Tree:
    """DeepSpeed's configuration for a Trainer, which fills in what is `auto`."""
    t, stage = job.training, zero_stage(job)
    zero: dict[str, Value | Tree] = {"stage": stage, "overlap_comm": job.parallel.overlap_gradients}
    if t.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if t.offload_parameters:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    halves = {name: {"enabled": "auto"} for name in ("bf16", "fp16")}
    return {**dict.fromkeys(auto, "auto"), **halves, "zero_optimization": zero}
