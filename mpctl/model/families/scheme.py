"""The names of a family's parameters in a class of Hugging Face's transformers, and their storage.

A Scheme is a table, written out with the class's config.json in a family's hub.py; train/weights/names.py
reads the tables. No torch here. `"layers.{}.attention.output":
("model.layers.{}.self_attn.o_proj",)` says that our layers.7.attention.output.weight is their
model.layers.7.self_attn.o_proj.weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mpctl.spec.model import ModelSpec

HEAD = "lm_head"
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
WORD_TABLE = "embedding.word.weight"  # the parameter of ours
TIED_HEAD = {WORD_TABLE: (f"{HEAD}.weight",)}
BEGIN_OF_TEXT = ("<|begin_of_text|>", "<s>", "<bos>", *END_OF_TEXT)
ENDS = {"bos_token_id": BEGIN_OF_TEXT, "eos_token_id": END_OF_TEXT}
PADDING = ("<pad>", "[PAD]", "<|pad|>", *END_OF_TEXT)  # masked, so that any token will do
CAUSAL_ROLES = {"bos_token": BEGIN_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": PADDING}

Modules = Mapping[str, tuple[str, ...]]
"""A module of ours, {} for a layer's number: theirs, whose tensors are stacked on dim 0. Experts
have one module each, {} for the layer's number and {} for the expert's."""
Inexpressible = Iterator[tuple[str, str]]
"""Keys of a model whose values a class has no place for, and why."""


def nothing_refused(model: ModelSpec) -> Inexpressible:
    """A class that `expressible` and `variants` describe completely."""
    return iter(())


def no_pairs(model: ModelSpec) -> Mapping[str, tuple[int, int]]:
    """A class that stores rows in our order."""
    return {}


@dataclass(frozen=True)
class Scheme:
    """One class of theirs. All names are full ones.

    gated: modules that have other names where the MLP is gated. config: the shape as its
    config.json says it. expressible: legal values by key of a Model. tokens: settings that are the
    id of a token, by the token's possible names. spellings: (pattern, replacement) of other names
    in some files. extra: tensors of files that are not read. copies: names under which files may
    hold a parameter of ours once more; such a tensor must be equal to it. untied: what to do where
    the head is not. roles: of special tokens in transformers, by the token's possible names. frame:
    special tokens around two texts A and B. generates: whether the class writes text.
    """

    model_type: str
    architecture: str
    modules: Modules
    config: Callable[[ModelSpec], dict[str, Any]]
    expressible: Mapping[str, tuple[object, ...]]
    tokens: Mapping[str, tuple[str, ...]]
    roles: Mapping[str, tuple[str, ...]]
    extra: str
    gated: Modules = field(default_factory=dict)
    copies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    untied: str = 'set "tie_word_embeddings": false in config.json if the model has its own head'
    frame: tuple[str, ...] = ()
    generates: bool = True
    spellings: tuple[tuple[str, str], ...] = ()
    conv1d: bool = False
    """Whether linear layers of blocks are stored [in, out]."""
    heads_fill_hidden: bool = True
    grouped_heads: bool = False
    """Whether keys and values may have fewer heads."""
    variants: tuple[str, ...] = ()
    """Keys by which decoders differ (spec/model.py) that the class has words for."""
    continues_text: bool = False
    """Whether the class writes on after its input, so that batches are padded on the left."""
    has_token_types: bool = False
    """Whether the class takes `token_type_ids` in addition to the tokens."""
    refuses: Callable[[ModelSpec], Inexpressible] = nothing_refused
    """Features of a model that the class cannot represent, beyond single values."""
    pairs: Callable[[ModelSpec], Mapping[str, tuple[int, int]]] = no_pairs
    """Our modules whose rows it stores in another order, as (period, first): of each `period` rows
    those from `first` on are neighbouring pairs, where ours are two halves."""
    router_bias: str = ""
    """Its tensor of a router's correction biases, {} for the layer's number."""
    predicts_more: str = ""
    """Its key for the number of layers behind the last one, of multi-token prediction, which are
    not read."""
    also_read: tuple[str, ...] = ()
    """Other `model_type`s with the same tensors."""


def plain_activation(name: str) -> str:
    """Their name of an activation without a gate; `gelu` is the exact one for both."""
    return {"gelu_tanh": "gelu_new"}.get(name, name)
