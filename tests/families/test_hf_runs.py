"""What our module computes for families of Hugging Face is what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mpctl.families.implementation import Batch, build_module
from mpctl.layers.shard_context import ShardContext
from mpctl.rules.launched import not_launched
from mpctl.runtime.model_weights import load_chunks
from mpctl.spec.job import JobSpec
from mpctl.spec.training import TrainingSpec
from tests.families.hf_configs import CONFIGS
from tests.families.hf_weights import weights_of
from tests.families.test_hf_sizes import model_of

# Planned and not run, with the key that says why.
ONLY_PLANNED = {
    "gemma2": "attention_softcap", "phi": "head_bias", "phi with norms of heads": "head_bias",
    "olmo2": "qk_norm", "llama with yarn": "rotary_scaling_type",
}  # fmt: skip
READ = ("gpt2", "gpt2 with a head of its own")  # from the files of transformers
RUN = [name for name in CONFIGS if name not in (*ONLY_PLANNED, *READ)]


@pytest.mark.parametrize("name", RUN)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """In float32, as transformers computes norms and rotary positions in it whatever the dtype."""
    kind, keys = CONFIGS[name]
    theirs = drawn(name)
    model = model_of(tmp_path, {"model_type": kind, **keys})
    ours = build_module(model, TrainingSpec(), ShardContext(dtype=torch.float32))
    weights = weights_of(theirs, model)
    own = dict(ours.named_parameters())
    assert own.keys() == weights.keys()
    with torch.no_grad():
        for key, value in weights.items():
            own[key][: len(value)].copy_(value)
    assert_equal_logits(ours, theirs, model.vocab)


@pytest.mark.parametrize("name", READ)
def test_logits_of_files_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    kind, keys = CONFIGS[name]
    theirs = drawn(name)
    theirs.save_pretrained(tmp_path)
    model = model_of(tmp_path, {"model_type": kind, **keys})
    ours = build_module(model, TrainingSpec(), ShardContext(dtype=torch.float32))
    load_chunks([ours], model, tmp_path)
    assert_equal_logits(ours, theirs, model.vocab)


def drawn(name: str) -> Any:
    """transformers' own model, with weights that are wider than at a start."""
    kind, keys = CONFIGS[name]
    torch.manual_seed(len(name))
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **keys)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return theirs


@torch.no_grad()
def assert_equal_logits(ours: Any, theirs: Any, vocab: int) -> None:
    tokens = torch.randint(0, vocab, (2, 16), generator=torch.Generator().manual_seed(7))
    said = ours(Batch(torch.arange(2), {"tokens": tokens}))[..., :vocab]
    torch.testing.assert_close(said, theirs(tokens).logits, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_not_run_is_said(tmp_path: Path, name: str) -> None:
    kind, keys = CONFIGS[name]
    model = model_of(tmp_path, {"model_type": kind, **keys})
    checks = list(not_launched(JobSpec(model=model)))
    assert [check.where for check in checks][:1] == [
        f"model.{key}" for key in [ONLY_PLANNED.get(name)] if key
    ]
