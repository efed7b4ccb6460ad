"""The parameters of each family of Hugging Face: counted by its own model, and as published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mpctl.families import get_table
from mpctl.sharding import padded_vocab
from mpctl.spec.load import load_job
from mpctl.spec.model import ModelSpec
from tests.families.hf_configs import CONFIGS


def model_of(folder: Path, config: dict[str, Any]) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    model = load_job(None, {"model.hf_config": str(folder)}).model
    assert model is not None
    return model


def parameters(model: ModelSpec) -> int:
    """Of the operator table, without what pads the vocabulary."""
    tables = (1 if model.tied_embeddings else 2) * model.hidden + model.head_bias
    padding = padded_vocab(model.vocab, tp=1, divisor=model.vocab_divisor) - model.vocab
    return get_table(model, tp=1).numel - padding * tables


@pytest.mark.parametrize("name", CONFIGS)
def test_the_table_has_the_parameters_of_transformers_own_model(tmp_path: Path, name: str) -> None:
    kind, keys = CONFIGS[name]
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **keys))
    ours = model_of(tmp_path, {"model_type": kind, **keys})
    assert parameters(ours) == sum(weight.numel() for weight in theirs.parameters())


# As published on huggingface.co: config.json of the model, and the parameters that the page of its
# safetensors counts.
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "mistralai/Mistral-7B-v0.1": (7_241_732_096, {
        "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 32768, "sliding_window": 4096, "vocab_size": 32000}),
    "Qwen/Qwen2.5-7B": (7_615_616_512, {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "max_position_embeddings": 131072, "vocab_size": 152064, "use_sliding_window": False,
        "tie_word_embeddings": False}),
    "Qwen/Qwen3-8B": (8_190_735_360, {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 40960, "vocab_size": 151936,
        "tie_word_embeddings": False}),
    "google/gemma-2b": (2_506_172_416, {
        "model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16384,
        "num_hidden_layers": 18, "num_attention_heads": 8, "num_key_value_heads": 1,
        "head_dim": 256, "max_position_embeddings": 8192, "vocab_size": 256000}),
    "google/gemma-2-2b": (2_614_341_888, {
        "model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "max_position_embeddings": 8192, "vocab_size": 256000}),
    "google/gemma-3-1b-pt": (999_885_952, {
        "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912,
        "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 256, "max_position_embeddings": 32768, "sliding_window": 512,
        "vocab_size": 262144}),
    "microsoft/phi-2": (2_779_683_840, {
        "model_type": "phi", "hidden_size": 2560, "intermediate_size": 10240,
        "num_hidden_layers": 32, "num_attention_heads": 32, "partial_rotary_factor": 0.4,
        "max_position_embeddings": 2048, "vocab_size": 51200}),
    "microsoft/Phi-3-mini-4k-instruct": (3_821_079_552, {
        "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "max_position_embeddings": 4096, "sliding_window": 2047, "vocab_size": 32064}),
    "allenai/OLMo-1B-hf": (1_176_764_416, {
        "model_type": "olmo", "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16,
        "max_position_embeddings": 2048, "vocab_size": 50304, "tie_word_embeddings": True}),
    "allenai/OLMo-2-1124-7B": (7_298_617_344, {
        "model_type": "olmo2", "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "max_position_embeddings": 4096, "vocab_size": 100352}),
    "bigscience/bloom": (176_247_271_424, {
        "model_type": "bloom", "hidden_size": 14336, "n_layer": 70, "n_head": 112,
        "vocab_size": 250880, "seq_length": 2048}),
    "EleutherAI/gpt-neox-20b": (20_554_567_680, {
        "model_type": "gpt_neox", "hidden_size": 6144, "intermediate_size": 24576,
        "num_hidden_layers": 44, "num_attention_heads": 64, "max_position_embeddings": 2048,
        "vocab_size": 50432}),
    "tiiuae/falcon-7b": (6_921_720_704, {
        "model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32,
        "num_attention_heads": 71, "multi_query": True, "parallel_attn": True, "bias": False,
        "vocab_size": 65024}),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_released_model_has_its_published_parameters(tmp_path: Path, name: str) -> None:
    published, config = PUBLISHED[name]
    assert parameters(model_of(tmp_path, config)) == published
