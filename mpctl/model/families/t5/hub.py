"""T5 in Hugging Face's transformers: T5Config, and T5ForConditionalGeneration 1.0 (relu, tied) and
1.1 (gated, a head of its own).

A block is a list of layers: self-attention, in the decoder cross attention, MLP, each with its norm
(modeling_t5.py of transformers). Block 0 of each stack holds the relative bias that all add. 1.1
does not scale its logits; transformers 5 says so by scale_decoder_outputs, version 4 took it from
tie_word_embeddings, and configs carry both.

Relative positions set no bound, so that the lengths are those that T5 was trained at: inputs, and
the targets that corrupting 15 % of 568 tokens in spans of 3 leaves (arXiv 1910.10683, sections
3.1.2 and 3.1.4).
"""

from __future__ import annotations

from typing import Any

from mpctl.model.families.scheme import HEAD, WORD_TABLE, Modules, Scheme, plain_activation
from mpctl.spec.hf import ConfigReader, Found, Raw
from mpctl.spec.model import ModelSpec

LENGTHS: Raw = {"seq_length": 512, "decoder_seq_length": 114}


def _scaled(config: Raw) -> Found:
    """A T5 scales its logits where the word table is its head, and nowhere else.

    transformers 5 has a separate key for it, since tie_word_embeddings may be true for an untied
    head.
    """
    scaled = config.get("scale_decoder_outputs")
    if scaled is None:
        return
    if scaled is True and config.get("tie_word_embeddings") is False:
        yield "scale_decoder_outputs true without tie_word_embeddings cannot be expressed"
    else:
        yield "tied_embeddings", scaled


def _with_lengths(shape: Raw) -> Raw:
    shape = {key: value for key, value in shape.items() if key != "max_positions"} | LENGTHS
    if "layers" in shape:
        shape.setdefault("decoder_layers", shape["layers"])
    return shape


READERS = {
    "t5": ConfigReader(
        shape={
            "family": "t5",
            "activation": "relu",
            "norm": "rmsnorm",
            "position": "relative",
            "bias": False,
            "head_dim": 64,
            "norm_epsilon": 1e-6,
        },
        parts=(_scaled,),
        fixed={"is_encoder_decoder": True, "is_decoder": False},
        last=_with_lengths,
    )
}


GATED = {"swiglu": "gated-silu", "geglu_tanh": "gated-gelu", "geglu": "gated-gelu_python"}
TABLES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
UNREAD_BIAS = r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"


def config(model: ModelSpec) -> dict[str, Any]:
    """The shape of the model in the keys of T5Config."""
    activation = model.activation
    return {
        "num_layers": model.layers,
        "num_decoder_layers": model.decoder_layers,
        "d_model": model.hidden,
        "d_kv": model.head_size,
        "d_ff": model.ffn,
        "num_heads": model.heads,
        "layer_norm_epsilon": model.norm_epsilon,
        "relative_attention_num_buckets": model.relative_buckets,
        "relative_attention_max_distance": model.relative_max_distance,
        "feed_forward_proj": GATED.get(activation) or plain_activation(activation),
        "is_encoder_decoder": True,
        "scale_decoder_outputs": model.tied_embeddings,
    }


def stack(name: str, *, mlp: int) -> Modules:
    """Return the modules that both stacks have. mlp: the position of the MLP in a block's list."""
    attention = f"{name}.block.{{}}.layer.0.SelfAttention"
    return {
        f"{name}.position": (f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias",),
        f"{name}.layers.{{}}.attention_norm": (f"{name}.block.{{}}.layer.0.layer_norm",),
        f"{name}.layers.{{}}.attention.qkv": tuple(f"{attention}.{part}" for part in "qkv"),
        f"{name}.layers.{{}}.attention.output": (f"{attention}.o",),
        f"{name}.layers.{{}}.mlp_norm": (f"{name}.block.{{}}.layer.{mlp}.layer_norm",),
        f"{name}.layers.{{}}.mlp.up": (f"{name}.block.{{}}.layer.{mlp}.DenseReluDense.wi",),
        f"{name}.layers.{{}}.mlp.down": (f"{name}.block.{{}}.layer.{mlp}.DenseReluDense.wo",),
        f"{name}.final_norm": (f"{name}.final_layer_norm",),
    }


CROSS = "decoder.block.{}.layer.1.EncDecAttention"
T5 = Scheme(
    model_type="t5",
    architecture="T5ForConditionalGeneration",
    modules={
        "embedding.word": ("shared",),
        **stack("encoder", mlp=1),
        **stack("decoder", mlp=2),
        "decoder.layers.{}.cross_norm": ("decoder.block.{}.layer.1.layer_norm",),
        "decoder.layers.{}.cross.query": (f"{CROSS}.q",),
        "decoder.layers.{}.cross.key_value": (f"{CROSS}.k", f"{CROSS}.v"),
        "decoder.layers.{}.cross.output": (f"{CROSS}.o",),
        "head": (HEAD,),
    },
    gated={
        f"{name}.layers.{{}}.mlp.up": tuple(
            f"{name}.block.{{}}.layer.{mlp}.DenseReluDense.{part}" for part in ("wi_0", "wi_1")
        )
        for name, mlp in (("encoder", 1), ("decoder", 2))
    },
    config=config,
    expressible={"norm": ("rmsnorm",), "bias": (False,), "activation": ("relu", "gelu", "gelu_tanh", *GATED)},
    tokens={"pad_token_id": ("<pad>",), "eos_token_id": ("</s>",), "decoder_start_token_id": ("<pad>",)},
    roles={"pad_token": ("<pad>",), "eos_token": ("</s>",)},
    frame=("A", "</s>", "B", "</s>"),
    copies={WORD_TABLE: (f"{HEAD}.weight", *TABLES)},
    untied='if the model has its own head, set "tie_word_embeddings" and "scale_decoder_outputs" '
    "to false in config.json",
    extra=UNREAD_BIAS,
    heads_fill_hidden=False,
)
SCHEMES = {"relative": (T5,)}
