"""The shape of a model from a Hugging Face config.json (the shape only, never weights or code)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mpctl.errors import InputError

# Our key -> the names that configs of different families use for it, first match wins.
NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "decoder_layers": ("num_decoder_layers",),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "ffn": ("intermediate_size", "n_inner", "d_ff"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim", "d_kv"),
    "vocab": ("vocab_size",),
    "seq_length": ("max_position_embeddings", "n_positions", "n_ctx"),
    "norm_epsilon": ("layer_norm_epsilon", "layer_norm_eps", "rms_norm_eps"),
    "tied_embeddings": ("tie_word_embeddings",),
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"family": "gpt", "activation": "gelu_tanh", "tied_embeddings": True},
    "llama": {
        "family": "gpt",
        "activation": "swiglu",
        "norm": "rmsnorm",
        "position": "rotary",
        "bias": False,
        "tied_embeddings": False,
    },
    "bert": {"family": "bert"},
    "t5": {
        "family": "t5",
        "activation": "relu",
        "norm": "rmsnorm",
        "position": "relative",
        "bias": False,
        "seq_length": 512,
    },
}
FAMILIES["mistral"] = FAMILIES["llama"]


def shape_from_hf(path: Path) -> dict[str, Any]:
    """Our `[model]` keys for a config.json (or the folder holding one); raises InputError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise InputError.of("no-such-file", str(file), error.strerror or str(error)) from None
    except ValueError as error:
        raise InputError.of("bad-syntax", str(file), str(error)) from None
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in FAMILIES:
        raise InputError.of(
            "unknown-model-type",
            "model.hf_config",
            f"model_type {kind!r} in {file} is not known",
            f"known: {', '.join(FAMILIES)}; or give the [model] keys themselves",
        )
    shape: dict[str, Any] = {**FAMILIES[kind], "source": str(file)}
    for ours, theirs in NAMES.items():
        value = next((config[name] for name in theirs if config.get(name) is not None), None)
        if value is not None:
            shape[ours] = value
    return shape
