"""A Hugging Face config.json gives the shape; the job's own keys still win."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpctl.errors import InputError
from mpctl.spec.load import load_job
from mpctl.spec.model import Model

# As published for openai-community/gpt2 and meta-llama/Llama-3.1-8B, keys of generation left out.
GPT2 = {
    "model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_ctx": 1024,
    "n_positions": 1024, "vocab_size": 50257, "layer_norm_epsilon": 1e-05, "n_inner": None,
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"],
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "head_dim": None,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "vocab_size": 128256, "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip


def write(folder: Path, config: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config), "utf-8")
    return path


def model_of(path: Path, **keys: Any) -> Model:
    overrides = {"model.hf_config": str(path), **{f"model.{k}": v for k, v in keys.items()}}
    model = load_job(None, overrides).model
    assert model is not None
    return model


def test_gpt2_config_is_the_gpt2_preset(tmp_path: Path) -> None:
    ours = load_job(None, {"model": "gpt2"}).model
    assert ours is not None
    nameless = ours.model_dump(exclude={"name", "source"})
    assert model_of(write(tmp_path, GPT2)).model_dump(exclude={"name", "source"}) == nameless


def test_llama_config(tmp_path: Path) -> None:
    model = model_of(write(tmp_path, LLAMA))
    assert (model.family, model.activation, model.norm) == ("gpt", "swiglu", "rmsnorm")
    assert (model.position, model.bias, model.tied_embeddings) == ("rotary", False, False)
    assert (model.layers, model.hidden, model.ffn) == (32, 4096, 14336)
    assert (model.heads, model.kv_heads, model.head_size) == (32, 8, 128)
    assert (model.vocab, model.seq_length) == (128256, 131072)


def test_own_keys_beat_the_config_and_a_folder_will_do(tmp_path: Path) -> None:
    write(tmp_path, LLAMA)
    model = model_of(tmp_path, seq_length=8192, layers=4)
    assert (model.seq_length, model.layers, model.hidden) == (8192, 4, 4096)


@pytest.mark.parametrize(
    ("config", "rule"),
    [({"model_type": "mamba"}, "unknown-model-type"), ([1], "unknown-model-type")],
)
def test_an_unknown_model_type_is_reported_with_the_rest(
    tmp_path: Path, config: Any, rule: str
) -> None:
    path = write(tmp_path, config)
    with pytest.raises(InputError) as caught:
        load_job(None, {"model.hf_config": str(path), "parallel.tpp": 1})
    assert [issue.rule for issue in caught.value.issues] == [rule, "unknown-key"]


def test_a_missing_config_is_reported_with_the_rest(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load_job(None, {"model.hf_config": str(tmp_path), "training.steps": 0})
    assert [issue.rule for issue in caught.value.issues] == ["no-such-file", "bad-value"]
