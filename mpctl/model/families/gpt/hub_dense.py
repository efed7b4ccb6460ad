"""Decoders of Hugging Face's transformers: their config.json, and the classes that hold weights.

A row for each `model_type`, after the config and modeling files of `transformers` 5.23. What a row
does not name is as in ModelSpec. A qwen2 is a llama whose q, k and v alone have biases;
a gpt_neox's attention and MLP both read the layer's input, and it turns a quarter of each head.

GPT2LMHeadModel. Its linear layers are Conv1D, stored [in, out]; c_attn holds q, k and v as
thirds of the columns, which transposed is our fused [q | k | v] (modeling_gpt2.py of transformers).
LlamaForCausalLM and its kin have q, k and v apart, gate and up apart (modeling_llama.py). A Mistral
has windows in all layers, a Qwen2 biases of q, k and v alone, a Qwen3 norms of each head's queries
and keys.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from mpctl.model.families.scheme import CAUSAL_ROLES, ENDS, HEAD, TIED_HEAD, Scheme, plain_activation
from mpctl.spec.hf import ConfigReader, Found, Raw, flag, is_number, rotary, window
from mpctl.spec.model import ModelSpec

MISTRAL_WINDOW = 4096  # sliding_window of MistralConfig and of Gemma's where a config does not say
BIAS_NAMES = ("attention_bias", "mlp_bias")
LLAMA_SHAPE: Raw = {
    "family": "gpt",
    "activation": "swiglu",
    "norm": "rmsnorm",
    "position": "rotary",
    "bias": False,
    "tied_embeddings": False,
    "norm_epsilon": 1e-6,
}
GEMMA: Raw = {**LLAMA_SHAPE, "activation": "geglu_tanh", "tied_embeddings": True, "head_dim": 256}
ROTARY_LAYERNORM: Raw = {"family": "gpt", "position": "rotary", "bias": True, "tied_embeddings": False}


def _biases(config: Raw, *, mlp: bool | None = None, default: bool = False) -> Found:
    """Read the linear layers with biases. mlp: whether the MLP has them, if no key of the class says so."""
    attention, other = (flag(config, name, default) for name in BIAS_NAMES)
    other = other if mlp is None else mlp
    named = {(True, False): "attention", (False, True): "mlp"}
    yield "bias", named.get((attention, other), attention)


def _mistral_window(config: Raw) -> Found:
    yield from window(config, config.get("sliding_window", MISTRAL_WINDOW))


def _phi3_window(config: Raw) -> Found:
    yield from window(config, config.get("sliding_window"))


def _qwen_window(config: Raw) -> Found:
    """Windows stand in the layers from number max_window_layers on, where they are used at all."""
    if not flag(config, "use_sliding_window", False):
        return
    first, layers = config.get("max_window_layers", 28), config.get("num_hidden_layers")
    if "layer_types" not in config and first != 0:
        if is_number(first) and is_number(layers) and first >= layers:
            return
        yield f"max_window_layers {first!r:.40} cannot be expressed, only 0"
        return
    yield from window(config, config.get("sliding_window", MISTRAL_WINDOW))


def _gemma(config: Raw) -> Found:
    """Embeddings are multiplied by the root of hidden."""
    hidden = config.get("hidden_size", 3072)
    if is_number(hidden) and hidden > 0:
        yield "embedding_multiplier", float(hidden**0.5)


def _gemma2(config: Raw) -> Found:
    yield from _gemma(config)
    yield from window(config, config.get("sliding_window", MISTRAL_WINDOW), full_every=2)
    yield from _scores(config, attention=50.0, logits=30.0)


def _gemma3(config: Raw) -> Found:
    """Layers with a window have a base of rotary positions of their own."""
    pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", 6))
    if not is_number(pattern) or pattern < 1:
        yield f"sliding_window_pattern is {pattern!r:.40}, which is no number above 0"
        return
    yield from _gemma(config)
    yield from window(config, config.get("sliding_window", MISTRAL_WINDOW), full_every=int(pattern))
    yield from _scores(config, attention=None, logits=None)
    tables = config.get("rope_parameters")
    tables = tables if isinstance(tables, dict) else {}
    local, whole = (tables.get(f"{kind}_attention", {}) for kind in ("sliding", "full"))
    if not isinstance(local, dict) or not isinstance(whole, dict):
        yield "rope_parameters has no tables for both kinds of attention"
        return
    base = local.get("rope_theta", config.get("rope_local_base_freq", 10000.0))
    yield "window_rotary_base", base
    base = whole.get("rope_theta", config.get("rope_theta", 1e6))
    scaling = whole or config.get("rope_scaling") or {}
    yield from rotary({"rope_parameters": scaling, "rope_theta": base})


def _scores(config: Raw, *, attention: float | None, logits: float | None) -> Found:
    """Bounds of scores and logits, and the scale of the scores where it is not the head's."""
    for ours, theirs, default in (
        ("attention_softcap", "attn_logit_softcapping", attention),
        ("logit_softcap", "final_logit_softcapping", logits),
    ):
        value = config.get(theirs, default)
        if value is not None and not is_number(value):
            yield f"{theirs} is {value!r:.40}, which is no number"
        elif value is not None:
            yield ours, float(value)
    scalar, head = config.get("query_pre_attn_scalar", 256), config.get("head_dim", 256)
    if not is_number(scalar) or scalar <= 0:
        yield f"query_pre_attn_scalar is {scalar!r:.40}, which is no number above 0"
    elif scalar != head:
        yield "attention_scale", float(scalar**-0.5)


