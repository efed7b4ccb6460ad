"""A plan as DeepSpeed's configuration, with the pipeline's topology where there is one.

Spelling and limits: deepspeed 0.19.8, runtime/config.py, runtime/pipe/. With a pipeline: ranks as
pipe, data, model (model fastest), ZeRO at most 1, no context parallelism, one chunk a rank. Without
one: AutoTP (`tensor_parallel`) or Ulysses (`sequence_parallel_size`), not both.
train_batch_size = micro batch x gradient_accumulation_steps x dp.
AutoEP (`expert_parallel`, module_inject/auto_ep.py) deals the experts of a Hugging Face model to
neighbouring ranks, without a pipeline; its router is the model's, whose biases stay as they are.

By hand, tp 4, pp 4 and dp 4 with a global batch of 128: 32 accumulation steps of micro batch 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import log2

from mpctl.core.errors import Issue
from mpctl.interop.emitted import EmitTarget, plan_notes
from mpctl.interop.limits import LauncherLimits, refused, uneven_refusals
from mpctl.model.layout.topology import zero_copies, zero_stage
from mpctl.plan.planning.plan import Plan
from mpctl.spec.job import JobSpec

LIMITS = LauncherLimits(
    "DeepSpeed",
    chunks=False,
    sequence_parallel=False,
    zero_in_pipeline=(0, 1),
    recompute=("none", "full"),
    offload=True,
    partition=True,
    ep=True,
    zero_size="any",
)
Config = dict[str, object]


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
        message = "DeepSpeed's AutoTP trains with ZeRO 0 to 2"
        yield refused("parallel.zero", 3, message, "use zero 2, or tp 1")
    if zero_copies(job) > 1 and (zero_stage(job) < 3 or p.cp > 1 or p.ep > 1):
        message = "DeepSpeed divides states over a part of the ranks with MiCS: ZeRO 3, dp alone"
        hint = "use zero 3 without cp and ep, leave zero_size out, or --emit torchtitan"
        yield refused("parallel.zero_size", p.zero_size, message, hint)
    yield from _expert_refusals(job)
    yield from uneven_refusals(plan, "DeepSpeed cuts stages of equal layers, or by parameters")
    scale = job.training.loss_scale
    if job.training.dtype == "fp16" and not log2(scale).is_integer():
        message = "DeepSpeed takes a power of 2"
        hint = f"use {2.0 ** round(log2(scale)):.0f}"
        yield refused("training.loss_scale", scale, message, hint)


def _expert_refusals(job: JobSpec) -> Iterator[Issue]:
    p, model = job.parallel, job.model
    if p.ep > 1 and p.pp > 1:
        message = "DeepSpeed deals experts of Hugging Face's models, which have no pipeline there"
        yield refused("parallel.ep", p.ep, message, "use ep 1 or pp 1")
    if model is not None and model.router_bias:
        message = "DeepSpeed's AutoEP does not change biases"
        yield refused("model.router_bias", "true", message, "use false")


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
    if p.cp > 1:
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
    lines = ["ds_config = {", *_lines(_config(plan.job), "    "), "}"]
    p, sizes = plan.job.parallel, plan.job.sizes
    if p.pp > 1:
        interval = int(plan.job.training.recompute == "full")
        lines = [
            "from deepspeed.pipe import PipelineModule",
            "from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology",
            "",
            *lines,
            "",
            f"topology = PipeModelDataParallelTopology(num_pp={p.pp}, num_mp={p.tp}, num_dp={sizes['dp']})",
            "",
            "",
            "def pipeline(layers, loss_fn):",
            "    return PipelineModule(",
            '        layers, topology=topology, loss_fn=loss_fn, partition_method="type:transformer",',
            f"        activation_checkpoint_interval={interval},",
            "    )",
        ]
    return "\n".join(lines)


def _lines(table: Mapping[str, object], indent: str) -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield f"{indent}{json.dumps(key)}: {{"
            yield from _lines(value, f"{indent}    ")
            yield f"{indent}}},"
        else:
            text = json.dumps(value) if isinstance(value, str) else repr(value)
            yield f"{indent}{json.dumps(key)}: {text},"


def _config(job: JobSpec) -> Config:
    t, p = job.training, job.parallel
    config: Config = {
        "train_batch_size": t.global_batch_size,
        "train_micro_batch_size_per_gpu": t.micro_batch_size,
        "gradient_accumulation_steps": job.num_microbatches,
        "gradient_clipping": t.clip_norm,
        "zero_optimization": _zero(job),
        **_precision(job),
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": t.learning_rate,
                "betas": [t.beta1, t.beta2],
                "eps": t.epsilon,
                "weight_decay": t.weight_decay,
            },
        },
    }
    if p.pp == 1 and p.tp > 1:
        config["tensor_parallel"] = {"autotp_size": p.tp}
    if p.cp > 1:
        config["sequence_parallel_size"] = p.cp
    if p.ep > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": p.ep, "expert_tensor_parallel_size": p.etp}
    if t.recompute == "full":
        config["activation_checkpointing"] = {
            "partition_activations": t.partition_activations,
            "cpu_checkpointing": t.offload_activations,
        }
    return config


def _zero(job: JobSpec) -> Config:
    size = job.training.reduced_bytes
    mics: Config = {"mics_shard_size": job.parallel.zero_size} if zero_copies(job) > 1 else {}
    return {
        "stage": zero_stage(job),
        "overlap_comm": job.parallel.overlap_gradients,
        "reduce_bucket_size": job.parallel.bucket_bytes // size,
        **mics,
    }


def _precision(job: JobSpec) -> Config:
    t = job.training
    types: Config = {"communication_data_type": t.reduced_dtype, "data_types": {"grad_accum_dtype": t.reduced_dtype}}
    if t.dtype == "bf16":
        return {"bf16": {"enabled": True}, **types}
    if t.dtype == "fp16":
        scale = {
            "enabled": True,
            "initial_scale_power": int(log2(t.loss_scale)),
            "loss_scale_window": t.loss_scale_window,
            "min_loss_scale": t.min_loss_scale,
        }
        return {"fp16": scale, **types}
    return {}


TARGET = EmitTarget("deepspeed", "DeepSpeed 0.19", "python", _refusals, _notes, _body)
