"""From files, presets, flags and `--set` to one job, or to every issue at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpctl.errors import InputError, Issue
from mpctl.planning.plan import load_plan
from mpctl.spec.load import job_from_raw, load_job, load_partial, parse, parse_settings
from mpctl.spec.model import ModelSpec
from mpctl.spec.presets import preset_names

SHAPE = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 100, "seq_length": 16}


def issues_of(source: str | None = None, **overrides: Any) -> dict[str, Issue]:
    """The issues of a bad job by setting; keyword `parallel__tp` stands for `parallel.tp`."""
    with pytest.raises(InputError) as caught:
        load_job(source, {key.replace("__", "."): value for key, value in overrides.items()})
    assert caught.value.exit_code == 2
    return {issue.where: issue for issue in caught.value.issues}


def write(path: Path, text: str) -> str:
    path.write_text(text, "utf-8")
    return str(path)


# ---------------------------------------------------------------- issues


@pytest.mark.parametrize(
    ("setting", "nearest"),
    [
        ("parallel.tpp", "parallel.tp"),
        ("training.micro_batchsize", "training.micro_batch_size"),
        ("training.learnin_rate", "training.learning_rate"),
        ("cluster.gpu_per_node", "cluster.gpus_per_node"),
        ("cluster.intra_node.bandwith", "cluster.intra_node.bandwidth"),
        ("cluster.device.memory_byte", "cluster.device.memory_bytes"),
        ("paralel", "parallel"),
        ("tp", "parallel.tp"),  # right name, wrong table
        ("launch.micro_batch_size", "training.micro_batch_size"),
    ],
)
def test_unknown_key_names_the_nearest(setting: str, nearest: str) -> None:
    issue = issues_of(None, **{setting.replace(".", "__"): 1})[setting]
    assert issue.rule == "unknown-key"
    assert nearest in issue.hint


def test_unknown_key_without_a_near_one_lists_the_table() -> None:
    issue = issues_of(parallel__zzzzzz=1)["parallel.zzzzzz"]
    assert "keys here: tp, pp" in issue.hint


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("parallel.tp", "2"),
        ("parallel.tp", 2.0),
        ("parallel.tp", True),
        ("parallel.tp", 0),
        ("parallel.zero", 4),
        ("parallel.sequence_parallel", 1),
        ("parallel.schedule", "zigzag"),
        ("training.dtype", "bf17"),
        ("training.dropout", 1.0),
        ("training.learning_rate", float("nan")),
        ("training.seed", -1),
        ("data.corpus", "python-stdlib"),
        ("data.corpus", []),
        ("cluster.intra_node.bandwidth", float("inf")),
        ("cluster.device", 5),
        ("training", "fast"),
    ],
)
def test_wrong_type_or_value_is_named(setting: str, value: Any) -> None:
    issue = issues_of("demo", **{setting.replace(".", "__"): value})[setting]
    assert issue.rule == "bad-value"
    if isinstance(value, str | int | float):
        assert repr(value) in issue.message


def test_an_int_is_fine_where_a_float_is_wanted() -> None:
    assert load_job(None, {"training.clip_norm": 1}).training.clip_norm == 1.0


def test_all_issues_are_reported_at_once() -> None:
    found = issues_of(
        model="no-such-model",
        cluster__device="no-such-device",
        parallel__tpp=2,
        training__dtype="bf17",
        training__steps="many",
    )
    assert {where: issue.rule for where, issue in found.items()} == {
        "model": "unknown-preset",
        "cluster.device": "unknown-preset",
        "parallel.tpp": "unknown-key",
        "training.dtype": "bad-value",
        "training.steps": "bad-value",
    }


def test_what_is_legal_is_read_in_spite_of_the_rest() -> None:
    loaded = load_partial("demo", {"parallel.tpp": 2, "training.steps": "many"})
    assert {issue.where for issue in loaded.issues} == {"parallel.tpp", "training.steps"}
    assert loaded.tables_with_errors == {
        "training"
    }  # an unknown key casts no doubt on the known ones
    assert loaded.job is not None
    assert (loaded.job.parallel.tp, loaded.job.training.dropout) == (2, 0.1)


def test_missing_model_keys_are_reported_without_the_derived_ones() -> None:
    found = issues_of(model__layers=2)
    assert set(found) == {f"model.{key}" for key in ("hidden", "heads", "vocab", "seq_length")}
    assert {issue.rule for issue in found.values()} == {"missing"}


@pytest.mark.parametrize("source", ["demo", None])
def test_a_setting_below_a_value_is_refused(source: str | None) -> None:
    issue = issues_of(source, parallel__tp__x=1)["parallel.tp"]
    assert (issue.rule, issue.message[:23]) == ("bad-value", "a table is not allowed:")


@pytest.mark.parametrize(
    ("setting", "value"),
    [("hidden", "x"), ("hidden", -4), ("hidden", True), ("heads", 0), ("heads", []),
     ("seq_length", 2.0)],
)  # fmt: skip
def test_what_follows_from_a_bad_value_is_not_reported_again(setting: str, value: Any) -> None:
    assert set(issues_of(model={**SHAPE, setting: value})) == {f"model.{setting}"}
    assert set(issues_of("demo", **{f"model__{setting}": value})) == {f"model.{setting}"}


def test_a_bad_key_of_a_free_table_is_named() -> None:
    issue = issues_of("demo", cluster__device__peak_flops__bf17=1e12)[
        "cluster.device.peak_flops.bf17"
    ]
    assert issue.rule == "bad-value"
    assert issue.message.startswith("'bf17' is not allowed as a key: input should be 'fp64'")


@pytest.mark.parametrize("value", [16**5000, "x" * 10_000], ids=["int", "str"])
def test_a_value_beyond_all_measure_is_shown_short(value: Any) -> None:
    issue = issues_of(training__dtype=value)["training.dtype"]
    assert len(issue.message) < 200


def test_rules_are_asked_beside_a_bad_required_key() -> None:
    loaded = load_partial("demo", {"cluster.intra_node.bandwidth": -1, "model.hidden": "x"})
    assert loaded.job is not None
    assert (loaded.job.parallel.tp, loaded.job.model) == (2, None)
    assert loaded.tables_with_errors == {"cluster", "model"}


def test_what_starts_a_table_is_suggested() -> None:
    assert "model.preset" in issues_of(model__presett="gpt2")["model.presett"].hint


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("absent.toml", None, "no-such-file"),
        ("broken.toml", "[parallel\ntp = 2", "bad-syntax"),
        ("broken.json", "{", "bad-syntax"),
        ("list.json", "[1]", "bad-syntax"),
        ("deep.json", "[" * 100_000, "bad-syntax"),
        ("deep.toml", "a = " + "[" * 100_000, "bad-syntax"),
    ],
)
def test_a_bad_file_is_an_issue(tmp_path: Path, name: str, text: str | None, rule: str) -> None:
    path = str(tmp_path / name) if text is None else write(tmp_path / name, text)
    assert issues_of(path)[path].rule == rule


@pytest.mark.parametrize("source", ["two-nodes-16-gpu", "", "x" * 5000])
def test_an_unknown_job_names_the_presets(source: str) -> None:
    issue = issues_of(source)["JOB"]
    assert issue.rule == "no-such-job"
    assert "two-nodes-16-gpus" in issue.hint


# ---------------------------------------------------------------- precedence


def test_own_keys_beat_the_preset_and_overrides_beat_both(tmp_path: Path) -> None:
    path = write(
        tmp_path / "job.toml",
        '[model]\npreset = "gpt2"\nlayers = 4\nheads = 6\n'
        '[cluster]\npreset = "selene"\nnodes = 2\n',
    )
    job = load_job(path, {"model.layers": 3, "cluster.gpus_per_node": 4})
    assert job.model is not None
    assert (job.model.layers, job.model.heads, job.model.hidden) == (3, 6, 768)
    assert (job.cluster.nodes, job.cluster.gpus_per_node) == (2, 4)


def test_an_override_replaces_the_preset_of_a_job() -> None:
    job = load_job("demo", {"model": "gpt2", "training.steps": 3})
    assert job.model is not None
    assert (job.model.name, job.training.steps, job.training.dropout) == ("gpt2", 3, 0.1)


def test_overrides_leave_the_source_alone() -> None:
    raw = {"parallel": {"tp": 2}, "model": dict(SHAPE)}
    job_from_raw(raw, {"parallel.tp": 4, "model.layers": 8})
    assert raw == {"parallel": {"tp": 2}, "model": SHAPE}


def test_a_device_can_be_named_and_then_corrected() -> None:
    job = load_job(None, {"cluster.device": "cpu", "cluster.device.memory_bytes": 1024})
    assert job.cluster.device is not None
    assert (job.cluster.device.kind, job.cluster.device.memory_bytes) == ("cpu", 1024)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("cluster.inter_node.latency", 1e-6),
        ("cluster.intra_node.latency", 1e-6),
        ("cluster.device.memory_bytes", 1024),
    ],
)
def test_a_single_key_of_a_nested_table_beats_the_preset(setting: str, value: float) -> None:
    job = load_job(None, {"cluster": "selene", setting: value})
    _, table, key = setting.split(".")
    assert getattr(getattr(job.cluster, table), key) == value


@pytest.mark.parametrize(
    ("device", "memory"),
    [("h200", 141), ({"preset": "h200"}, 141), ({"memory_bytes": 40 * 2**30}, 40)],
)
def test_a_device_above_a_cluster_preset(device: Any, memory: float) -> None:
    """A name replaces the device of the preset, a table without one corrects it."""
    found = load_job(None, {"cluster.preset": "selene", "cluster.device": device}).cluster
    assert found.nodes == 384
    assert found.device is not None
    assert found.device.memory_bytes == pytest.approx(memory * 2**30, rel=0.08)


@pytest.mark.parametrize("turn", [1, -1])
def test_a_name_counts_before_single_keys_in_any_order(turn: int) -> None:
    typed = [
        ("model.layers", 4), ("cluster.device.memory_bytes", 1024), ("cluster.device", "cpu"),
        ("model", "gpt2"), ("cluster.nodes", 2), ("cluster", "selene"),
    ]  # fmt: skip
    job = load_job("demo", dict(typed[::turn]))
    assert job.model is not None
    assert (job.model.name, job.model.layers) == ("gpt2", 4)
    assert (job.cluster.nodes, job.cluster.gpus_per_node) == (2, 8)
    assert job.cluster.device is not None
    assert (job.cluster.device.kind, job.cluster.device.memory_bytes) == ("cpu", 1024)


def test_a_table_given_whole_replaces_the_one_below() -> None:
    job = load_job("demo", {"model": {**SHAPE, "activation": "relu"}, "model.layers": 3})
    assert (
        job.model == load_job(None, {"model": {**SHAPE, "activation": "relu", "layers": 3}}).model
    )


def test_a_preset_and_a_config_at_once_are_refused() -> None:
    found = issues_of(model="gpt2", model__hf_config="config.json", parallel__tpp=1)
    assert {where: issue.rule for where, issue in found.items()} == {
        "model.hf_config": "two-bases",
        "parallel.tpp": "unknown-key",
    }


# ---------------------------------------------------------------- a job that starts from another


def test_a_file_starts_from_a_job_preset(tmp_path: Path) -> None:
    path = write(
        tmp_path / "job.toml",
        'preset = "demo"\n[training]\nsteps = 3\n[model]\nlayers = 2\n[cluster.intra_node]\n'
        "latency = 1e-6\n",
    )
    job, demo = load_job(path, {"training.seed": 1}), load_job("demo")
    assert job.model is not None and demo.model is not None
    assert job.training == demo.training.model_copy(update={"steps": 3, "seed": 1})
    assert job.model == demo.model.model_copy(update={"layers": 2})
    assert (job.data, job.parallel, job.launch) == (demo.data, demo.parallel, demo.launch)
    assert job.cluster.intra_node is not None and demo.cluster.intra_node is not None
    assert job.cluster.intra_node.bandwidth == demo.cluster.intra_node.bandwidth


def test_a_file_that_starts_from_nothing_known(tmp_path: Path) -> None:
    path = write(tmp_path / "job.toml", 'preset = "dem"\n')
    assert "demo" in issues_of(path)["preset"].hint


# ---------------------------------------------------------------- what follows from the shape


@pytest.mark.parametrize("source", ["preset", "job.json"])
def test_what_follows_from_the_shape_follows_the_override(source: str, tmp_path: Path) -> None:
    start: dict[str, Any] = {"model": "t5-base"}  # head_dim 64 and ffn 3072 stand in its file
    path = write(tmp_path / "job.json", load_job(None, start).model_dump_json())
    changes = {"model.hidden": 1024, "model.heads": 8, "model.seq_length": 256}
    model = (
        load_job(None, start | changes) if source == "preset" else load_job(path, changes)
    ).model
    assert model is not None
    assert (model.ffn, model.head_dim, model.kv_heads, model.max_positions) == (4096, 128, 8, 256)


def test_what_was_chosen_stays() -> None:
    model = load_job(None, {"model": "llama-3-8b", "model.hidden": 2048}).model
    assert model is not None
    assert (model.ffn, model.kv_heads, model.head_dim) == (14336, 8, 64)
    model = load_job(None, {"model": "gpt2", "model.ffn": 3072, "model.hidden": 1536}).model
    assert model is not None
    assert (model.ffn, model.head_dim) == (3072, 128)  # typed beside hidden, not below it


@pytest.mark.parametrize("source", ["gpt2", "t5-base"])
def test_heads_that_do_not_divide_hidden_are_an_issue_not_a_floor(source: str) -> None:
    with pytest.raises(InputError) as caught:
        load_plan(None, {"model": source, "model.heads": 7})
    (issue,) = [i for i in caught.value.issues if i.where == "model.heads"]
    assert issue.rule == "heads-divide-hidden"
    assert "7" in issue.message and "768" in issue.message
    load_plan(None, {"model": "gpt2", "model.heads": 7, "model.head_dim": 64})
    with pytest.raises(AssertionError):
        ModelSpec.model_validate({**SHAPE, "heads": 3}).head_size  # noqa: B018


# ---------------------------------------------------------------- --set


def test_set_reads_toml_values() -> None:
    assert parse_settings(
        [
            "parallel.tp=2",
            "training.learning_rate=1e-3",
            "training.dropout = 0.5",
            "parallel.sequence_parallel=true",
            "model=gpt2",
            "training.dtype='bf16'",
            'data.corpus=["a", "b"]',
            "data.path=/a/b=c",
            "data.max_bytes=8_000_000",
            "name=",
        ]
    ) == {
        "parallel.tp": 2,
        "training.learning_rate": 1e-3,
        "training.dropout": 0.5,
        "parallel.sequence_parallel": True,
        "model": "gpt2",
        "training.dtype": "bf16",
        "data.corpus": ["a", "b"],
        "data.path": "/a/b=c",
        "data.max_bytes": 8_000_000,
        "name": "",
    }


@pytest.mark.parametrize("setting", ["parallel.tp", "=2", ""])
def test_set_without_key_or_value_is_refused(setting: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_settings([setting])
    (issue,) = caught.value.issues
    assert (issue.rule, issue.where) == ("bad-set", "--set")
    assert repr(setting) in issue.message


def test_set_reaches_the_job() -> None:
    job = load_job("demo", parse_settings(["parallel.tp=1", "training.dropout=0", "model=gpt2"]))
    assert (job.parallel.tp, job.training.dropout) == (1, 0.0)
    assert job.parallel.dp == 2


# ---------------------------------------------------------------- job.json


@pytest.mark.parametrize("name", preset_names("jobs"))
def test_job_json_round_trip(name: str, tmp_path: Path) -> None:
    job = load_job(name)
    text = job.model_dump_json()
    assert parse(json.loads(text)) == job
    assert load_job(write(tmp_path / "job.json", text)) == job


def test_a_job_without_a_model_survives_the_round_trip() -> None:
    job = load_job(None, {"cluster.nodes": 2, "cluster.gpus_per_node": 8, "parallel.tp": 2})
    assert parse(json.loads(job.model_dump_json())) == job
