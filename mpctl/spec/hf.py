"""The shape of a model from a Hugging Face config.json (the shape only, never weights or code).

Keys and defaults are those of the config classes of `transformers` (GPT2Config, LlamaConfig,
MistralConfig, BertConfig, T5Config). What a Model cannot express is refused in words rather than
dropped, for a plan as for weights.
By hand: `{"model_type": "gpt2", "n_embd": 768, "activation_function": "gelu_new"}` gives family
gpt, hidden 768 and activation gelu_tanh.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from reprlib import repr as short
from typing import Any, TypeGuard

from mpctl.errors import InputError, Issue

Raw = dict[str, Any]
WHERE = "model.hf_config"

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
    "token_types": ("type_vocab_size",),
    "relative_buckets": ("relative_attention_num_buckets",),
    "relative_max_distance": ("relative_attention_max_distance",),
    "norm_epsilon": ("layer_norm_epsilon", "layer_norm_eps", "rms_norm_eps"),
    "tied_embeddings": ("tie_word_embeddings",),
}
LLAMA: Raw = {
    "family": "gpt",
    "activation": "swiglu",
    "norm": "rmsnorm",
    "position": "rotary",
    "bias": False,
    "tied_embeddings": False,
    "norm_epsilon": 1e-6,
}
T5: Raw = {
    "family": "t5",
    "activation": "relu",
    "norm": "rmsnorm",
    "position": "relative",
    "bias": False,
    "head_dim": 64,
    "norm_epsilon": 1e-6,
}
# Relative positions set no bound: the lengths T5 was trained at, inputs and the targets that
# corrupting 15 % of 568 tokens in spans of 3 leaves (arXiv 1910.10683, sections 3.1.2 and 3.1.4).
T5_LENGTHS: Raw = {"seq_length": 512, "decoder_seq_length": 114}
FAMILIES: dict[str, Raw] = {
    "gpt2": {"family": "gpt", "activation": "gelu_tanh", "tied_embeddings": True},
    "llama": LLAMA,
    "mistral": LLAMA,
    "bert": {"family": "bert", "norm_epsilon": 1e-12},
    "t5": T5,
}
# Settings that change what the model computes and that no [model] key expresses, with the value
# that they must have. Planning refuses others as importing weights does: the plan would be of
# another model than the one that the config describes.
FIXED: dict[str, Raw] = {
    "gpt2": {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    "bert": {
        "is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute",
    },
    "t5": {"is_encoder_decoder": True, "is_decoder": False},
}  # fmt: skip
MISTRAL_WINDOW = 4096  # MistralConfig's sliding_window where a config does not say
ACTIVATION_NAMES = ("activation_function", "hidden_act", "feed_forward_proj")
PLAIN = {
    "relu": "relu", "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip
GATED = {name: law.replace("gelu", "geglu") for name, law in PLAIN.items() if law != "relu"}
GATED |= {"silu": "swiglu", "swish": "swiglu"}
BIAS_NAMES = ("attention_bias", "mlp_bias")
# Our key of a Llama 3.1 scaling -> theirs.
SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position": "original_max_position_embeddings",
}

Found = Iterator[tuple[str, Any] | str]  # a key of ours with its value, or what is wrong


def shape_from_hf(name: Any) -> Raw:
    """Our `[model]` keys for the config.json at path `name`, or in the folder of that name.

    InputError, always at model.hf_config, names everything in it that cannot be used.
    """
    file, config = _read(name)
    kind = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(kind, str) or kind not in FAMILIES:
        hint = f"known: {', '.join(FAMILIES)}; or give the [model] keys themselves"
        message = f"model_type {short(kind)} in {file} is not known"
        raise InputError.of("unknown-model-type", WHERE, message, hint)
    shape: Raw = {**FAMILIES[kind], "source": str(file)}
    wrong: list[str] = []
    for found in chain(
        _numbers(config),
        _activation(config, kind),
        _biases(config, kind),
        _rotary(config, kind),
        _scaled(config, kind),
        _fixed(config, kind),
        _window(config, kind),
    ):
        if isinstance(found, str):
            wrong.append(found)
        else:
            shape[found[0]] = found[1]
    if wrong:
        hint = "give the [model] keys themselves instead of hf_config, to plan without it"
        raise InputError(Issue("hf-config", WHERE, f"{file}: {what}", hint) for what in wrong)
    if "seq_length" in shape:  # stays the model's limit where training uses shorter sequences
        shape["max_positions"] = shape["seq_length"]
    if kind == "t5":
        shape.pop("max_positions", None)
        shape |= T5_LENGTHS
        if "layers" in shape:
            shape.setdefault("decoder_layers", shape["layers"])
    return shape


def _read(name: Any) -> tuple[Path, Any]:
    if not isinstance(name, str):
        raise InputError.of("bad-value", WHERE, f"{short(name)} is not allowed: give a path")
    file = Path(name)
    try:
        file = file / "config.json" if file.is_dir() else file
        return file, json.loads(file.read_text("utf-8"))
    except OSError as error:
        message = f"{file}: {error.strerror or error}"
        raise InputError.of("no-such-file", WHERE, message, "name a config.json") from None
    except (ValueError, RecursionError) as error:
        raise InputError.of("bad-syntax", WHERE, f"{file} is no JSON: {error}") from None


def _numbers(config: Raw) -> Found:
    for ours, theirs in NAMES.items():
        name = next((name for name in theirs if config.get(name) is not None), None)
        if name is None:
            continue
        if isinstance(config[name], int | float):
            yield ours, config[name]
        else:
            yield f"{name} is {short(config[name])}, which is no number"


def _activation(config: Raw, kind: str) -> Found:
    """A llama's MLP is always gated; a t5 says so by the prefix `gated-`; the others never are.

    T5 1.1 has the tanh form in its gate and calls it gated-gelu.
    """
    for name in ACTIVATION_NAMES:
        if (text := config.get(name)) is None:
            continue
        plain = text.removeprefix("gated-") if isinstance(text, str) else ""
        known = GATED if kind in ("llama", "mistral") or plain != text else PLAIN
        if kind == "t5" and text == "gated-gelu":
            plain = "gelu_new"
        if plain in known:
            yield "activation", known[plain]
        else:
            yield f"{name} is {short(text)}, which is none of {', '.join(known)}"


def _biases(config: Raw, kind: str) -> Found:
    """A Model has biases in all linear layers or in none; so has a config without these keys."""
    if kind not in ("llama", "mistral"):
        return
    wanted = {name: config.get(name) or False for name in BIAS_NAMES}
    if len(set(map(str, wanted.values()))) == 1:
        yield "bias", wanted["mlp_bias"]
    else:
        yield (
            f"{' and '.join(f'{name} {short(value)}' for name, value in wanted.items())}: "
            "biases in some linear layers only cannot be expressed"
        )


def _rotary(config: Raw, kind: str) -> Found:
    """Base and scaling of rotary positions: one table since transformers 5, two keys before."""
    if kind not in ("llama", "mistral"):
        return
    table = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(table, dict):
        yield f"the scaling of rotary positions is {short(table)}, which is no table"
        return
    base = table.get("rope_theta", config.get("rope_theta"))
    if _is_number(base):
        yield "rotary_base", float(base)
    elif base is not None:
        yield f"rope_theta is {short(base)}, which is no number"
    turned = table.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if turned not in (None, 1):
        yield f"partial_rotary_factor {short(turned)} cannot be expressed, only 1"
    law = table.get("rope_type", table.get("type", "default"))
    if law == "llama3":
        given = {ours: table[theirs] for ours, theirs in SCALING.items() if theirs in table}
        wrong = [SCALING[key] for key in SCALING if not _is_number(given.get(key))]
        if wrong:
            yield f"rope_type llama3 lacks a number for {', '.join(wrong)}"
        else:
            yield "rotary_scaling", {key: float(value) for key, value in given.items()}
    elif law != "default":
        yield f"rope_type is {short(law)}, which is none of default, llama3"


def _scaled(config: Raw, kind: str) -> Found:
    """A T5 scales its logits where the word table is its head, and nowhere else.

    transformers 5 says which by a key of its own, beside a tie_word_embeddings that is true for a
    head of its own as well.
    """
    scaled = config.get("scale_decoder_outputs")
    if kind != "t5" or scaled is None:
        return
    if scaled is True and config.get("tie_word_embeddings") is False:
        yield "scale_decoder_outputs true without tie_word_embeddings cannot be expressed"
    else:
        yield "tied_embeddings", scaled


def _fixed(config: Raw, kind: str) -> Found:
    for key, value in FIXED.get(kind, {}).items():
        given = config.get(key, value)
        if given != value and not (given is None and value is False):
            yield f"{key} {short(given)} cannot be expressed, only {json.dumps(value)}"


def _window(config: Raw, kind: str) -> Found:
    """A Mistral's attention may be limited to the last tokens; ours sees all of the sequence."""
    window = config.get("sliding_window", MISTRAL_WINDOW)
    if kind != "mistral" or window is None:
        return
    names = NAMES["seq_length"]
    length = next((config[name] for name in names if _is_number(config.get(name))), None)
    if not _is_number(window) or length is None or window < length:
        yield (
            f"sliding_window {short(window)} limits attention to fewer than "
            f"{length or 'all'} tokens, which cannot be expressed, only null"
        )


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
