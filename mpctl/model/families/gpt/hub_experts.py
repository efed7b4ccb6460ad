"""Decoders with experts of Hugging Face's transformers: their config.json, and their classes.

After the config and modeling files of `transformers` 5.23, and for what these leave out of a
released config (scoring_func, topk_method, moe_layer_freq) the code that DeepSeek released.

| class | router | experts on disk | besides |
|---|---|---|---|
| Mixtral | softmax, weights over their sum | block_sparse_moe.experts.I.w1, w3, w2 | |
| Qwen2-MoE | softmax | mlp.experts.I.gate_proj, up_proj, down_proj | shared expert with a gate |
| Qwen3-MoE | softmax, over their sum if norm_topk_prob | the same | norms of each head |
| OLMoE | the same | the same | norms over all heads |
| DeepSeek-V2 | softmax, the best in a group | the same | shared experts, latent attention |
| DeepSeek-V3 | sigmoid and bias, the best two in a group | the same | as DeepSeek-V2 |

A gpt-oss (experts with biases, heads with sinks) is read and planned; its weights are not.
DeepSeek stores the rows of rotary columns as neighbouring pairs, ours are halves: of 4 rows, theirs
0, 1, 2, 3 are ours 0, 2, 1, 3. Layers of multi-token prediction, which follow the last layer in
DeepSeek-V3's files, are no part of the class and are not read.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from mpctl.model.families.gpt.hub_dense import GATES, LLAMA, LLAMA_SHAPE, llama_config
from mpctl.model.families.scheme import Inexpressible
from mpctl.spec.hf import ConfigReader, Found, Raw, flag, is_number, rotary, window
from mpctl.spec.model import ModelSpec
from mpctl.spec.yarn import scale_of, score_scale

# What every reader refuses: noise and dropped tokens depend on how ranks share a batch.
DROPLESS: Raw = {
    "router_jitter_noise": 0.0,
    "expert_capacity": None,
    "capacity_factor": None,
    "moe_capacity_factor": None,
    "drop_tokens": False,
}
COUNTS: dict[str, tuple[str, ...]] = {
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok",),
}
NARROW: dict[str, tuple[str, ...]] = {**COUNTS, "expert_ffn": ("moe_intermediate_size",)}
QWEN_NAMES: dict[str, tuple[str, ...]] = {
    **NARROW,
    "shared_expert_ffn": ("shared_expert_intermediate_size",),
    "router_renormalize": ("norm_topk_prob",),
}
RENORMALIZED: dict[str, tuple[str, ...]] = {**COUNTS, "router_renormalize": ("norm_topk_prob",)}


def _read_keys(names: dict[str, tuple[str, ...]], *others: str) -> tuple[str, ...]:
    return (*(name for key in names.values() for name in key), *others)


def _sparse_layers(config: Raw) -> Found:
    """Read the layers with experts: the last of every decoder_sparse_step, except those in
    mlp_only_layers, which must come first."""
    every, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    layers = config.get("num_hidden_layers")
    if not _is_count(every):
        yield f"decoder_sparse_step is {every!r:.40}, which is no number above 0"
        return
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        yield f"mlp_only_layers is {dense!r:.40}, which is no list of layers"
        return
    yield "moe_layer_every", every
    if layers is None or not _is_count(layers):
        return  # another message says so
    sparse = [layer for layer in range(layers) if (layer + 1) % every == 0]
    named = [layer for layer in sparse if layer in dense]
    if named != sparse[: len(named)]:
        yield f"mlp_only_layers {dense!r:.40} cannot be expressed, only the first layers"
    elif named:
        yield "dense_layers", named[-1] + 1


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _mixtral_window(config: Raw) -> Found:
    yield from window(config, config.get("sliding_window"))


def _qwen2_bias(config: Raw) -> Found:
    yield "bias", "qkv" if flag(config, "qkv_bias", True) else False


def _qwen3(config: Raw) -> Found:
    yield "bias", "attention" if flag(config, "attention_bias", False) else False
    if flag(config, "use_sliding_window", False):
        yield from window(config, config.get("sliding_window", 4096))


def _attention_bias(config: Raw) -> Found:
    yield "bias", "attention" if flag(config, "attention_bias", False) else False


def _gpt_oss(config: Raw) -> Found:
    """Every second layer has a window, from the first on; gate and up are clipped."""
    layers = config.get("num_hidden_layers")
    if "layer_types" not in config and _is_count(layers):
        kinds = ("sliding_attention", "full_attention")
        config = {**config, "layer_types": [kinds[n % 2] for n in range(layers or 0)]}
    yield from window(config, config.get("sliding_window", 128))
    limit = config.get("swiglu_limit", 7.0)
    if is_number(limit):
        yield "activation_limit", float(limit)
    else:
        yield f"swiglu_limit is {limit!r:.40}, which is no number"


def _latent(config: Raw) -> Found:
    """A null q_lora_rank is none; the scale of scores is that of yarn (DeepSeek-V2, `mscale`)."""
    if "q_lora_rank" in config:
        yield "q_lora_rank", config["q_lora_rank"]
    table = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(table, dict) or not (mscale := table.get("mscale_all_dim")):
        return
    factor = table.get("factor")
    sizes = [config.get("qk_nope_head_dim", 128), config.get("qk_rope_head_dim", 64)]
    if is_number(factor) and all(map(is_number, (mscale, *sizes))):  # other messages say so
        yield "attention_scale", score_scale(sum(sizes), factor, mscale)


def _mscale(model: ModelSpec) -> float | None:
    """The mscale_all_dim that gives the model's attention_scale, 0 without one; None where no
    YaRN gives it."""
    scale, yarn = model.attention_scale, model.yarn_scaling
    if scale is None:
        return 0.0
    if yarn is None or yarn.factor <= 1:
        return None
    magnitude = math.sqrt(scale * model.qk_size**0.5)
    mscale = scale_of(yarn.factor, magnitude)
    return mscale if score_scale(model.qk_size, yarn.factor, mscale) == scale else None


def _shared(config: Raw) -> Found:
    """n_shared_experts of the width of an expert are one MLP of their widths together."""
    number = config.get("n_shared_experts", 2 if config["model_type"] == "deepseek_v2" else 1)
    width = config.get("moe_intermediate_size", SHAPES[config["model_type"]]["expert_ffn"])
    if is_number(number or 0) and is_number(width):
        yield "shared_expert_ffn", (number or 0) * width
    else:
        yield f"n_shared_experts is {number!r:.40}, which is no number"


def _v2_groups(config: Raw) -> Found:
    method = config.get("topk_method") or "greedy"
    if method == "greedy":
        return
    if method != "group_limited_greedy":
        yield f"topk_method is {method!r:.40}, which is none of greedy, group_limited_greedy"
        return
    yield from _groups(config)


def _groups(config: Raw) -> Found:
    for ours, theirs in (("router_groups", "n_group"), ("router_groups_per_token", "topk_group")):
        if config.get(theirs) is None:
            yield f"{theirs} is missing: of how many groups of experts a token chooses"
        else:
            yield ours, config[theirs]


def _v3_groups(config: Raw) -> Found:
    yield from _groups({"n_group": 8, "topk_group": 4, **config})


def _chosen(config: Raw) -> Found:
    if config.get("num_experts_per_tok") is None:
        yield "num_experts_per_tok is missing: how many experts a token passes"


LATENT_NAMES: dict[str, tuple[str, ...]] = {
    **NARROW,
    "head_dim": (),  # theirs is qk_rope_head_dim
    "dense_layers": ("first_k_dense_replace",),
    "router_scale": ("routed_scaling_factor",),
    "router_renormalize": ("norm_topk_prob",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_nope_head_dim": ("qk_nope_head_dim",),
    "qk_rope_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
}
LATENT_KEYS = _read_keys(LATENT_NAMES, "q_lora_rank", "n_shared_experts", "n_group", "topk_group", "moe_layer_freq")
LATENT_SHAPE: Raw = {
    **LLAMA_SHAPE,
    "attention_kind": "mla",
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
# Keys that transformers' classes do not have and released configs do: one value is read.
LATENT_FIXED: Raw = {**DROPLESS, "attention_bias": False, "moe_layer_freq": 1, "rope_interleave": True}
V3_SHAPE: Raw = {
    **LATENT_SHAPE,
    "experts": 256,
    "experts_per_token": 8,
    "expert_ffn": 2048,
    "dense_layers": 3,
    "router_score": "sigmoid",
    "router_bias": True,
    "router_scale": 2.5,
}
SHAPES: dict[str, Raw] = {
    "mixtral": {**LLAMA_SHAPE, "norm_epsilon": 1e-5, "rotary_base": 1e6, "experts": 8, "experts_per_token": 2},
    "qwen2_moe": {
        **LLAMA_SHAPE,
        "experts": 60,
        "experts_per_token": 4,
        "expert_ffn": 1408,
        "shared_expert_ffn": 5632,
        "shared_expert_gate": True,
        "router_renormalize": False,
    },
    "qwen3_moe": {
        **LLAMA_SHAPE,
        "qk_norm": True,
        "experts": 128,
        "experts_per_token": 8,
        "expert_ffn": 768,
        "router_renormalize": False,
    },
    "olmoe": {
        **LLAMA_SHAPE,
        "norm_epsilon": 1e-5,
        "qk_norm": "width",
        "experts": 64,
        "experts_per_token": 8,
        "router_renormalize": False,
    },
    "gpt_oss": {
        **LLAMA_SHAPE,
        "norm_epsilon": 1e-5,
        "rotary_base": 150000.0,
        "head_dim": 64,
        "bias": "attention",
        "experts": 128,
        "experts_per_token": 4,
        "expert_bias": True,
        "attention_sinks": True,
    },
    "deepseek_v2": {**LATENT_SHAPE, "experts": 64, "expert_ffn": 1407, "router_renormalize": False},
    "deepseek_v3": V3_SHAPE,
    "kimi_k2": V3_SHAPE,
}
V3 = ConfigReader(
    shape=V3_SHAPE,
    names=LATENT_NAMES,
    gated=True,
    parts=(rotary, _latent, _shared, _v3_groups),
    experts=LATENT_KEYS,
    fixed={**LATENT_FIXED, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
)
READERS: dict[str, ConfigReader] = {
    "mixtral": ConfigReader(
        shape=SHAPES["mixtral"],
        names=COUNTS,
        gated=True,
        parts=(rotary, _mixtral_window),
        experts=_read_keys(COUNTS),
        fixed=DROPLESS,
    ),
    "qwen2_moe": ConfigReader(
        shape=SHAPES["qwen2_moe"],
        names=QWEN_NAMES,
        gated=True,
        parts=(rotary, _qwen2_bias, _sparse_layers),
        experts=_read_keys(QWEN_NAMES),
        fixed={**DROPLESS, "use_sliding_window": False},
    ),
    "qwen3_moe": ConfigReader(
        shape=SHAPES["qwen3_moe"],
        names=QWEN_NAMES,
        gated=True,
        parts=(rotary, _qwen3, _sparse_layers),
        experts=_read_keys(QWEN_NAMES),
        fixed=DROPLESS,
    ),
    "olmoe": ConfigReader(
        shape=SHAPES["olmoe"],
        names=RENORMALIZED,
        gated=True,
        parts=(rotary, _attention_bias),
        experts=_read_keys(RENORMALIZED),
        fixed={**DROPLESS, "clip_qkv": None},
    ),
    "deepseek_v2": ConfigReader(
        shape=SHAPES["deepseek_v2"],
        names=LATENT_NAMES,
        gated=True,
        parts=(rotary, _latent, _shared, _v2_groups, _chosen),
        experts=LATENT_KEYS,
        fixed={**LATENT_FIXED, "mlp_bias": False, "norm_topk_prob": False, "scoring_func": "softmax"},
    ),
    "gpt_oss": ConfigReader(
        shape=SHAPES["gpt_oss"],
        names=COUNTS,
        gated=True,
        parts=(rotary, _gpt_oss),
        experts=_read_keys(COUNTS),
        fixed={**DROPLESS, "attention_bias": True, "swiglu_alpha": 1.702},
    ),
    "deepseek_v3": V3,
    "kimi_k2": V3,  # DeepSeek-V3's code under another name
}


# ---------------------------------------------------------------- classes with weights


def _counts(model: ModelSpec) -> Raw:
    return {"num_experts_per_tok": model.experts_per_token}


def mixtral_config(model: ModelSpec) -> Raw:
    """The shape of the model in the keys of MixtralConfig."""
    return {
        **llama_config(model),
        "sliding_window": model.attention_window,
        "num_local_experts": model.experts,
        **_counts(model),
    }


def qwen_moe_config(model: ModelSpec) -> Raw:
    """The shape of the model in the keys of Qwen2MoeConfig and Qwen3MoeConfig, without windows.

    transformers 5 saves Qwen3's num_experts as num_local_experts, older versions read num_experts.
    """
    names = ("num_experts",) if model.shared_expert_ffn else ("num_experts", "num_local_experts")
    return {
        **llama_config(model),
        "use_sliding_window": False,
        "sliding_window": None,
        **dict.fromkeys(names, model.experts),
        **_counts(model),
        "qkv_bias": "qkv" in model.biased,
        "moe_intermediate_size": model.expert_width,
        "shared_expert_intermediate_size": model.shared_expert_ffn,
        "norm_topk_prob": model.router_renormalize,
        "decoder_sparse_step": model.moe_layer_every,
        "mlp_only_layers": list(range(model.dense_layers)),
    }


def olmoe_config(model: ModelSpec) -> Raw:
    """The shape of the model in the keys of OlmoeConfig."""
    return {
        **llama_config(model),
        "num_experts": model.experts,
        **_counts(model),
        "norm_topk_prob": model.router_renormalize,
        "clip_qkv": None,
    }


def deepseek_config(model: ModelSpec) -> Raw:
    """The shape of the model in the keys that DeepseekV2Config and DeepseekV3Config share."""
    shared = llama_config(model)
    if mscale := _mscale(model):
        for name in ("rope_parameters", "rope_scaling"):
            shared[name]["mscale_all_dim"] = mscale
    return {
        **shared,
        "head_dim": model.qk_rope_head_dim,
        "q_lora_rank": model.q_lora_rank,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_nope_head_dim": model.qk_nope_head_dim,
        "qk_rope_head_dim": model.qk_rope_head_dim,
        "v_head_dim": model.v_head_dim,
        "n_routed_experts": model.experts,
        **_counts(model),
        "moe_intermediate_size": model.expert_width,
        "n_shared_experts": model.shared_expert_ffn // model.expert_width,
        "first_k_dense_replace": model.dense_layers,
        "moe_layer_freq": 1,
        "routed_scaling_factor": model.router_scale,
        "norm_topk_prob": model.router_renormalize,
        "n_group": model.router_groups,
        "topk_group": model.router_groups_per_token,
    }


def deepseek_v2_config(model: ModelSpec) -> Raw:
    """The shape of the model in the keys of DeepseekV2Config."""
    method = "greedy" if model.router_groups == 1 else "group_limited_greedy"
    return {**deepseek_config(model), "topk_method": method, "scoring_func": "softmax"}


def deepseek_v3_config(model: ModelSpec) -> Raw:
    """The shape of the model in the keys of DeepseekV3Config, without multi-token prediction."""
    return {
        **deepseek_config(model),
        "num_nextn_predict_layers": 0,
        "rope_interleave": True,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }


def _one_width(model: ModelSpec) -> Inexpressible:
    """Experts are as wide as `intermediate_size` says."""
    if model.expert_width != model.ffn:
        yield "expert_ffn", f"{model.expert_width} is not ffn {model.ffn}"


def _has_shared(model: ModelSpec) -> Inexpressible:
    if not model.shared_expert_ffn:
        yield "shared_expert_ffn", "0: it has a shared expert"


def _latent_limits(model: ModelSpec) -> Inexpressible:
    """Shared experts are as wide as others, and scores are scaled as by YaRN."""
    yield from _has_shared(model)
    if _mscale(model) is None:
        yield "attention_scale", f"{model.attention_scale}, which is not that of a yarn_scaling,"
    if model.shared_expert_ffn % model.expert_width:
        yield ("shared_expert_ffn", (f"{model.shared_expert_ffn} is no multiple of an expert's {model.expert_width}"))


def _softmax(**others: tuple[object, ...]) -> dict[str, tuple[object, ...]]:
    """Return the values that classes with plain routing can express."""
    return {
        "norm": ("rmsnorm",),
        "norm_order": ("pre",),
        "activation": tuple(GATES),
        "bias": (False,),
        "attention_kind": ("mha",),
        "qk_norm": (False,),
        "shared_expert_ffn": (0,),
        "shared_expert_gate": (False,),
        "dense_layers": (0,),
        "moe_layer_every": (1,),
        "router_score": ("softmax",),
        "router_bias": (False,),
        "router_groups": (1,),
        "router_scale": (1.0,),
        **others,
    }


EXPERT = "model.layers.{}.mlp.experts.{}."
MOE_MODULES = {
    "layers.{}.mlp.router": ("model.layers.{}.mlp.gate",),
    "layers.{}.mlp.experts.up": (EXPERT + "gate_proj", EXPERT + "up_proj"),
    "layers.{}.mlp.experts.down": (EXPERT + "down_proj",),
}
BLOCK = "model.layers.{}.block_sparse_moe."
NORMS = {
    "layers.{}.attention.query_norm": ("model.layers.{}.self_attn.q_norm",),
    "layers.{}.attention.key_norm": ("model.layers.{}.self_attn.k_norm",),
}
SHARED = {
    "layers.{}.mlp.shared.up": (
        "model.layers.{}.mlp.shared_experts.gate_proj",
        "model.layers.{}.mlp.shared_experts.up_proj",
    ),
    "layers.{}.mlp.shared.down": ("model.layers.{}.mlp.shared_experts.down_proj",),
}
LATENTS = {
    f"layers.{{}}.attention.{ours}": (f"model.layers.{{}}.self_attn.{theirs}",)
    for ours, theirs in {
        "query": "q_proj",
        "query_down": "q_a_proj",
        "query_latent_norm": "q_a_layernorm",
        "query_up": "q_b_proj",
        "key_value_down": "kv_a_proj_with_mqa",
        "key_value_latent_norm": "kv_a_layernorm",
        "key_value_up": "kv_b_proj",
    }.items()
}


def deepseek_pairs(model: ModelSpec) -> dict[str, tuple[int, int]]:
    """The rows that DeepSeek stores as neighbouring pairs: those behind the columns without
    positions in each head's query, and behind the latent of keys and values."""
    head, nope = model.qk_size, model.qk_nope_head_dim or 0
    latent, rope = model.kv_lora_rank or 0, model.qk_rope_head_dim or 0
    return {
        "layers.{}.attention.query": (head, nope),
        "layers.{}.attention.query_up": (head, nope),
        "layers.{}.attention.key_value_down": (latent + rope, latent),
    }


