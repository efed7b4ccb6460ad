"""Adapters from and to Hugging Face's peft: the same logits as its own, on random small models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mpctl.train.weights.peft_export import export_adapters
from mpctl.train.weights.peft_import import import_adapters
from mpctl.train.weights.writer import export_weights
from tests.train.weights.hub import Truth, load, tokens

peft = pytest.importorskip("peft")
Truths = Callable[[str], Truth]

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"target_modules": ["q_proj", "v_proj", "down_proj"]}),
    "llama all-linear, rslora": ("llama31-sharded", {"target_modules": "all-linear", "use_rslora": True}),
    "llama head": ("llama", {"target_modules": ["o_proj", "lm_head"]}),
    "llama, saved": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
    "llama, one layer": ("llama", {"target_modules": ["q_proj"], "layers_to_transform": [1]}),
    "llama, patterns": (
        "llama",
        {
            "target_modules": ["q_proj", "k_proj", "up_proj"],
            "rank_pattern": {"k_proj": 2, r"layers\.1\.mlp\.up_proj": 6},
            "alpha_pattern": {"k_proj": 5},
        },
    ),
    "qwen3": ("qwen3-sharded", {"target_modules": ["q_proj", "k_proj", "gate_proj"]}),
    "gpt2": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"]}),
    "gpt2 attention alone": ("gpt2", {"target_modules": ["attn.c_proj", "c_attn"]}),
    "mixtral": ("mixtral", {"target_modules": ["q_proj", "w1", "w2", "w3"]}),
    "mixtral, attention": ("mixtral", {"target_modules": ["q_proj", "o_proj"]}),
    "mixtral, down": ("mixtral", {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}),
    "mixtral, up": ("mixtral", {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]}),
    "qwen3_moe": ("qwen3_moe-sharded", {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}),
    "qwen2_moe": ("qwen2_moe", {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}),
    "deepseek": ("deepseek_v2", {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]}),
}
every = pytest.mark.parametrize("kind", KINDS)


def theirs(folder: Path, **keys: Any) -> Any:
    """A model of peft with random adapters."""
    config = peft.LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", base_model_name_or_path=str(folder), **keys)
    model = peft.get_peft_model(load(folder), config).eval()
    randomize(model)
    return model


def randomize(model: Any) -> None:
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                is_length = "magnitude" in name
                drawn = torch.rand_like(parameter) + 0.5 if is_length else torch.randn_like(parameter) * 0.2
                parameter.copy_(parameter * drawn if is_length else drawn)


def logits(model: Any) -> Tensor:
    """In float64, in which experts' kernels have no grouped products."""
    model = model.double()
    model.config._experts_implementation = "eager"
    with torch.no_grad():
        found: Tensor = model(tokens()[0]).logits
    return found


def assert_same(found: Tensor, expected: Tensor) -> None:
    """To 1e-6 of the largest logit."""
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.fixture(scope="module")
def made(truths: Truths, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Tensor, Tensor]]:
    """Each kind's folder of peft, with its logits and those of its base, in float64."""
    root, found = tmp_path_factory.mktemp("peft"), dict[str, tuple[Path, Tensor, Tensor]]()

    def get(kind: str) -> tuple[Path, Tensor, Tensor]:
        if kind not in found:
            base, keys = KINDS[kind]
            model = theirs(truths(base).folder, **keys)
            model.save_pretrained(root / kind)
            found[kind] = root / kind, logits(model), truths(base).logits
        return found[kind]

    return get


@every
def test_an_imported_adapter_has_their_logits(
    kind: str, made: Callable[[str], tuple[Path, Tensor, Tensor]], tmp_path: Path
) -> None:
    folder, expected, base = made(kind)
    assert (expected - base).abs().max() > 0.05
    import_adapters(folder, tmp_path / "ours")
    export_weights(tmp_path / "ours", tmp_path / "merged")
    assert_same(logits(load(tmp_path / "merged")), expected)


@every
def test_an_imported_adapter_goes_back_with_their_logits(
    kind: str, made: Callable[[str], tuple[Path, Tensor, Tensor]], truths: Truths, tmp_path: Path
) -> None:
    folder, expected, _ = made(kind)
    import_adapters(folder, tmp_path / "ours")
    export_adapters(tmp_path / "ours", tmp_path / "theirs")
    again = peft.PeftModel.from_pretrained(load(truths(KINDS[kind][0]).folder), tmp_path / "theirs").eval()
    assert_same(logits(again), expected)