def _phi(config: Raw) -> Found:
    yield "qk_norm", flag(config, "qk_layernorm", False)


def _neox(config: Raw) -> Found:
    yield "parallel_residual", flag(config, "use_parallel_residual", True)


def _falcon(config: Raw) -> Found:
    """Falcon 7B has one norm a layer and one head of keys and values, 40B two norms and groups."""
    is_new = flag(config, "new_decoder_architecture", False)
    is_parallel = is_new or flag(config, "parallel_attn", True)
    norms = config.get("num_ln_in_parallel_attn")
    yield "bias", flag(config, "bias", False)
    yield "parallel_residual", is_parallel
    yield "shared_norm", is_parallel and (not is_new or norms == 1)
    heads = config.get("num_attention_heads", config.get("n_head"))
    grouped = config.get("num_kv_heads") or heads
    is_single = flag(config, "multi_query", True) and not is_new
    kv_heads = 1 if is_single else grouped if is_new else heads
    if is_number(kv_heads):
        yield "kv_heads", kv_heads


LLAMA_PARTS = (_biases, rotary)
NO_BIAS_PARTS = (rotary,)
GEMMA_BIAS = partial(_biases, mlp=False)
READERS: dict[str, ConfigReader] = {
    "gpt2": ConfigReader(
        shape={"family": "gpt", "activation": "gelu_tanh", "tied_embeddings": True},
        fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    ),
    "llama": ConfigReader(shape=LLAMA_SHAPE, gated=True, parts=LLAMA_PARTS),
    "mistral": ConfigReader(shape=LLAMA_SHAPE, gated=True, parts=(*LLAMA_PARTS, _mistral_window)),
    "qwen2": ConfigReader(shape={**LLAMA_SHAPE, "bias": "qkv"}, gated=True, parts=(rotary, _qwen_window)),
    "qwen3": ConfigReader(
        shape={**LLAMA_SHAPE, "qk_norm": True, "head_dim": 128},
        gated=True,
        parts=(partial(_biases, mlp=False), rotary, _qwen_window),
    ),
    "gemma": ConfigReader(
        shape=GEMMA, gated=True, parts=(GEMMA_BIAS, rotary, _gemma), fixed={"use_bidirectional_attention": False}
    ),
    "gemma2": ConfigReader(
        shape={**GEMMA, "norm_order": "sandwich"},
        gated=True,
        parts=(GEMMA_BIAS, rotary, _gemma2),
        fixed={"use_bidirectional_attention": False},
    ),
    "gemma3_text": ConfigReader(
        shape={
            **GEMMA,
            "norm_order": "sandwich",
            "qk_norm": True,
            "heads": 8,
            "kv_heads": 4,
            "vocab": 262208,
            "seq_length": 131072,
        },
        gated=True,
        parts=(GEMMA_BIAS, _gemma3),
        fixed={"use_bidirectional_attention": False},
    ),
    "phi": ConfigReader(
        shape={
            **ROTARY_LAYERNORM,
            "activation": "gelu_tanh",
            "parallel_residual": True,
            "shared_norm": True,
            "head_bias": True,
        },
        parts=(partial(rotary, fraction=0.5), _phi),
    ),
    "phi3": ConfigReader(shape={**LLAMA_SHAPE, "norm_epsilon": 1e-5}, gated=True, parts=(rotary, _phi3_window)),
    "falcon": ConfigReader(
        shape={**ROTARY_LAYERNORM, "seq_length": 2048, "tied_embeddings": True},
        parts=(rotary, _falcon),
        # Its alibi is divided by the root of head_dim, unlike that of BLOOM and of the paper.
        fixed={"alibi": False},
    ),
    "olmo": ConfigReader(
        shape={**LLAMA_SHAPE, "norm": "nonparametric", "norm_epsilon": 1e-5},
        gated=True,
        parts=(partial(_biases, mlp=False), rotary),
        fixed={"clip_qkv": None},
    ),
    "olmo2": ConfigReader(
        shape={**LLAMA_SHAPE, "norm_order": "output", "qk_norm": "width", "norm_epsilon": 1e-5},
        gated=True,
        parts=(partial(_biases, mlp=False), rotary),
    ),
    "bloom": ConfigReader(
        shape={
            "family": "gpt",
            "activation": "gelu_tanh",
            "position": "alibi",
            "bias": True,
            "embedding_norm": True,
            "tied_embeddings": True,
            "seq_length": 2048,
        },
        names={"seq_length": ("seq_length",), "ffn": ()},
        fixed={"apply_residual_connection_post_layernorm": False},
    ),
    "gpt_neox": ConfigReader(
        shape=ROTARY_LAYERNORM,
        names={"kv_heads": ()},
        parts=(partial(_biases, mlp=True, default=True), partial(rotary, fraction=0.25), _neox),
    ),
    "nemotron": ConfigReader(
        shape={**ROTARY_LAYERNORM, "activation": "relu2", "bias": False}, parts=(_biases, partial(rotary, fraction=0.5))
    ),
}