MIXTRAL = replace(
    LLAMA,
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    config=mixtral_config,
    modules={
        **LLAMA.modules,
        "layers.{}.mlp.router": (BLOCK + "gate",),
        "layers.{}.mlp.experts.up": (BLOCK + "experts.{}.w1", BLOCK + "experts.{}.w3"),
        "layers.{}.mlp.experts.down": (BLOCK + "experts.{}.w2",),
    },
    expressible=_softmax(router_renormalize=(True,)),
    variants=("experts", "attention_window", "yarn_scaling"),
    refuses=_one_width,
)
QWEN2_MOE = replace(
    LLAMA,
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    config=qwen_moe_config,
    modules={
        **LLAMA.modules,
        **MOE_MODULES,
        **{
            ours: tuple(name.replace("shared_experts", "shared_expert") for name in theirs)
            for ours, theirs in SHARED.items()
        },
        "layers.{}.mlp.shared_gate": ("model.layers.{}.mlp.shared_expert_gate",),
    },
    expressible={
        key: values
        for key, values in _softmax(bias=("qkv", False), shared_expert_gate=(True,)).items()
        if key not in ("shared_expert_ffn", "dense_layers", "moe_layer_every")
    },
    variants=("experts", "yarn_scaling"),
    refuses=_has_shared,
)
QWEN3_MOE = replace(
    LLAMA,
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    config=qwen_moe_config,
    modules={**LLAMA.modules, **MOE_MODULES, **NORMS},
    expressible={
        key: values
        for key, values in _softmax(bias=(False, "attention"), qk_norm=(True,)).items()
        if key not in ("dense_layers", "moe_layer_every")
    },
    variants=("experts", "qk_norm", "yarn_scaling"),
)
OLMOE = replace(
    LLAMA,
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    config=olmoe_config,
    modules={**LLAMA.modules, **MOE_MODULES, **NORMS},
    expressible=_softmax(bias=(False, "attention"), qk_norm=("width",)),
    variants=("experts", "qk_norm", "yarn_scaling"),
    refuses=_one_width,
)
LATENT_VALUES: dict[str, tuple[object, ...]] = {
    "norm": ("rmsnorm",),
    "norm_order": ("pre",),
    "activation": tuple(GATES),
    "bias": (False,),
    "attention_kind": ("mla",),
    "shared_expert_gate": (False,),
    "moe_layer_every": (1,),
    # Both latents are normed with 1e-6, whatever rms_norm_eps says.
    "norm_epsilon": (1e-6,),
}
DEEPSEEK_V2 = replace(
    LLAMA,
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    config=deepseek_v2_config,
    modules={**LLAMA.modules, **MOE_MODULES, **SHARED, **LATENTS},
    expressible={
        **LATENT_VALUES,
        "router_score": ("softmax",),
        "router_renormalize": (False,),
        "router_bias": (False,),
    },
    variants=("experts", "attention_kind", "yarn_scaling", "attention_scale"),
    refuses=_latent_limits,
    pairs=deepseek_pairs,
)
DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    model_type="deepseek_v3",
    also_read=("kimi_k2",),
    architecture="DeepseekV3ForCausalLM",
    config=deepseek_v3_config,
    expressible={**LATENT_VALUES, "router_score": ("sigmoid",), "router_bias": (True,)},
    router_bias="model.layers.{}.mlp.gate.e_score_correction_bias",
    predicts_more="num_nextn_predict_layers",
)
CLASSES = (MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, DEEPSEEK_V2, DEEPSEEK_V3)
