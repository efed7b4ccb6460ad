"""BERT in Hugging Face's transformers: BertConfig, and BertForPreTraining (modeling_bert.py).

The words' head is the word table with a bias of its own, cls.predictions.bias; files may hold both
once more as cls.predictions.decoder, where they must be the same. Files that were converted from
TensorFlow call a norm's weight and bias gamma and beta.
"""

from __future__ import annotations

from typing import Any

from mpctl.model.families.scheme import PADDING, WORD_TABLE, Scheme, plain_activation
from mpctl.spec.hf import ConfigReader
from mpctl.spec.model import ModelSpec

READERS = {
    "bert": ConfigReader(
        shape={"family": "bert", "norm_epsilon": 1e-12},
        fixed={"is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute"},
    )
}


def config(model: ModelSpec) -> dict[str, Any]:
    """The shape of the model in the keys of BertConfig."""
    return {
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_attention_heads": model.heads,
        "max_position_embeddings": model.max_positions,
        "type_vocab_size": model.token_types,
        "layer_norm_eps": model.norm_epsilon,
        "hidden_act": plain_activation(model.activation),
    }


BERT = Scheme(
    model_type="bert",
    architecture="BertForPreTraining",
    modules={
        "embedding.word": ("bert.embeddings.word_embeddings",),
        "embedding.position": ("bert.embeddings.position_embeddings",),
        "embedding.types": ("bert.embeddings.token_type_embeddings",),
        "embedding.norm": ("bert.embeddings.LayerNorm",),
        "layers.{}.attention.qkv": (
            "bert.encoder.layer.{}.attention.self.query",
            "bert.encoder.layer.{}.attention.self.key",
            "bert.encoder.layer.{}.attention.self.value",
        ),
        "layers.{}.attention.output": ("bert.encoder.layer.{}.attention.output.dense",),
        "layers.{}.attention_norm": ("bert.encoder.layer.{}.attention.output.LayerNorm",),
        "layers.{}.mlp.up": ("bert.encoder.layer.{}.intermediate.dense",),
        "layers.{}.mlp.down": ("bert.encoder.layer.{}.output.dense",),
        "layers.{}.mlp_norm": ("bert.encoder.layer.{}.output.LayerNorm",),
        "transform": ("cls.predictions.transform.dense",),
        "transform_norm": ("cls.predictions.transform.LayerNorm",),
        "head": ("cls.predictions",),  # its bias alone
        "pooler": ("bert.pooler.dense",),
        "next": ("cls.seq_relationship",),
    },
    config=config,
    expressible={
        "norm": ("layernorm",),
        "norm_order": ("post",),
        "bias": (True,),
        "activation": ("gelu", "gelu_tanh", "relu"),
        # Untied, transformers 5 leaves cls.predictions.bias unused; version 4 does not.
        "tied_embeddings": (True,),
    },
    tokens={"pad_token_id": ("[PAD]",)},
    roles={
        "cls_token": ("[CLS]",),
        "sep_token": ("[SEP]",),
        "mask_token": ("[MASK]",),
        "pad_token": ("[PAD]", *PADDING),
    },
    frame=("[CLS]", "A", "[SEP]", "B", "[SEP]"),
    generates=False,
    has_token_types=True,
    spellings=((r"^bert\.", ""), (r"LayerNorm\.weight$", "LayerNorm.gamma"), (r"LayerNorm\.bias$", "LayerNorm.beta")),
    copies={WORD_TABLE: ("cls.predictions.decoder.weight",), "head.bias": ("cls.predictions.decoder.bias",)},
    untied="a BERT has no head of its own: tie it in transformers, model.tie_weights(), and save it again",
    extra=r"bert\.embeddings\.position_ids",
)
SCHEMES = {"learned": (BERT,)}
