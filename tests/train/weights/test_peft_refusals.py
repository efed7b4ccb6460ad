"""Folders of peft that are refused, without peft: each with value, bound and way out, and nothing written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mpctl.core.errors import InputError
from mpctl.train.weights.peft_config import read_config, suffixes
from mpctl.train.weights.peft_import import import_adapters
from tests.cli.calls import assert_refused, caller
from tests.train.weights.hub import Truth

Truths = Callable[[str], Truth]
KEY = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"


@pytest.fixture
def folder(truths: Truths, tmp_path: Path) -> Path:
    """An adapter of q_proj, rank 2, over the tiny llama."""
    out = tmp_path / "theirs"
    out.mkdir()
    tensors = {KEY.format(layer, "A"): torch.randn(2, 32) for layer in range(2)}
    tensors |= {KEY.format(layer, "B"): torch.randn(32, 2) for layer in range(2)}
    save_file(tensors, out / "adapter_model.safetensors")
    base = {"base_model_name_or_path": str(truths("llama").folder)}
    (out / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, **base}))
    return out


def configure(folder: Path, **keys: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def refusal(folder: Path, out: Path, base: Path | None = None) -> str:
    with pytest.raises(InputError) as caught:
        import_adapters(folder, out, base=base)
    assert not out.exists()
    assert all(issue.hint for issue in caught.value.issues)
    return str(caught.value)


def test_the_command_writes_a_job_that_starts_from_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mpctl = caller(capsys)
    assert mpctl("checkpoint", "import", folder, tmp_path / "ours").code == 0
    text = (tmp_path / "ours" / "model.toml").read_text()
    assert '[training.adapter]\nrank = 2\nalpha = 4.0\ntargets = ["q_proj"]' in text
    assert mpctl("checkpoint", "export", tmp_path / "ours", tmp_path / "back").code == 0
    files = [path.name for path in sorted((tmp_path / "back").iterdir())]
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    full = (tmp_path / "ours", tmp_path / "full", "--merged", "--dtype", "bf16", "--json")
    merged = mpctl("checkpoint", "export", *full)
    assert json.loads(merged.out)["dtype"] == "BF16"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"bias": "all"}, "biases of the base were trained"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base's weights"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is [1]"),
        ({"r": 4}, "rank 4 and the base need [4, 32]"),
        ({"r": 0}, "r is 0, not a rank of 1 to 65536"),
        ({"rank_pattern": {"(a+)+$": 4}}, "is not a path of modules"),
        ({"base_model_name_or_path": "meta-llama/Llama-3-8B"}, "is no folder here"),
    ],
)
def test_what_mpctl_cannot_express_is_refused(keys: dict[str, Any], said: str, folder: Path, tmp_path: Path) -> None:
    configure(folder, **keys)
    assert said in refusal(folder, tmp_path / "out")


def test_an_adapter_of_another_base_is_refused(folder: Path, truths: Truths, tmp_path: Path) -> None:
    assert "which is no adapter of a linear layer" in refusal(folder, tmp_path / "out", truths("gpt2").folder)
    said = refusal(folder, tmp_path / "out", truths("qwen3-sharded").folder)
    assert "lora_B.weight is [32, 2], rank 2 and the base need [64, 2]" in said and "--base" in said


def test_a_pickle_is_not_opened(folder: Path, tmp_path: Path) -> None:
    shutil.move(folder / "adapter_model.safetensors", folder / "adapter_model.bin")
    assert "adapter_model.bin only, a pickle" in refusal(folder, tmp_path / "out")


def test_values_that_are_not_finite_are_refused(folder: Path, tmp_path: Path) -> None:
    tensors = {KEY.format(0, "A"): torch.full((2, 32), float("nan")), KEY.format(0, "B"): torch.zeros(32, 2)}
    save_file(tensors, folder / "adapter_model.safetensors")
    assert "NaN or infinite" in refusal_without_hint(folder, tmp_path / "out")


def refusal_without_hint(folder: Path, out: Path) -> str:
    with pytest.raises(InputError) as caught:
        import_adapters(folder, out)
    assert not out.exists()
    return str(caught.value)


def test_base_belongs_to_adapters(truths: Truths, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = truths("llama").folder
    said = caller(capsys)("checkpoint", "import", base, tmp_path / "out", "--base", base)
    assert_refused(said, wants_json=False)
    assert "holds no adapter_config.json" in said.err


def test_patterns_hold_as_in_peft(folder: Path) -> None:
    """The first key that matches the end of a path."""
    configure(folder, rank_pattern={r"layers\.1\.mlp\.up_proj": 6, "up_proj": 2}, alpha_pattern={"up_proj": 3})
    config = read_config(folder)
    assert [config.rank_of(f"model.layers.{n}.mlp.up_proj") for n in (1, 11)] == [6, 2]
    assert config.scale_of("model.layers.1.mlp.up_proj", 6) == 0.5


def test_ends_of_paths_name_the_wanted_alone() -> None:
    assert suffixes(["h.0.attn.c_proj", "h.0.mlp.c_proj"], ["h.0.c_fc"]) == ["c_proj"]
    assert suffixes(["h.0.attn.c_proj"], ["h.0.mlp.c_proj"]) == ["attn.c_proj"]
    assert suffixes(["h.0.c_proj"], ["h.1.c_proj"]) == ["0.c_proj"]
