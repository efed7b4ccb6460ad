"""Models by their id: a preset's, else a config.json that lies in a cache; a path comes first.

By hand: without ./Qwen/Qwen2.5-7B, `model = "Qwen/Qwen2.5-7B"` in jobs/a.toml is the preset
qwen2.5-7b; with jobs/Qwen/Qwen2.5-7B/config.json it is that file.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpctl.core.errors import InputError, Issue
from mpctl.plan.batch.answers import answers
from mpctl.plan.planning.plan import load_plan
from mpctl.spec.load import load_job
from mpctl.spec.model import ModelSpec
from mpctl.spec.presets import VARIABLE

COMMIT = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory of a user without caches."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in (VARIABLE, "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def place(path: Path, *, layers: int = 3) -> None:
    """A config.json of so many layers."""
    config = {"model_type": "gpt2", "n_layer": layers, "n_embd": 8, "n_head": 2, "vocab_size": 9}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config | {"n_positions": 8}), "utf-8")


def model_of(name: str, source: str | None = None) -> ModelSpec:
    model = load_job(source, {} if source else {"model": name}).model
    assert model is not None
    return model


def issue_of(name: str) -> Issue:
    with pytest.raises(InputError) as caught:
        load_job(None, {"model": name})
    (issue,) = caught.value.issues
    return issue


def test_a_job_a_batch_and_the_library_take_an_id(here: Path) -> None:
    (here / "jobs").mkdir()
    for text in ('model = "Qwen/Qwen2.5-0.5B"', '[model]\npreset = "Qwen/Qwen2.5-0.5B"'):
        (here / "jobs/a.toml").write_text(text, "utf-8")
        assert model_of("", "jobs/a.toml").name == "qwen2.5-0.5b"
    names = ("Qwen/Qwen2.5-0.5B", "qwen2.5-0.5b")
    jobs = [{"model": name, "cluster": {"nodes": 1, "gpus_per_node": 1}} for name in names]
    by_id, by_name = answers([json.dumps(job).encode() for job in jobs], folder=here / "jobs")
    assert by_id["peak_memory_bytes"] is not None and by_id == by_name
    assert load_plan(None, {"model": "Qwen/Qwen2.5-0.5B", "nodes": 1}).job.model.layers == 24
    changed = load_job(None, {"model.preset": "qwen/QWEN3-8B", "model.layers": 4}).model
    assert changed is not None and (changed.layers, changed.hidden) == (4, 4096)


def test_a_path_comes_before_an_id(here: Path) -> None:
    place(here / "jobs/Qwen/Qwen2.5-7B/config.json", layers=5)
    (here / "jobs/a.toml").write_text('model = "Qwen/Qwen2.5-7B"', "utf-8")
    assert model_of("", "jobs/a.toml").layers == 5
    assert model_of("Qwen/Qwen2.5-7B").layers == 28
    place(here / "Qwen/Qwen2.5-7B/config.json", layers=7)
    assert model_of("Qwen/Qwen2.5-7B").layers == 7


def test_a_preset_of_one_s_own_answers_to_the_ids_that_it_names(here: Path) -> None:
    own = here / "presets/models/mine.toml"
    own.parent.mkdir(parents=True)
    own.write_text('hub_ids = ["ours/Base"]\npreset = "gpt2"\nlayers = 2\n', "utf-8")
    assert model_of("OURS/base") == model_of("mine")
    assert model_of("ours/base").layers == 2
    own.write_text('hub_ids = "ours/Base"\npreset = "gpt2"\n', "utf-8")
    assert issue_of("mine").message == "hub_ids: it must be a list of texts"
    own.write_text('# ours/base\n= "gpt2"\n', "utf-8")
    assert issue_of("ours/base").rule == "unknown-preset"


@pytest.mark.parametrize("variable", ["", "HF_HOME", "HF_HUB_CACHE"])
def test_what_hf_download_fetched_is_found(here: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    cache = here / "cache/huggingface/hub"
    if variable:
        monkeypatch.setenv(variable, str(here / "elsewhere"))
        cache = here / "elsewhere" / ("hub" if variable == "HF_HOME" else "")
    folder = cache / "models--some--Model.1"
    place(folder / "snapshots" / COMMIT / "config.json")
    assert issue_of("some/Model.1").rule == "unknown-preset"
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT, "utf-8")
    model = model_of("some/Model.1")
    assert (model.layers, model.name) == (3, "Model.1")
    (folder / "refs" / "main").write_text("../../../other", "utf-8")
    assert issue_of("some/Model.1").rule == "unknown-preset"


def test_an_unknown_id_says_which_are_known_and_how_to_fetch_its_config() -> None:
    issue = issue_of("Qwen/Qwen2.5-Coder-7B")
    assert issue.where == "model" and "'Qwen/Qwen2.5-Coder-7B'" in issue.message
    assert "Qwen/Qwen2.5-7B" in issue.hint
    assert "`hf download Qwen/Qwen2.5-Coder-7B config.json`" in issue.hint
    assert "`mpctl plan --model Qwen/Qwen2.5-Coder-7B --fetch`" in issue.hint


def test_a_model_s_name_without_its_owner_and_an_id_as_a_path_have_a_way_out() -> None:
    assert "use qwen2.5-7b, " in issue_of("Qwen2.5-7B").hint
    with pytest.raises(InputError) as caught:
        load_job(None, {"model.hf_config": "Qwen/Qwen2.5-7B"})
    assert "an id goes by model.preset" in caught.value.issues[0].hint


@pytest.mark.parametrize("name", ["./a/b", "a/b/c", "/a/b", "a/b.toml", "a/../b", "~/b", "a/-b"])
def test_a_path_is_no_id(name: str) -> None:
    assert "hf download" not in issue_of(name).hint


@pytest.mark.parametrize("table", ["cluster", "training.runtime"])
def test_an_id_is_a_model_s_alone(table: str) -> None:
    with pytest.raises(InputError) as caught:
        load_job(None, {table: "Qwen/Qwen2.5-7B"})
    assert "hf download" not in caught.value.issues[0].hint
