"""What our module computes for families of Hugging Face is what transformers computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mpctl.model.families import get_table
from mpctl.plan.planning.plan import make_plan
from mpctl.plan.rules.launched import not_launched
from mpctl.plan.rules.model import USUAL_LENGTH
from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_job
from mpctl.spec.model import ModelSpec
from mpctl.spec.paths import is_hub_id
from mpctl.spec.presets import hub_ids, preset_files
from mpctl.spec.training import TrainingSpec
from mpctl.train.families.implementation import Batch, build_module
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.runtime.model_weights import load_chunks
from tests.model.families.hf_configs import CONFIGS, EXPERTS
from tests.model.families.hf_weights import weights_of
from tests.model.families.hub_models import MODELS
from tests.model.families.ids_page import parameters

# Planned and not run, with the key that says why.
ONLY_PLANNED = {
    "gemma2": "attention_softcap",
    "phi": "head_bias",
    "phi with norms of heads": "head_bias",
    "llama with linear scaling": "rotary_scaling_type",
    "gpt-oss": "attention_sinks",
}
OWN_CLASS = {"kimi_k2": "deepseek_v3"}  # whose model transformers has under another name
PRETRAINED_AT_4096 = ("deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "kimi-k2")
# Billions of parameters, all and active for a token, as published.
ACTIVE = {
    "mixtral-8x7b": (46.7, 12.9),
    "mixtral-8x22b": (140.6, 39.1),
    "qwen1.5-moe-a2.7b": (14.3, 2.7),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235, 22),
    "olmoe-1b-7b": (6.9, 1.3),
    "gpt-oss-20b": (20.91, 3.61 + 0.58),
    "gpt-oss-120b": (116.83, 5.13 + 0.58),  # and words
    "deepseek-v2": (236, 21),
    "deepseek-v3": (671, 37),
    "kimi-k2": (1040, 32.6),
}
READ = ("gpt2", "gpt2 with a head of its own")  # from the files of transformers
RUN = [name for name in CONFIGS if name not in (*ONLY_PLANNED, *READ)]


def transformers_model(kind: str, **keys: Any) -> torch.nn.Module:
    """Imported where it is asked for: every worker collects every test."""
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **keys))


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


@pytest.mark.parametrize("name", [*READ, *(n for n in EXPERTS if n not in ONLY_PLANNED)])
def test_logits_of_files_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    kind, keys = {**CONFIGS, **EXPERTS}[name]
    theirs = drawn(name)
    theirs.save_pretrained(tmp_path)
    model = model_of(tmp_path, {"model_type": kind, **keys})
    ours = build_module(model, TrainingSpec(), ShardContext(dtype=torch.float32))
    load_chunks([ours], model, tmp_path)
    assert_equal_logits(ours, theirs, model.vocab)


def drawn(name: str) -> Any:
    """transformers' own model, with weights that are wider than at a start."""
    kind, keys = {**CONFIGS, **EXPERTS}[name]
    torch.manual_seed(len(name))
    theirs = transformers_model(OWN_CLASS.get(kind, kind), **keys).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return theirs


@torch.no_grad()
def assert_equal_logits(ours: Any, theirs: Any, vocab: int) -> None:
    tokens = torch.randint(0, vocab, (2, 16), generator=torch.Generator().manual_seed(7))
    said = ours(Batch(torch.arange(2), {"tokens": tokens}))[..., :vocab]
    torch.testing.assert_close(said, theirs(tokens).logits, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", [*CONFIGS, *EXPERTS])
def test_what_is_not_run_is_said(tmp_path: Path, name: str) -> None:
    kind, keys = {**CONFIGS, **EXPERTS}[name]
    model = model_of(tmp_path, {"model_type": kind, **keys})
    checks = list(not_launched(JobSpec(model=model)))
    assert [check.where for check in checks][:1] == [f"model.{key}" for key in [ONLY_PLANNED.get(name)] if key]


def model_of(folder: Path, config: dict[str, Any]) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    model = load_job(None, {"model.hf_config": str(folder)}).model
    assert model is not None
    return model


@pytest.mark.parametrize("name", [*CONFIGS, *EXPERTS])
def test_the_table_has_the_parameters_of_transformers_own_model(tmp_path: Path, name: str) -> None:
    kind, keys = {**CONFIGS, **EXPERTS}[name]
    with torch.device("meta"):
        theirs = transformers_model(OWN_CLASS.get(kind, kind), **keys)
    ours = model_of(tmp_path, {"model_type": kind, **keys})
    assert parameters(ours) == sum(weight.numel() for weight in theirs.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_a_released_model_has_its_published_parameters(tmp_path: Path, name: str) -> None:
    published, config = MODELS[name]
    assert parameters(model_of(tmp_path, config)) == published


@pytest.mark.parametrize("name", ACTIVE)
def test_a_mixture_has_its_published_active_parameters(name: str) -> None:
    """Within 2 %: papers count with or without word tables, and round."""
    model = load_job(None, {"model": name}).model
    assert model is not None
    table, (total, active) = get_table(model, tp=1), ACTIVE[name]
    assert table.numel / 1e9 == pytest.approx(total, rel=0.015)
    assert table.active_numel(model.experts_per_token) / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("name", [*ACTIVE, "grok-1", "demo-moe"])
def test_a_mixture_s_preset_is_planned_over_ep(name: str) -> None:
    keys = {"cluster": "dgx-h100", "nodes": 2, "ep": 4, "global_batch_size": 32}
    plan = make_plan(load_job(None, {"model": name, **keys}))
    assert plan.errors == [] and plan.estimate is not None
    assert 0 < plan.estimate.active_parameters < plan.estimate.parameters


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_transformers_own_model_of_that_config_has_as_many(name: str) -> None:
    published, config = MODELS[name]
    keys = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        theirs = transformers_model(OWN_CLASS.get(config["model_type"], config["model_type"]), **keys)
    assert sum(weight.numel() for weight in theirs.parameters()) == published


@pytest.mark.parametrize("name", MODELS)
def test_a_preset_is_the_shape_of_its_config(tmp_path: Path, name: str) -> None:
    """The length of a sample is the preset's own: at most that of pre-training."""
    theirs = model_of(tmp_path, MODELS[name][1])
    ours = load_job(None, {"model": name}).model
    length = min(theirs.seq_length, 4096 if name in PRETRAINED_AT_4096 else USUAL_LENGTH)
    assert ours is not None and ours.seq_length == length
    own = {"name", "source", "seq_length"}
    assert ours.model_dump(exclude=own) == theirs.model_dump(exclude=own)


def test_the_ids_of_presets_are_those_of_one_model_each() -> None:
    """An id in two presets would be whichever comes first."""
    files = preset_files("models").values()
    named = [name.lower() for file in files for name in file.hub_ids()]
    assert len(named) == len(set(named))
    assert set(hub_ids().values()) == set(MODELS)
    assert all(is_hub_id(name) for name in hub_ids())


@pytest.mark.parametrize("name", hub_ids())
def test_an_id_is_its_preset_in_any_case(name: str) -> None:
    model = load_job(None, {"model": name.swapcase()}).model
    assert model is not None and model.name == hub_ids()[name]
