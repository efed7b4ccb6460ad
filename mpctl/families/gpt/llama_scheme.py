"""LlamaForCausalLM and its kin: q, k and v apart, gate and up apart (modeling_llama.py of
transformers). A Mistral has windows in all layers, a Qwen2 biases of q, k and v alone, a Qwen3
norms of each head's queries and keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mpctl.families.scheme import CAUSAL_ROLES, ENDS, HEAD, TIED_HEAD, Scheme
from mpctl.spec.model import ModelSpec

GATES = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_pytorch_tanh"}


def config(model: ModelSpec) -> dict[str, Any]:
    """The shape of the model in the keys of LlamaConfig."""
    rotary: dict[str, Any] = {"rope_type": "default"}
    if model.rotary_scaling is not None:
        scaling = model.rotary_scaling.model_dump()
        original = int(scaling.pop("original_max_position"))
        rotary = {
            "rope_type": "llama3", **scaling, "original_max_position_embeddings": original,
        }  # fmt: skip
    return {
        "num_hidden_layers": model.layers, "hidden_size": model.hidden,
        "intermediate_size": model.ffn, "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads, "head_dim": model.head_size,
        "max_position_embeddings": max(model.max_positions, model.seq_length),
        "rms_norm_eps": model.norm_epsilon, "hidden_act": GATES[model.activation],
        "attention_bias": "output" in model.biased, "mlp_bias": "mlp" in model.biased,
        # Before transformers 5 the base stood alone and the scaling had a table of its own.
        "rope_theta": model.rotary_base,
        "rope_scaling": None if model.rotary_scaling is None else rotary,
        "rope_parameters": {"rope_theta": model.rotary_base, **rotary},
    }  # fmt: skip


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
    config=config,
    expressible={
        "norm": ("rmsnorm",),
        "norm_order": ("pre",),
        "activation": tuple(GATES),
        "bias": (True, False, "attention", "mlp"),
    },
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
    return {**config(model), "sliding_window": model.attention_window}


def qwen_config(model: ModelSpec) -> dict[str, Any]:
    """The shape of the model in the keys of Qwen2Config and Qwen3Config, without windows."""
    return {**config(model), "use_sliding_window": False}


MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    architecture="MistralForCausalLM",
    config=mistral_config,
    expressible={**LLAMA.expressible, "bias": (False,)},
    variants=("attention_window",),
)
QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    config=qwen_config,
    expressible={**LLAMA.expressible, "bias": ("qkv",)},
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
    variants=("qk_norm",),
)
