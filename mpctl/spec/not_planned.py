"""Models that are not planned yet are known by their keys, whichever software names them.

Mixtures of experts and multi-head latent attention are answered in words, once for all their keys,
in a job as in a config.json: never as misspelt keys, never as the dense model of the other keys.
By hand: `model.num_experts = 8` in a job, and `"num_local_experts": 8` in a config.json of
model_type llama, are both the issue not-planned, "mixtures of experts are not planned yet".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mpctl.errors import Issue

EXPERTS, LATENT = "mixtures of experts", "multi-head latent attention (MLA)"
EXPERT_KEYS = ("ep", "etp", "dense_layers", "n_group", "topk_group", "first_k_dense_replace")
LATENT_KEYS = (
    "attention_kind", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim", "mla", "use_mla", "multi_latent_attention",
)  # fmt: skip
# Classes of transformers that are so whatever their config.json says: its keys may be defaults.
EXPERT_TYPES = (
    "mixtral", "gpt_oss", "dbrx", "jamba", "llama4", "llama4_text", "switch_transformers",
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "minimax",
)  # fmt: skip
LATENT_TYPES = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "minicpm3")


def kind_of_key(key: str) -> str | None:
    """EXPERTS or LATENT where a key with this name says that a model is so; else None."""
    name = key.lower().replace("-", "_")
    if name in LATENT_KEYS:
        return LATENT
    return EXPERTS if name in EXPERT_KEYS or "expert" in name or name.startswith("moe") else None


def not_planned(kinds: Sequence[str], names: Sequence[str], where: str, hint: str) -> Issue:
    """One issue for all the keys or classes `names`, which say of these kinds."""
    kinds = list(dict.fromkeys(kinds))
    verb = "is" if kinds == [LATENT] else "are"
    message = f"{' and '.join(kinds)} {verb} not planned yet: {', '.join(names)}"
    return Issue("not-planned", where, message, hint)


def said_by_config(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Kind and name of what in a config.json says that its model is not planned: the class, or
    keys; a count of 0 or 1, null and false say nothing."""
    model_type = config.get("model_type")
    if isinstance(model_type, str):
        if model_type in EXPERT_TYPES or "moe" in model_type:
            yield EXPERTS, f"model_type {model_type}"
        if model_type in LATENT_TYPES:
            yield LATENT, f"model_type {model_type}"
    for key, value in config.items():
        kind = kind_of_key(key)
        is_many = isinstance(value, int | float) and not isinstance(value, bool) and value > 1
        if kind and (is_many or (value and isinstance(value, list | dict))):
            yield kind, key
