"""The weights of small Hugging Face models under our names, for comparing what both compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mpctl.spec.model import ModelSpec

Weights = dict[str, Tensor]
ONE_ADDED = ("gemma", "gemma3_text", "nemotron")  # norms that multiply by 1 + weight
PARTS = ("weight", "bias")


def weights_of(theirs: Any, model: ModelSpec) -> Weights:
    """Every parameter of a model of transformers by the name that our module has for it."""
    kind, state = theirs.config.model_type, theirs.state_dict()
    if kind in ONE_ADDED:
        state = {n: t + 1 if "norm" in n and n.endswith("weight") else t for n, t in state.items()}
    is_old = kind in ("bloom", "falcon", "gpt_neox")
    pairs = _old(state, model, kind) if is_old else _llama(state, model)
    return {name: tensor for name, tensor in pairs if tensor is not None}


def _module(state: Weights, ours: str, *theirs: str) -> Iterator[tuple[str, Tensor | None]]:
    """Weight and bias of one module of ours, stacked from theirs; what they lack is left out."""
    for part in PARTS:
        found = [state[f"{name}.{part}"] for name in theirs if f"{name}.{part}" in state]
        yield f"{ours}.{part}", torch.cat(found) if found else None


def _llama(state: Weights, model: ModelSpec) -> Iterator[tuple[str, Tensor | None]]:
    yield from _module(state, "embedding.word", "model.embed_tokens")
    yield from _module(state, "final_norm", "model.norm")
    if not model.tied_embeddings:
        yield from _module(state, "head", "lm_head")
    has_result = model.norm_order in ("sandwich", "output")
    behind = "attention_output_norm" if has_result else "mlp_norm"
    names = {
        "attention_norm": ("input_layernorm",),
        behind: ("post_attention_layernorm",),
        "attention.qkv": tuple(f"self_attn.{x}" for x in ("q_proj", "k_proj", "v_proj", "qkv_proj")),
        "attention.query_norm": ("self_attn.q_norm",),
        "attention.key_norm": ("self_attn.k_norm",),
        "attention.output": ("self_attn.o_proj",),
        "mlp.up": tuple(f"mlp.{x}" for x in ("gate_proj", "up_proj", "gate_up_proj")),
        "mlp.down": ("mlp.down_proj",),
    }
    if has_result:
        names["mlp_output_norm"] = ("post_feedforward_layernorm",)
    if model.norm_order == "sandwich":
        names["mlp_norm"] = ("pre_feedforward_layernorm",)
    if model.norm_order == "output":
        del names["attention_norm"]
    for layer in range(model.layers):
        for ours, theirs in names.items():
            full = (f"model.layers.{layer}.{name}" for name in theirs)
            yield from _module(state, f"layers.{layer}.{ours}", *full)


def _old(state: Weights, model: ModelSpec, kind: str) -> Iterator[tuple[str, Tensor | None]]:
    root, blocks = ("gpt_neox", "layers") if kind == "gpt_neox" else ("transformer", "h")
    attention = "attention" if kind == "gpt_neox" else "self_attention"
    ends = {
        "embedding.word": ("word_embeddings", "embed_in"),
        "embedding_norm": ("word_embeddings_layernorm",),
        "final_norm": ("ln_f", "final_layer_norm"),
    }
    names = {
        "attention_norm": ("input_layernorm", "ln_attn"),
        "mlp_norm": ("post_attention_layernorm", "ln_mlp"),
        "attention.output": (f"{attention}.dense",),
        "mlp.up": ("mlp.dense_h_to_4h",),
        "mlp.down": ("mlp.dense_4h_to_h",),
    }
    for ours, theirs in ends.items():
        yield from _module(state, ours, *(f"{root}.{name}" for name in theirs))
    if not model.tied_embeddings:
        yield from _module(state, "head", "embed_out", "lm_head")
    for layer in range(model.layers):
        at = f"{root}.{blocks}.{layer}"
        for ours, theirs in names.items():
            yield from _module(state, f"layers.{layer}.{ours}", *(f"{at}.{name}" for name in theirs))
        for part in PARTS:
            fused = state.get(f"{at}.{attention}.query_key_value.{part}")
            ours = f"layers.{layer}.attention.qkv.{part}"
            yield ours, None if fused is None else _by_kind(fused, model, kind)


def _by_kind(fused: Tensor, model: ModelSpec, kind: str) -> Tensor:
    """[groups, queries + 2, d, ..] of theirs -> our [q | k | v]; one group for each kv head. A
    BLOOM's and a GPT-NeoX's groups are heads with a query, a key and a value each."""
    groups = model.kv_heads
    by_group = fused.reshape(groups, -1, model.head_size, *fused.shape[1:])
    queries = by_group.shape[1] - 2
    parts = by_group.split((queries, 1, 1), dim=1)
    return torch.cat([part.flatten(0, 2) for part in parts])
