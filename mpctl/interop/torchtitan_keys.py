"""torchtitan's keys, each with the setting of a job that it says, and its models by flavour.

Names, defaults and meanings: torchtitan 0.3.0, config/configs.py, and 0.2.2, config/job_config.py;
written by torchtitan.py, read by from_torchtitan.py. ParallelismConfig(tensor_parallel_degree=2) of a
config function is parallelism.tensor_parallel_degree = 2 in TOML.

By hand, a pipeline's local batch is all micro batches of a step: 4 of 2 samples are
training.local_batch_size 8.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from mpctl.interop.config_text import Source, Value
from mpctl.interop.limits import dp_degrees
from mpctl.interop.mapping import ForeignKey
from mpctl.model.layout.topology import zero_stage
from mpctl.model.pipeline.placement import StagePlacement
from mpctl.spec.job import JobSpec
from mpctl.spec.load import job_from_raw
from mpctl.spec.model import ModelSpec
from mpctl.spec.presets import preset_files

P, T, RATE, ADAM = "parallelism.", "training.", "lr_scheduler.", "optimizer."
SCHEDULES = {
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "gpipe": "GPipe",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
LOSS_CHUNKS = 8  # ChunkedLossWrapper's
RESHARD = {1: "default", 2: "never", 3: "always"}
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
DECAY_TYPES = {"linear": "linear", "cosine": "cosine", "minus_sqrt": "sqrt"}


def _in_pipeline(value: Callable[[JobSpec], Value]) -> Callable[[JobSpec], Value]:
    """The value of a job with a pipeline."""
    return lambda job: value(job) if job.parallel.pp > 1 else None


def _schedule(job: JobSpec) -> str:
    p = job.parallel
    is_looped = p.vpp > 1 and not StagePlacement.of(p).is_v
    return SCHEDULES.get("interleaved" if is_looped else p.schedule, SCHEDULES["1f1b"])


def _max_norm(job: JobSpec) -> Value:
    return job.training.clip_norm or Source('float("inf")')


def _local_batch(job: JobSpec) -> int:
    return job.training.micro_batch_size * (job.num_microbatches if job.parallel.pp > 1 else 1)


def _decay_ratio(job: JobSpec) -> float | None:
    t = job.training
    if t.lr_schedule == "constant":
        return 0.0
    return (t.lr_wsd_decay_steps or 0) / _last_step(job) if t.lr_schedule == "wsd" else None


def _last_step(job: JobSpec) -> int:
    t = job.training
    return max(t.lr_decay_steps or t.steps, t.warmup_steps)


def _decay_type(job: JobSpec) -> str | None:
    t = job.training
    style = t.lr_wsd_decay_style if t.lr_schedule == "wsd" else t.lr_schedule
    return None if t.lr_schedule == "constant" else DECAY_TYPES[style]


def _least_factor(job: JobSpec) -> float | None:
    t = job.training
    return None if t.lr_schedule == "constant" else float(f"{t.lowest_rate / t.learning_rate:.12g}")


PARALLELISM = (
    ForeignKey(f"{P}tensor_parallel_degree", "parallel.tp", int, 1),
    ForeignKey(f"{P}enable_sequence_parallel", value=lambda job: job.parallel.sequence_parallel),
    ForeignKey(f"{P}context_parallel_degree", "parallel.cp", int, 1),
    ForeignKey(f"{P}data_parallel_shard_degree", value=lambda job: dp_degrees(job)[1]),
    ForeignKey(f"{P}data_parallel_replicate_degree", value=lambda job: dp_degrees(job)[0]),
    ForeignKey(f"{P}fsdp_reshard_after_forward", value=lambda job: RESHARD.get(zero_stage(job))),
    ForeignKey(f"{P}expert_parallel_degree", value=lambda job: job.parallel.ep if job.has_experts else None),
    ForeignKey(f"{P}pipeline_parallel_degree", "parallel.pp", int, 1, value=_in_pipeline(lambda job: job.parallel.pp)),
    ForeignKey(f"{P}pipeline_parallel_schedule", value=_in_pipeline(_schedule)),
    ForeignKey(f"{P}pipeline_parallel_microbatch_size", value=_in_pipeline(lambda job: job.training.micro_batch_size)),
)
TRAINING = (
    ForeignKey(f"{T}local_batch_size", value=_local_batch),
    ForeignKey(f"{T}global_batch_size", value=lambda job: job.training.global_batch_size),
    ForeignKey(f"{T}seq_len", "model.seq_length", int),
    ForeignKey(f"{T}steps", "training.steps", int),
    ForeignKey(f"{T}max_norm", "training.clip_norm", float, value=_max_norm),
    ForeignKey(f"{T}dtype", value="float32"),
    ForeignKey(f"{T}mixed_precision_param", "training.dtype", str, "bfloat16", DTYPES),
    # it captures neither
    ForeignKey(f"{T}disable_cuda_graphs", value=lambda job: job.parallel.pp > 1 or job.parallel.ep > 1 or None),
    ForeignKey("debug.seed", "training.seed", int),
)
OPTIMIZER = (
    ForeignKey(f"{ADAM}lr", "training.learning_rate", float),
    ForeignKey(f"{ADAM}betas", value=lambda job: Source(f"({job.training.beta1}, {job.training.beta2})")),
    ForeignKey(f"{ADAM}eps", value=lambda job: job.training.epsilon),
)
BETAS = (  # of 0.2.2
    ForeignKey(f"{ADAM}beta1", "training.beta1", float),
    ForeignKey(f"{ADAM}beta2", "training.beta2", float),
)
DECAY = ForeignKey(f"{ADAM}weight_decay", "training.weight_decay", float)
RATES = (
    ForeignKey(f"{RATE}warmup_steps", "training.warmup_steps", int),
    ForeignKey(f"{RATE}total_steps", value=_last_step),
    ForeignKey(f"{RATE}decay_ratio", value=_decay_ratio),
    ForeignKey(f"{RATE}decay_type", value=_decay_type),
    ForeignKey(f"{RATE}min_lr_factor", value=_least_factor),
)
ROWS = (*PARALLELISM, *TRAINING, *OPTIMIZER, *BETAS, DECAY, *RATES)


FLAVORS = {
    "llama3 8b": "llama-3-8b",
    "llama3 70b": "llama-3-70b",
    "llama3 405b": "llama-3-405b",
    "deepseek_v3 16b": "deepseek-v2-lite",
    "deepseek_v3 671b": "deepseek-v3",
    "qwen3 30b_a3b": "qwen3-30b-a3b",
    "qwen3 30b-a3b": "qwen3-30b-a3b",
    "qwen3 235b-a22b": "qwen3-235b-a22b",
    "qwen3 0.6b": "qwen3-0.6b",
    "qwen3 1.7b": "qwen3-1.7b",
    "qwen3 4b": "qwen3-4b",
    "qwen3 8b": "qwen3-8b",
    "qwen3 14b": "qwen3-14b",
    "qwen3 32b": "qwen3-32b",
}
"""Presets of models by folder and flavour, in small letters."""
CONFIGS = {
    "llama3 8b": 1e-5,
    "llama3 70b": 1e-5,
    "llama3 405b": 1e-5,
    "deepseek_v3 16b": 1e-5,
    "deepseek_v3 671b": 1e-5,
    "qwen3 30b_a3b": 1e-6,
}
"""The flavours with a config function, each with its norm_epsilon, which is not always its preset's."""
SIZES = ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "qk_norm", "tied_embeddings")
OF_EXPERTS = ("experts", "experts_per_token", "expert_width", "shared_expert_ffn", "dense_layers", "moe_layer_every")
OF_LATENTS = ("attention_kind", "qk_size", "v_size", "q_lora_rank", "kv_lora_rank")
SHAPE = (*SIZES, *OF_EXPERTS, *OF_LATENTS)
"""Settings that a flavour fixes."""


def find_flavor(model: ModelSpec | None) -> tuple[str, str] | None:
    """The folder and the flavour of a model, if they have a config function: `llama3`, `8b`."""
    if model is None:
        return None
    has_ffn = model.dense_layers or model.experts is None
    shape = [key for key in SHAPE if key != "ffn" or has_ffn]
    for flavor, norm_epsilon in CONFIGS.items():
        known = _model_of(FLAVORS[flavor])
        is_same = known is not None and all(getattr(model, key) == getattr(known, key) for key in shape)
        if is_same and model.norm_epsilon == norm_epsilon:
            folder, name = flavor.split()
            return folder, name
    return None


@cache
def _model_of(preset: str) -> ModelSpec | None:
    """The model of a bundled preset; None where a user's file has its name."""
    return job_from_raw({}, {"model": preset}).model if preset_files("models")[preset].is_bundled else None
