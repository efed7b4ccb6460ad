"""GPT2LMHeadModel. Its linear layers are Conv1D, stored [in, out]; c_attn holds q, k and v as
thirds of the columns, which transposed is our fused [q | k | v] (modeling_gpt2.py of transformers).
"""

from __future__ import annotations

from typing import Any

from mpctl.families.scheme import CAUSAL_ROLES, ENDS, HEAD, TIED_HEAD, Scheme, plain_activation
from mpctl.spec.model import ModelSpec


def config(model: ModelSpec) -> dict[str, Any]:
    """The shape of the model in the keys of GPT2Config."""
    return {
        "n_layer": model.layers, "n_embd": model.hidden, "n_head": model.heads,
        "n_inner": model.ffn, "n_positions": model.max_positions,
        "layer_norm_epsilon": model.norm_epsilon,
        "activation_function": plain_activation(model.activation),
    }  # fmt: skip


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
    config=config,
    expressible={
        "norm": ("layernorm",), "norm_order": ("pre",), "bias": (True,),
        "activation": ("gelu_tanh", "gelu", "relu"),
    },
    tokens=ENDS,
    roles=CAUSAL_ROLES,
    spellings=((r"^transformer\.", ""),),  # saved without the head
    copies=TIED_HEAD,
    extra=r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",
    conv1d=True,
    continues_text=True,
)  # fmt: skip
