"""The parameters of each family of Hugging Face: counted by its own model, and as published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mpctl.rules.model import USUAL_LENGTH
from mpctl.spec.load import load_job
from mpctl.spec.model import ModelSpec
from mpctl.spec.paths import is_hub_id
from mpctl.spec.presets import hub_ids, preset_files
from tests.families.hf_configs import CONFIGS
from tests.families.hub_models import MODELS
from tests.families.ids_page import parameters


def model_of(folder: Path, config: dict[str, Any]) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    model = load_job(None, {"model.hf_config": str(folder)}).model
    assert model is not None
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_the_table_has_the_parameters_of_transformers_own_model(tmp_path: Path, name: str) -> None:
    kind, keys = CONFIGS[name]
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **keys))
    ours = model_of(tmp_path, {"model_type": kind, **keys})
    assert parameters(ours) == sum(weight.numel() for weight in theirs.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_a_released_model_has_its_published_parameters(tmp_path: Path, name: str) -> None:
    published, config = MODELS[name]
    assert parameters(model_of(tmp_path, config)) == published


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_transformers_own_model_of_that_config_has_as_many(name: str) -> None:
    published, config = MODELS[name]
    keys = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **keys)
        )
    assert sum(weight.numel() for weight in theirs.parameters()) == published


@pytest.mark.parametrize("name", MODELS)
def test_a_preset_is_the_shape_of_its_config(tmp_path: Path, name: str) -> None:
    """The length of a sample is the preset's own: at most that of pre-training."""
    theirs = model_of(tmp_path, MODELS[name][1])
    ours = load_job(None, {"model": name}).model
    assert ours is not None and ours.seq_length == min(theirs.seq_length, USUAL_LENGTH)
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