def gpt2_config(model: ModelSpec) -> dict[str, Any]:
    """The shape of the model in the keys of GPT2Config."""
    return {
        "n_layer": model.layers,
        "n_embd": model.hidden,
        "n_head": model.heads,
        "n_inner": model.ffn,
        "n_positions": model.max_positions,
        "layer_norm_epsilon": model.norm_epsilon,
        "activation_function": plain_activation(model.activation),
    }


GPT2 = Scheme(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    modules={
        "embedding.word": ("transformer.wte",),
        "embedding.position": ("transformer.wpe",),
        "layers.{}.attention_norm": ("transformer.h.{}.ln_1",),
        "layers.{}.attention.qkv": ("transformer.h.{}.attn.c_attn",),
        "layers.{}.attention.output": ("transformer.h.{}.attn.c_proj",),
        "layers.{}.mlp_norm": ("transformer.h.{}.ln_2",),
        "layers.{}.mlp.up": ("transformer.h.{}.mlp.c_fc",),
        "layers.{}.mlp.down": ("transformer.h.{}.mlp.c_proj",),
        "final_norm": ("transformer.ln_f",),
        "head": (HEAD,),
    },
    config=gpt2_config,
    expressible={
        "norm": ("layernorm",),
        "norm_order": ("pre",),
        "bias": (True,),
        "activation": ("gelu_tanh", "gelu", "relu"),
    },
    tokens=ENDS,
    roles=CAUSAL_ROLES,
    spellings=((r"^transformer\.", ""),),  # saved without the head
    copies=TIED_HEAD,
    extra=r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",
    conv1d=True,
    continues_text=True,
)


