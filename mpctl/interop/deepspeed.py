"""DeepSpeed's configuration: a plan as one, with the pipeline's topology where there is one, and one
as a job.

Spelling, meanings and limits: deepspeed 0.19.8, runtime/config.py, runtime/pipe/ and
docs/_pages/config-json.md. With a pipeline: ranks as pipe, data, model (model fastest), ZeRO at most
1, no context parallelism, one chunk a rank. Without one: AutoTP (`tensor_parallel`) or Ulysses
(`sequence_parallel_size`), not both. AutoEP (`expert_parallel`, module_inject/auto_ep.py) deals the
experts of a Hugging Face model to neighbouring ranks, without a pipeline; its router is the model's,
whose biases stay as they are. train_batch_size is micro batch x gradient_accumulation_steps x dp.

What is read is JSON, or Python that names it ds_config. The model is the script's, so that --model
names it. A pipeline is none of the configuration's: it is read from PipeModelDataParallelTopology in
Python, as it is written. MiCS splits states over a part of the ranks; the secondary partition of
ZeRO++ (hpZ), a copy of the parameters alone, is not planned. Values `auto` are those of the program
and left out.

By hand, tp 4, pp 4 and dp 4 with a global batch of 128: 32 accumulation steps of micro batch 1.

>>> read = read_deepspeed('{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, '
...                       '"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}')
>>> read.settings["training.global_batch_size"], read.settings["parallel.zero"]
(64, 2)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from math import log2

from mpctl.core.errors import Issue
from mpctl.interop.config_text import Flags, flat_values, nested, python_calls, read_yaml, unreadable
from mpctl.interop.emitted import ForeignLauncher, plan_notes
from mpctl.interop.limits import LauncherLimits, refused, uneven_refusals
from mpctl.interop.log_formats import BAR, LauncherLog, StepFormat
from mpctl.interop.mapping import NO_SETTINGS, ForeignKey, KeyReader, ReadJob, written
from mpctl.interop.trainer_keys import unread_keys
from mpctl.model.layout.topology import zero_copies, zero_stage
from mpctl.plan.planning.plan import Overrides, Plan
from mpctl.spec.job import JobSpec
from mpctl.spec.runtime import get_profile
from mpctl.spec.training import TrainingSpec

LIMITS = LauncherLimits(
    "DeepSpeed",
    cp_comm=("a2a",),
    chunks=False,
    sequence_parallel=False,
    zero_in_pipeline=(0, 1),
    recompute=("none", "full"),
    offload=True,
    partition=True,
    ep=True,
    zero_size="any",
    host=("offload_optimizer", "offload_parameters"),
    offload_settings=("offload_fraction",),
)
Z, ADAM, SAVED = "zero_optimization.", "optimizer.params.", "activation_checkpointing."
TOPOLOGY, PIPELINE = "PipeModelDataParallelTopology.", "PipelineModule."


def _if_half(value: Callable[[TrainingSpec], object], *dtypes: str) -> Callable[[JobSpec], object]:
    """The value of a job whose dtype is one of these."""
    return lambda job: value(job.training) if job.training.dtype in dtypes else None


def _if_full(key: str) -> Callable[[JobSpec], object]:
    """A setting of what is saved, where layers are recomputed."""
    return lambda job: getattr(job.training, key) if job.training.recompute == "full" else None


def _several(size: int) -> int | None:
    return size if size > 1 else None


DEVICES = {True: "cpu", False: None}
"""Where DeepSpeed keeps states; a job without states in host memory has no key for it."""
ROWS = (
    ForeignKey("train_batch_size", "training.global_batch_size", int),
    ForeignKey("train_micro_batch_size_per_gpu", "training.micro_batch_size", int),
    ForeignKey("gradient_accumulation_steps", value=lambda job: job.num_microbatches),
    ForeignKey("gradient_clipping", "training.clip_norm", float),
    ForeignKey(f"{Z}stage", "parallel.zero", int, 0, value=zero_stage),
    ForeignKey(f"{Z}overlap_comm", "parallel.overlap_gradients", bool),
    ForeignKey(f"{Z}reduce_bucket_size", value=lambda job: job.parallel.bucket_bytes // job.training.reduced_bytes),
    ForeignKey(f"{Z}mics_shard_size", value=lambda job: job.parallel.zero_size if zero_copies(job) > 1 else None),
    ForeignKey(f"{Z}offload_optimizer.device", "training.offload_optimizer", str, None, DEVICES),
    ForeignKey(
        f"{Z}offload_optimizer.ratio",
        "training.offload_fraction",
        float,
        value=lambda job: job.training.offload_fraction if job.training.offload_fraction < 1 else None,
    ),
    ForeignKey(f"{Z}offload_param.device", "training.offload_parameters", str, None, DEVICES),
    ForeignKey("bf16.enabled", value=_if_half(lambda t: True, "bf16")),
    ForeignKey("fp16.enabled", value=_if_half(lambda t: True, "fp16")),
    ForeignKey("fp16.initial_scale_power", value=_if_half(lambda t: int(log2(t.loss_scale)), "fp16")),
    ForeignKey("fp16.loss_scale_window", value=_if_half(lambda t: t.loss_scale_window, "fp16")),
    ForeignKey("fp16.min_loss_scale", value=_if_half(lambda t: t.min_loss_scale, "fp16")),
    ForeignKey("communication_data_type", value=_if_half(lambda t: t.reduced_dtype, "bf16", "fp16")),
    ForeignKey("data_types.grad_accum_dtype", value=_if_half(lambda t: t.reduced_dtype, "bf16", "fp16")),
    ForeignKey("optimizer.type", value="AdamW"),
    ForeignKey(f"{ADAM}lr", "training.learning_rate", float),
    ForeignKey(f"{ADAM}betas", value=lambda job: [job.training.beta1, job.training.beta2]),
    ForeignKey(f"{ADAM}eps", "training.epsilon", float),
    ForeignKey(f"{ADAM}weight_decay", "training.weight_decay", float),
    ForeignKey(
        "tensor_parallel.autotp_size",
        "parallel.tp",
        int,
        value=lambda job: _several(job.parallel.tp) if job.parallel.pp == 1 else None,
    ),
    ForeignKey("sequence_parallel_size", "parallel.cp", int, value=lambda job: _several(job.parallel.cp)),
    ForeignKey("expert_parallel.enabled", value=lambda job: job.parallel.ep > 1 or None),
    ForeignKey("expert_parallel.autoep_size", "parallel.ep", int, value=lambda job: _several(job.parallel.ep)),
    ForeignKey(
        "expert_parallel.expert_tensor_parallel_size",
        value=lambda job: job.parallel.etp if job.parallel.ep > 1 else None,
    ),
    ForeignKey(
        f"{SAVED}partition_activations", "training.partition_activations", bool, value=_if_full("partition_activations")
    ),
    ForeignKey(
        f"{SAVED}cpu_checkpointing", "training.offload_activations", bool, value=_if_full("offload_activations")
    ),
)
PIPELINE_ROWS = (
    ForeignKey(f"{TOPOLOGY}num_pp", "parallel.pp", int),
    ForeignKey(f"{TOPOLOGY}num_mp", "parallel.tp", int),
    ForeignKey(f"{TOPOLOGY}num_dp", "parallel.dp", int, value=lambda job: job.sizes["dp"]),
)
DTYPES = {"fp32": "fp32", "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}
AUTOCAST, CASTS = "torch_autocast.", {**DTYPES, "float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16"}
OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "lion": "lion", "sgd": "sgd"}
MASTERS, STATES = "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"
KNOWN = {
    *(row.key for row in (*ROWS, *PIPELINE_ROWS)),
    *(f"{Z}allgather_bucket_size", f"{Z}stage3_gather_16bit_weights_on_model_save", f"{ADAM}momentum"),
    *(MASTERS, STATES, f"{AUTOCAST}enabled", f"{AUTOCAST}dtype", f"{PIPELINE}activation_checkpoint_interval"),
}
IGNORED = re.compile(
    r"(steps_per_print|wall_clock_breakdown|memory_breakdown|dump_state|dataloader_drop_last|log_level|"
    r"zero_allow_untested_optimizer|zero_force_ds_cpu_optimizer|disable_python_gc|vocabulary_size) |"
    r"(scheduler|tensorboard|wandb|comet|csv_monitor|monitor_config|comms_logger|flops_profiler|checkpoint|timers)\.|"
    r"optimizer\.(legacy_fusion|params\.(torch_adam|adam_w_mode|bias_correction)) |activation_checkpointing\.profile |"
    r"fp16\.(loss_scale|hysteresis|consecutive_hysteresis) |bf16\.(check_grad_overflow|immediate_grad_update) |"
    r"PipelineModule\.(partition_method type:|activation_checkpoint_func|loss_fn|seed_layers|base_seed)"
)
"""Keys, with their values, of logs, schedules and checkpoints, which change no plan."""
OLDER = re.compile(r"^bfloat16\.")


def _refusals(plan: Plan) -> Iterator[Issue]:
    job, p = plan.job, plan.job.parallel
    yield from LIMITS.refusals(plan)
    if p.cp > 1 and (p.pp > 1 or p.tp > 1):
        other = "a pipeline" if p.pp > 1 else "tp"
        yield refused("parallel.cp", p.cp, f"DeepSpeed has no cp with {other}", "use cp 1")
    elif p.cp > 1 and job.model is not None and job.model.heads % p.cp:
        message = f"DeepSpeed's Ulysses deals {job.model.heads} heads to the ranks"
        yield refused("parallel.cp", p.cp, message, f"use a cp that divides {job.model.heads}")
    if p.tp > 1 and p.pp == 1 and zero_stage(job) == 3:
        yield refused("parallel.zero", 3, "DeepSpeed's AutoTP trains with ZeRO 0 to 2", "use zero 2, or tp 1")
    if zero_copies(job) > 1 and (zero_stage(job) < 3 or p.cp > 1 or p.ep > 1):
        message = "DeepSpeed divides states over a part of the ranks with MiCS: ZeRO 3, dp alone"
        hint = "use zero 3 without cp and ep, leave zero_size out, or --emit torchtitan"
        yield refused("parallel.zero_size", p.zero_size, message, hint)
    if p.ep > 1 and p.pp > 1:
        message = "DeepSpeed deals experts of Hugging Face's models, which have no pipeline there"
        yield refused("parallel.ep", p.ep, message, "use ep 1 or pp 1")
    if job.model is not None and job.model.router_bias:
        yield refused("model.router_bias", "true", "DeepSpeed's AutoEP does not change biases", "use false")
    share = job.training.offload_fraction
    if job.training.offload_optimizer and share < 1 and zero_stage(job) < 3:
        message = "DeepSpeed keeps a share of the states in host memory with ZeRO 3 alone"
        yield refused("training.offload_fraction", share, message, "use zero 3, or offload_fraction 1")
    yield from uneven_refusals(plan, "DeepSpeed cuts stages of equal layers, or by parameters")
    scale = job.training.loss_scale
    if job.training.dtype == "fp16" and not log2(scale).is_integer():
        hint = f"use {2.0 ** round(log2(scale)):.0f}"
        yield refused("training.loss_scale", scale, "DeepSpeed takes a power of 2", hint)


def _notes(plan: Plan) -> Iterator[str]:
    job, p = plan.job, plan.job.parallel
    yield from plan_notes(plan, "DeepSpeed", divisor=0, schedules=("1f1b",))
    if p.pp > 1:
        yield (
            "layers: your model as a list for PipelineModule, its blocks of a class named like "
            "transformer, which are dealt out equally; train with engine.train_batch()"
        )
    if p.pp > 1 and p.tp > 1:
        yield "num_mp makes the groups alone: the layers must split themselves over them"
    if p.pp == 1 and p.tp > 1:
        yield "AutoTP splits a Hugging Face model's layers; others need a partition_config"
    if p.cp > 1 and p.cp_comm != "a2a":
        yield "approximated: Ulysses exchanges heads by all-to-all, where the plan passes keys on"
    if p.ep > 1:
        yield (
            "AutoEP finds the experts of Hugging Face's mixtral, qwen2_moe, qwen3_moe, deepseek_v2 "
            "and deepseek_v3; router, and auxiliary losses if any, are the model's"
        )
    if job.training.recompute == "full" and p.pp == 1:
        yield "recompute full: call deepspeed.checkpointing.checkpoint around each layer"
    nodes = "" if job.cluster.nodes == 1 else "-H HOSTFILE "
    yield f"start it: deepspeed {nodes}--num_gpus {job.cluster.gpus_per_node} SCRIPT"


def _body(plan: Plan) -> str:
    job = plan.job
    lines = ["ds_config = {", *_lines(nested(written(job, ROWS)), "    "), "}"]
    if job.parallel.pp > 1:
        sizes = ", ".join(f"{key.removeprefix(TOPOLOGY)}={size}" for key, size in written(job, PIPELINE_ROWS))
        lines = [
            "from deepspeed.pipe import PipelineModule",
            "from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology",
            "",
            *lines,
            "",
            f"topology = {TOPOLOGY[:-1]}({sizes})",
            "",
            "",
            "def pipeline(layers, loss_fn):",
            "    return PipelineModule(",
            '        layers, topology=topology, loss_fn=loss_fn, partition_method="type:transformer",',
            f"        activation_checkpoint_interval={int(job.training.recompute == 'full')},",
            "    )",
        ]
    return "\n".join(lines)


def _config(plan: Plan) -> str:
    """The configuration as the JSON that --deepspeed_config names; empty with a pipeline, which only code sets up."""
    return "" if plan.job.parallel.pp > 1 else json.dumps(nested(written(plan.job, ROWS)), indent=2)


def _lines(table: Mapping[str, object], indent: str) -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield f"{indent}{json.dumps(key)}: {{"
            yield from _lines(value, f"{indent}    ")
            yield f"{indent}}},"
        else:
            text = json.dumps(value) if isinstance(value, str) else repr(value)
            yield f"{indent}{json.dumps(key)}: {text},"


def read_deepspeed(text: str, typed: Overrides = NO_SETTINGS) -> ReadJob:
    """The job of a configuration. Raises InputError with every value that no setting says."""
    values = {OLDER.sub("bf16.", name): words for name, words in _values(text).items() if words != ("auto",)}
    values = {name: words for name, words in values.items() if words != ("none",) or not name.endswith(".device")}
    if not any(name.startswith(("train_", Z, "bf16", "fp16")) for name in values):
        message = "a configuration of DeepSpeed has train_batch_size or zero_optimization, and this text neither"
        raise unreadable(message, "give its JSON as @FILE")
    reader = KeyReader(values, "deepspeed")
    reader.read((*ROWS, *PIPELINE_ROWS))
    s = reader.settings
    if s.get("parallel.cp", 1) != 1:  # Ulysses
        s["parallel.cp_comm"] = "a2a"
    _read_optimizer(reader)
    _read_precision(reader)
    if (size := int(reader.number(f"{Z}mics_shard_size", int, 0))) > 0:
        s["parallel.zero_size"] = size
    _read_recompute(reader)
    _read_batch(reader)
    off = [name.removesuffix("enabled") for name in values if name.endswith(".enabled") and not reader.is_on(name)]
    for name in [name for name in values if name.startswith(tuple(off)) and name not in KNOWN]:
        del values[name]
    rest = unread_keys(reader, KNOWN, IGNORED)
    return reader.job(_runtime({**s, **typed}), rest)


def _runtime(settings: Overrides) -> str:
    """Megatron-DeepSpeed for what it alone splits, a pipeline, layers and experts, with the ZeRO that it has; else
    transformers' Trainer over DeepSpeed."""
    splits = any(settings.get(f"parallel.{axis}", 1) != 1 for axis in ("pp", "tp", "ep"))
    stage = settings.get("parallel.zero", 0)
    return "megatron-deepspeed" if splits and stage in get_profile("megatron-deepspeed").runs.zero else "deepspeed"


