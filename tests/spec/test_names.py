"""Settings by short names, and hints for the names of other software."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from mpctl.core.errors import InputError
from mpctl.plan.batch.rows import load_row
from mpctl.plan.planning.plan import load_plan
from mpctl.plan.search.request import FIELDS, read_request
from mpctl.spec.families import builtin_families, family_synonyms
from mpctl.spec.issues import nearest
from mpctl.spec.load import job_from_raw, load_job, parse_settings
from mpctl.spec.names import TABLES, full_name, keys_at, with_full_names
from mpctl.spec.presets import preset_names
from mpctl.spec.synonyms import BY_SETTING, MEANT, VALUES
from tests.reference.keys import job_tables

LITERALS = {
    ".".join((*path, key)): {
        word
        for part in (field.annotation, *get_args(field.annotation))
        for word in get_args(part)
        if isinstance(word, str)
    }
    for path, table in job_tables()
    for key, field in table.model_fields.items()
}


@pytest.mark.parametrize(
    ("short", "full"),
    [
        ("tp", "parallel.tp"),
        ("dp", "parallel.dp"),
        ("zero", "parallel.zero"),
        ("dtype", "training.dtype"),
        ("recompute", "training.recompute"),
        ("micro_batch_size", "training.micro_batch_size"),
        ("micro-batch-size", "training.micro_batch_size"),
        ("seq_length", "model.seq_length"),
        ("gpus-per-node", "cluster.gpus_per_node"),
        ("parallel.tp", "parallel.tp"),
        ("model", "model"),
        ("name", "name"),  # the job's own
        ("device", "device"),  # of the cluster or of the launch
        ("tq", "tq"),
    ],
)
def test_a_key_of_one_table_alone_is_a_name(short: str, full: str) -> None:
    assert full_name(short) == full


def test_set_fix_and_compare_name_settings_alike() -> None:
    typed = parse_settings(["tp=1", "micro-batch-size=4", "training.steps=5", "dtype=bf16"])
    job = load_job("demo", typed)
    assert (job.parallel.tp, job.training.micro_batch_size, job.training.dtype) == (1, 4, "bf16")
    asked = read_request("demo", {}, ["tp=1", "seq_length=64"], {})
    assert asked.fixed == {"tp": 1} and asked.job.model and asked.job.model.seq_length == 64


@pytest.mark.parametrize("axis", FIELDS)
def test_every_axis_of_a_search_is_a_short_name(axis: str) -> None:
    assert full_name(axis).endswith(f".{axis}")


def test_the_later_of_two_names_of_a_setting_wins() -> None:
    assert parse_settings(["tp=2", "parallel.tp=4"]) == {"parallel.tp": 4}


def test_a_line_of_a_batch_may_use_short_names() -> None:
    short = {"model": "gpt2", "layers": 4, "tp": 2, "cluster": {"nodes": 2}, "gpus_per_node": 4}
    assert with_full_names(short) == {
        "model": {"preset": "gpt2", "layers": 4},
        "parallel": {"tp": 2},
        "cluster": {"nodes": 2, "gpus_per_node": 4},
    }
    with pytest.raises(InputError) as caught:
        with_full_names({"tp": 2, "parallel": {"tp": 4}})
    assert [(i.rule, i.where) for i in caught.value.issues] == [("given-twice", "tp")]


GIVEN: dict[str, Any] = {
    "preset": "demo",
    "tp": 1,
    "micro-batch-size": 4,
    "training.steps": 5,
    "runtime": "fsdp",
    "cluster.device.memory_bytes": 10**9,
    "model": {"layers": 2},
    "seq_length": 64,
}
NESTED = {
    "preset": "demo",
    "parallel": {"tp": 1},
    "training": {"micro_batch_size": 4, "steps": 5, "runtime": "fsdp"},
    "cluster": {"device": {"memory_bytes": 10**9}},
    "model": {"layers": 2, "seq_length": 64},
}


def test_every_door_takes_the_same_names(tmp_path: Path) -> None:
    """--set, a file of TOML and one of JSON, a line of a batch, a function and raw tables."""
    meant = job_from_raw(NESTED, {})
    assert with_full_names(GIVEN) == NESTED
    assert job_from_raw(GIVEN, {}) == meant
    assert load_row(GIVEN).job == meant
    settings = {key: value for key, value in GIVEN.items() if key not in ("preset", "model")}
    settings["layers"] = 2
    assert load_job("demo", settings) == meant
    assert load_plan("demo", {**settings, "runtime": "mpctl", "tp": 2}).job.parallel.tp == 2
    asked = read_request("demo", {"tp": 1, "steps": 5}, [], {})
    assert (asked.fixed, asked.typed) == ({"tp": 1}, {"parallel.tp": 1, "training.steps": 5})
    (tmp_path / "job.json").write_text(json.dumps(GIVEN))
    lines = [f'"{key}" = {toml(value)}' for key, value in GIVEN.items()]
    (tmp_path / "job.toml").write_text("\n".join(lines))
    for name in ("job.json", "job.toml"):
        assert load_job(str(tmp_path / name)) == meant
    words = [f"{key}={toml(value)}" for key, value in settings.items()]
    assert load_job("demo", parse_settings(words)) == meant


def toml(value: Any) -> str:
    return "{layers = 2}" if isinstance(value, dict) else json.dumps(value)


def test_paths_under_short_names_are_relative_to_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "presets" / "jobs").mkdir(parents=True)
    text = 'preset = "demo"\ncorpus = ["texts"]\n'
    (tmp_path / "presets" / "jobs" / "mine.toml").write_text(text)
    (tmp_path / "other.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert load_job("mine").data.corpus == ["presets/jobs/texts"]
    assert load_job(None, {"preset": "mine"}).data.corpus == ["presets/jobs/texts"]
    assert load_job(str(tmp_path / "other.toml")).data.corpus == [str(tmp_path / "texts")]


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"tp": 2, "parallel.tp": 4}, "tp"),
        ({"parallel.tp": 4, "tp": 2}, "tp"),
        ({"micro-batch-size": 2, "micro_batch_size": 2}, "micro_batch_size"),
    ],
)
def test_a_setting_under_two_names_is_refused_by_every_door(given: dict[str, Any], where: str) -> None:
    doors: list[Callable[[], object]] = [
        lambda: load_job("demo", given),
        lambda: load_plan("demo", given),
        lambda: read_request("demo", given, [], {}),
        lambda: job_from_raw(given, {}),
        lambda: load_row(given),
    ]
    for door in doors:
        with pytest.raises(InputError) as caught:
            door()
        assert [(i.rule, i.where) for i in caught.value.issues] == [("given-twice", where)]


def test_a_name_of_many_dots_is_no_setting() -> None:
    with pytest.raises(InputError) as caught:
        job_from_raw({"a." * 100_000 + "b": 1}, {})
    assert [issue.rule for issue in caught.value.issues] == ["unknown-key"]


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("training.lr", "training.learning_rate"),
        ("lr", "training.learning_rate"),
        ("tensor_parallel", "parallel.tp"),
        ("pipeline-parallel", "parallel.pp"),
        ("parallel.tensor_model_parallel_size", "parallel.tp"),
        ("parallelism.tensor_parallel_degree", "parallel.tp"),
        ("training.batch_size", "training.global_batch_size"),
        ("zero_optimization", "parallel.zero"),
        ("model.num_hidden_layers", "model.layers"),
        ("model.n_embd", "model.hidden"),
        ("max_grad_norm", "training.clip_norm"),
        ("per_device_train_batch_size", "training.micro_batch_size"),
        ("device", "cluster.device or launch.device"),
        ("tq", "parallel.tp"),
    ],
)
def test_names_of_other_software_are_hinted(name: str, setting: str) -> None:
    with pytest.raises(InputError) as caught:
        load_job(None, {name: 1})
    (issue,) = (issue for issue in caught.value.issues if issue.rule == "unknown-key")
    assert setting in issue.hint


@pytest.mark.parametrize("setting", BY_SETTING)
def test_what_a_synonym_means_is_a_setting(setting: str) -> None:
    *table, key = setting.split(".")
    assert key in keys_at(table)


def test_a_synonym_is_no_setting_itself_and_means_one_thing() -> None:
    named = [name for names in BY_SETTING.values() for name in names]
    assert len(named) == len(set(named))
    assert not {name for name in MEANT if full_name(name) != name and "." not in name} - {
        key for key in MEANT if f"model.{key}" == MEANT[key]
    }


@pytest.mark.parametrize(
    ("setting", "value", "meant"),
    [
        ("model.family", "llama", "llama-3-8b"),
        ("model.family", "gpt2", "gpt"),
        ("training.dtype", "bfloat16", "bf16"),
        ("training.dtype", "torch.float16", "fp16"),
        ("training.recompute", True, "full"),
        ("parallel.schedule", "1F1B", "1f1b"),
        ("parallel.schedule", "zero_bubble", "zero-bubble"),
        ("model.position", "rope", "rotary"),
        ("launch.device", "gpu", "cuda"),
    ],
)
def test_values_of_other_software_are_hinted(setting: str, value: object, meant: str) -> None:
    with pytest.raises(InputError) as caught:
        load_job("demo", {setting: value})
    assert meant in caught.value.issues[0].hint


@pytest.mark.parametrize("setting", [*VALUES, "model.family"])
def test_what_a_value_means_is_legal(setting: str) -> None:
    synonyms = family_synonyms() if setting == "model.family" else VALUES[setting]
    legal = set({**LITERALS, "model.family": builtin_families(), "training.runtime": preset_names("runtimes")}[setting])
    flags = {"true", "false"} if setting in ("model.qk_norm", "model.bias") else set()
    assert synonyms.keys() <= legal | flags
    named = [name for names in synonyms.values() for name in names]
    assert len(named) == len(set(named)) and not legal & set(named)


def test_a_name_like_no_other_lists_the_table() -> None:
    assert nearest(["parallel", "zzzzzz"]).startswith("keys here: tp, cp")
    assert all(keys_at([table]) for table in TABLES)
