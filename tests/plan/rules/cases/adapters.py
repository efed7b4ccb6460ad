"""Cases of the rules of adapters, of GPT-2's small shape: 12 layers of hidden 768."""

from pathlib import Path
from typing import Any

from tests.plan.rules.cases.case import Case

RUNTIME = str(Path(__file__).parents[3] / "recorded" / "adapters_runtime.toml")
EXPERTS = {"model.experts": 4, "model.experts_per_token": 2, "model.expert_ffn": 64}
OTHER = {"training.runtime": RUNTIME, "cluster.gpus_per_node": 4, "training.global_batch_size": 4}
A, TARGETS = "training.adapter", "training.adapter.targets"


def adapter(**settings: Any) -> dict[str, Any]:
    return {A: {"rank": 8, **settings}}


CASES = (
    Case(
        "adapter-target",
        adapter(targets=["q_proj", "c_proj"]),
        adapter(targets=["q_porj"]),
        TARGETS,
        ("'q_porj' names nothing",),
        r"use 'q_proj', or one of all-linear, attention, mlp, q_proj, k_proj",
    ),
    Case(
        "adapter-target",
        adapter(modules_to_save=["embed_tokens"]),
        adapter(targets=["embed_tokens"]),
        TARGETS,
        ("'embed_tokens'",),
        r"in full by training\.adapter\.modules_to_save",
    ),
    Case(
        "adapter-saved",
        adapter(modules_to_save=["embed_tokens"]),
        adapter(modules_to_save=["score"]),
        "training.adapter.modules_to_save",
        ("'score' names nothing",),
        r"lm_head or embed_tokens",
    ),
    Case(
        "adapter-tied-head",
        {"model.tied_embeddings": False, **adapter(modules_to_save=["lm_head"])},
        {"model.tied_embeddings": True, **adapter(modules_to_save=["lm_head"])},
        "training.adapter.modules_to_save",
        ("'lm_head' is tied",),
        r"save embed_tokens",
    ),
    Case(
        "adapter-target-twice",
        adapter(targets=["q_proj", "k_proj"]),
        adapter(targets=["q_proj", "q_proj"]),
        TARGETS,
        ("'q_proj' is given 2 times",),
        r"once",
    ),
    Case(
        "adapter-target-twice",
        adapter(targets=["attention", "q_proj"]),
        adapter(targets=["c_attn", "q_proj"]),
        TARGETS,
        ("'q_proj' is a part of what 'c_attn' adapts", "attention.qkv"),
        r"leave out 'q_proj' or 'c_attn'",
    ),
    Case(
        "adapter-rank",
        adapter(rank=768),
        adapter(rank=769),
        "training.adapter.rank",
        ("769 is above", "768 x 768"),
        r"at most 768",
    ),
    Case(
        "adapter-dora-experts",
        {**EXPERTS, **adapter(kind="dora", targets="attention")},
        {**EXPERTS, **adapter(kind="dora")},
        "training.adapter.kind",
        ("mlp.experts.down or mlp.experts.up",),
        r"kind lora, or targets attention",
    ),
    Case(
        "adapter-tensor-mode",
        {"parallel.tp": 4, **adapter()},
        {"parallel.tp": 4, "parallel.tensor_mode": "2d", "training.micro_batch_size": 2, **adapter()},
        "parallel.tensor_mode",
        ("2d has no adapters",),
        r"1d",
    ),
    Case(
        "adapter-rank-divides",
        {**OTHER, "parallel.tp": 4, **adapter(rank=12)},
        {**OTHER, "parallel.tp": 4, **adapter(rank=6)},
        "training.adapter.rank",
        ("tp 4 does not divide rank 6", "a trainer of adapters"),
        r"rank 8",
    ),
    Case(
        "adapter-quantized-tensor",
        {**OTHER, "parallel.tp": 1, **adapter(kind="qlora")},
        {**OTHER, "parallel.tp": 2, **adapter(kind="qlora")},
        "parallel.tp",
        ("tp 2", "cannot cut a base in nf4"),
        r"tp 1; or training\.adapter\.base_precision bf16",
    ),
    Case(
        "adapter-unsharded-base",
        {**OTHER, "parallel.zero": 3, **adapter()},
        {**OTHER, "parallel.zero": 3, **adapter(kind="qlora")},
        "parallel.zero",
        ("leaves a base in nf4 whole on every rank",),
        r"base in bf16",
        status="warning",
    ),
    Case(
        "adapter-freeze",
        {"training.freeze": ["*norm*"]},
        {"training.freeze": ["*norm*"], **adapter()},
        "training.freeze",
        ("*norm*", "freezes all parameters but its own"),
        r"leave it out",
    ),
    Case(
        "adapter-qlora-base",
        adapter(kind="qlora", base_precision="int8"),
        adapter(kind="qlora", base_precision="bf16"),
        "training.adapter.base_precision",
        ("bf16 is not quantised",),
        r"fp8, int8, int4-gptq or nf4, or kind lora",
    ),
    Case(
        "adapter-dtype",
        {"training.dtype": "bf16", **adapter(dtype="fp32")},
        {"training.dtype": "bf16", **adapter(dtype="fp8")},
        "training.adapter.dtype",
        ("fp8 is narrower than training.dtype bf16",),
        r"fp32, or leave it out",
    ),
    Case(
        "adapter-fp8-base",
        {"cluster.device": "h100-sxm", "training.dtype": "bf16", **adapter(base_precision="fp8")},
        {"cluster.device": "a100-80gb", "training.dtype": "bf16", **adapter(base_precision="fp8")},
        "training.adapter.base_precision",
        ("has no fp8 rate",),
        r"int8 or nf4",
    ),
)