def _values(text: str) -> Flags:
    if "ds_config" not in text:
        return read_yaml(text)
    called, assigned = python_calls(text)
    calls = {name: value for name, value in called.items() if name.startswith((TOPOLOGY, PIPELINE))}
    config = assigned.get("ds_config")
    return flat_values({**(config if isinstance(config, dict) else {}), **calls})


def _read_optimizer(reader: KeyReader) -> None:
    s, key = reader.settings, "optimizer.type"
    word = reader.value(key, "adamw")
    s["training.optimizer"] = OPTIMIZERS.get(word.lower(), "adamw")
    if word.lower() not in OPTIMIZERS:
        reader.nearest(
            key, f"{word}: planned as AdamW, with two moments", "--set training.optimizer=NAME plans another"
        )
    elif s["training.optimizer"] == "sgd":
        s["training.momentum"] = float(reader.number(f"{ADAM}momentum", float, 0.0))


def _read_recompute(reader: KeyReader) -> None:
    """The pipeline recomputes; without one the script calls deepspeed.checkpointing, of which the table tells
    alone."""
    s = reader.settings
    if any(name.startswith(PIPELINE) for name in reader.flags):
        is_full = reader.value(f"{PIPELINE}activation_checkpoint_interval", "0") != "0"
    elif is_full := any(name.startswith(SAVED) for name in reader.flags):
        message = "planned as recompute full, which the script's calls of deepspeed.checkpointing decide"
        reader.nearest(SAVED[:-1], message, "where it has none: --set training.recompute=none")
    if is_full:
        s["training.recompute"] = "full"