GATES = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_pytorch_tanh"}


def llama_config(model: ModelSpec) -> dict[str, Any]:
    """The shape of the model in the keys of LlamaConfig."""
    rotary: dict[str, Any] = {"rope_type": "default"}
    if model.rotary_scaling is not None:
        scaling = model.rotary_scaling.model_dump()
        original = int(scaling.pop("original_max_position"))
        rotary = {"rope_type": "llama3", **scaling, "original_max_position_embeddings": original}
    if (yarn := model.yarn_scaling) is not None:
        stated = yarn.model_dump(exclude_none=True)
        original = int(stated.pop("original_max_position"))
        rotary = {"rope_type": "yarn", **stated, "original_max_position_embeddings": original}
    is_scaled = rotary["rope_type"] != "default"
    return {
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "max_position_embeddings": max(model.max_positions, model.seq_length),
        "rms_norm_eps": model.norm_epsilon,
        "hidden_act": GATES[model.activation],
        "attention_bias": "output" in model.biased,
        "mlp_bias": "mlp" in model.biased,
        # Before transformers 5 the base stood alone and the scaling had a table of its own.
        "rope_theta": model.rotary_base,
        "rope_scaling": rotary if is_scaled else None,
        "rope_parameters": {"rope_theta": model.rotary_base, **rotary},
    }


LLAMA = Scheme(
    model_type="llama",
    architecture="LlamaForCausalLM",
    modules={
        "embedding.word": ("model.embed_tokens",),
        "layers.{}.attention_norm": ("model.layers.{}.input_layernorm",),
        "layers.{}.attention.qkv": (
            "model.layers.{}.self_attn.q_proj",
            "model.layers.{}.self_attn.k_proj",
            "model.layers.{}.self_attn.v_proj",
        ),
        "layers.{}.attention.output": ("model.layers.{}.self_attn.o_proj",),
        "layers.{}.mlp_norm": ("model.layers.{}.post_attention_layernorm",),
        "layers.{}.mlp.up": ("model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj"),
        "layers.{}.mlp.down": ("model.layers.{}.mlp.down_proj",),
        "final_norm": ("model.norm",),
        "head": (HEAD,),
    },
    config=llama_config,
    expressible={
        "norm": ("rmsnorm",),
        "norm_order": ("pre",),
        "activation": tuple(GATES),
        "bias": (True, False, "attention", "mlp"),
    },
    variants=("yarn_scaling",),
    tokens=ENDS,
    roles=CAUSAL_ROLES,
    spellings=((r"^model\.", ""),),  # saved without the head
    copies=TIED_HEAD,
    extra=r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
    heads_fill_hidden=False,
    grouped_heads=True,
    continues_text=True,
)


def mistral_config(model: ModelSpec) -> dict[str, Any]:
    """The shape of the model in the keys of MistralConfig."""
    return {**llama_config(model), "sliding_window": model.attention_window}


def qwen_config(model: ModelSpec) -> dict[str, Any]:
    """The shape of the model in the keys of Qwen2Config and Qwen3Config, without windows."""
    return {**llama_config(model), "use_sliding_window": False}


MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    architecture="MistralForCausalLM",
    config=mistral_config,
    expressible={**LLAMA.expressible, "bias": (False,)},
    variants=("attention_window", "yarn_scaling"),
)
QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    config=qwen_config,
    expressible={**LLAMA.expressible, "bias": ("qkv",)},
    variants=("yarn_scaling",),
)
QWEN3 = replace(
    LLAMA,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    config=qwen_config,
    modules={
        **LLAMA.modules,
        "layers.{}.attention.query_norm": ("model.layers.{}.self_attn.q_norm",),
        "layers.{}.attention.key_norm": ("model.layers.{}.self_attn.k_norm",),
    },
    expressible={**LLAMA.expressible, "bias": (False, "attention"), "qk_norm": (True,)},
    variants=("qk_norm", "yarn_scaling"),
)
