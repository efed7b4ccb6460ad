"""Fine-tuning jobs for the launchers over transformers' Trainer, and what their files must keep of one."""

from __future__ import annotations

from typing import Any

from mpctl.plan.planning.plan import Plan, load_plan
from tests.interop.jobs import Settings

BASE: Settings = {
    "model": "llama-3-8b",
    "model.seq_length": 2048,
    "cluster": "dgx-h100",
    "cluster.nodes": 1,
    "cluster.gpus_per_node": 8,
    "training.dtype": "bf16",
    "training.micro_batch_size": 2,
    "training.global_batch_size": 64,
    "training.steps": 500,
    "training.recompute": "full",
    "training.runtime": "trl",
}
LORA: Settings = {"training.adapter.rank": 16, "training.adapter.alpha": 32.0, "parallel.zero": 3}
QLORA: Settings = {**LORA, "training.adapter.kind": "qlora"}
NAMED = ["q_proj", "v_proj"]
JOBS: dict[str, Settings] = {
    "full": {"parallel.zero": 3},
    "full, zero 1": {"parallel.zero": 1},
    "full in fp32": {"parallel.zero": 2, "training.dtype": "fp32", "training.recompute": "none"},
    "lora": LORA,
    "lora alone": {**LORA, "cluster.gpus_per_node": 1, "parallel.zero": 0},
    "lora, replicas": {**LORA, "parallel.zero": 0, "training.adapter.targets": NAMED},
    "lora, head": {**LORA, "training.adapter.modules_to_save": ["lm_head"], "training.adapter.dropout": 0.1},
    "rslora": {**LORA, "training.adapter.rslora": True, "training.adapter.targets": ["attention"]},
    "dora": {**LORA, "training.adapter.kind": "dora"},
    "qlora": {**QLORA, "training.optimizer": "paged-adamw-8bit"},
    "qlora, nested": {**QLORA, "training.adapter.double_quantization": False},
    "8 bits": {**LORA, "parallel.zero": 0, "training.adapter.base_precision": "int8"},
    "8-bit adam": {**LORA, "parallel.zero": 2, "training.optimizer": "adamw-8bit"},
    "on the host": {"parallel.zero": 3, "training.offload_optimizer": True, "training.offload_parameters": True},
    "moments on the host": {"parallel.zero": 2, "training.offload_optimizer": True},
    "two nodes": {**LORA, "cluster.nodes": 2},
    "linear": {"parallel.zero": 3, "training.lr_schedule": "linear", "training.min_learning_rate": 1e-5},
    "linear to 0": {"parallel.zero": 3, "training.lr_schedule": "linear", "training.min_learning_rate": 0.0},
    "constant": {"parallel.zero": 3, "training.lr_schedule": "constant", "training.warmup_steps": 0},
    "wsd": {
        "parallel.zero": 3,
        "training.lr_schedule": "wsd",
        "training.lr_wsd_decay_steps": 50,
        "training.lr_wsd_decay_style": "minus_sqrt",
    },
    "others": {
        "parallel.zero": 2,
        "training.optimizer": "lion",
        "training.weight_decay": 0.0,
        "training.beta2": 0.999,
        "training.clip_norm": 0.5,
        "training.seed": 7,
        "model.attention": "unfused",
    },
}
SHARDED: dict[str, Settings] = {
    "cp": {**LORA, "parallel.cp": 2},
    "hybrid": {**LORA, "cluster.nodes": 2, "parallel.zero_size": 8},
}
"""Layouts of FSDP 2 alone."""
TRAINED = (
    *("micro_batch_size", "global_batch_size", "dtype", "recompute", "steps", "seed", "learning_rate", "lr_schedule"),
    *("lowest_rate", "warmup_steps", "weight_decay", "beta1", "beta2", "epsilon", "clip_norm", "optimizer"),
    *("offload_optimizer", "offload_parameters", "lr_wsd_decay_steps"),
)


def tuned(settings: Settings) -> Plan:
    return load_plan(None, {**BASE, **settings})


def facts(plan: Plan) -> dict[str, Any]:
    """What must come back: layout, batch, training, adapter."""
    job, adapter = plan.job, plan.job.training.adapter
    assert job.model is not None
    found: dict[str, Any] = {axis: job.sizes[axis] for axis in ("tp", "cp", "dp")}
    found |= {key: getattr(job.training, key) for key in TRAINED}
    found["lowest_rate"] = float(f"{found['lowest_rate']:.9g}")  # which wsd says as a part of the rate
    if job.training.lr_schedule == "constant":
        found.pop("lowest_rate")  # which it never reaches
    found |= {"zero": job.parallel.zero, "zero_size": job.parallel.zero_size, "length": job.model.seq_length}
    found |= {"attention": job.model.attention, "layers": job.model.layers}
    if adapter is not None:
        found |= adapter.model_dump(include={"rank", "alpha", "rslora", "dropout", "modules_to_save"})
        found |= {"dora": adapter.kind == "dora", "base": adapter.stored_as}
        groups = {"attention": ["q_proj", "k_proj", "v_proj", "o_proj"]}
        found["targets"] = [name for target in adapter.targets for name in groups.get(target, [target])]
        found["double"] = adapter.double_quantization if adapter.stored_as == "nf4" else None
    return found