def _read_precision(reader: KeyReader) -> None:
    s = reader.settings
    s["training.dtype"] = next((kind for kind in ("bf16", "fp16") if reader.is_on(f"{kind}.enabled")), "fp32")
    if reader.is_on(f"{AUTOCAST}enabled") and s["training.dtype"] == "fp32":
        key = f"{AUTOCAST}dtype"
        word = reader.value(key, "float16").removeprefix("torch.")  # torch's default on GPUs
        if word not in CASTS:
            reader.wrong(key, f"{word!r} is not known", "use bf16 or fp16")
        s["training.dtype"] = CASTS.get(word, "fp32")
        message = f"planned as {CASTS.get(word)} with fp32 copies, of as many bytes as fp32 parameters under autocast"
        reader.nearest(f"{AUTOCAST}enabled", message)
    reduced = reader.value("communication_data_type", reader.value("data_types.grad_accum_dtype"))
    if reduced and reduced not in DTYPES:
        reader.wrong("communication_data_type", f"{reduced!r} is not known", "use fp32 or bf16")
    elif reduced and DTYPES[reduced] != "fp32":
        s["training.gradient_dtype"] = DTYPES[reduced]
    if reader.is_on(MASTERS) and s["training.dtype"] == "bf16":
        _read_narrow(reader)


def _read_narrow(reader: KeyReader) -> None:
    """Gradients in bf16, with moments in bf16 or, in host memory, in fp32."""
    s = reader.settings
    s["training.gradient_dtype"] = "bf16"
    if not reader.is_on(STATES):
        reader.nearest(MASTERS, "its bf16 copies of the parameters are planned in fp32")
        return
    s["training.master_weights"] = False
    if s["training.optimizer"] != "sgd":
        s["training.optimizer_dtype"] = "bf16"
    reader.nearest(MASTERS, "planned without its bf16 copies: 2 bytes a parameter of a rank's share are missing")


def _read_batch(reader: KeyReader) -> None:
    s, key = reader.settings, "gradient_accumulation_steps"
    steps, micro = int(reader.number(key, int, 1)), s.get("training.micro_batch_size")
    if "training.global_batch_size" in s:
        return
    if isinstance(dp := s.get("parallel.dp"), int) and isinstance(micro, int):
        s["training.global_batch_size"] = micro * steps * dp
    elif steps > 1:
        reader.wrong(key, "says nothing of the batch without train_batch_size", "add it")


LOG = LauncherLog(
    "deepspeed",
    "DeepSpeed",
    (
        StepFormat(
            "iter time (s)",
            {"number": ("steps", "step"), "seconds": ("iter time (s)",), "samples_per_second": ("samples/sec",)},
        ),
        StepFormat("CurrSamplesPerSec", {"number": ("global_step",), "samples_per_second": ("CurrSamplesPerSec",)}),
    ),
    beside=("megatron", BAR),
)
"""Lines printed by runtime/pipe/engine.py and by ThroughputTimer in utils/timer.py."""
LAUNCHER = ForeignLauncher(
    "deepspeed",
    "DeepSpeed 0.19",
    "python",
    _refusals,
    _notes,
    _body,
    read_deepspeed,
    LOG,
    given="--deepspeed_config {deepspeed}",
    config=_config,
)
