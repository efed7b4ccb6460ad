"""Loading a job: every issue at once, each named by its setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpctl.core.errors import InputError
from mpctl.spec.load import load_job, load_partial
from tests.spec.jobs_on_disk import SHAPE, issues_of, write


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
        ("tpp", "parallel.tp"),
        ("launch.micro_batch_size", "training.micro_batch_size"),
    ],
)
def test_unknown_key_names_the_nearest(setting: str, nearest: str) -> None:
    issue = issues_of(None, **{setting.replace(".", "__"): 1})[setting]
    assert issue.rule == "unknown-key"
    assert nearest in issue.hint


def test_unknown_key_without_a_near_one_lists_the_table() -> None:
    issue = issues_of(parallel__zzzzzz=1)["parallel.zzzzzz"]
    assert "keys here: tp, cp" in issue.hint


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
    assert loaded.tables_with_errors == {"training"}  # an unknown key casts no doubt on the known ones
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
    [("hidden", "x"), ("hidden", -4), ("hidden", True), ("heads", 0), ("heads", []), ("seq_length", 2.0)],
)
def test_what_follows_from_a_bad_value_is_not_reported_again(setting: str, value: Any) -> None:
    assert set(issues_of(model={**SHAPE, setting: value})) == {f"model.{setting}"}
    assert set(issues_of("demo", **{f"model__{setting}": value})) == {f"model.{setting}"}


def test_a_bad_key_of_a_free_table_is_named() -> None:
    issue = issues_of("demo", cluster__device__peak_flops__bf17=1e12)["cluster.device.peak_flops.bf17"]
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
        ("empty.toml", "# nothing yet\n", "empty-job"),
        ("empty.json", "{}", "empty-job"),
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


def test_a_table_beside_a_name_of_the_same_key_says_where_the_name_goes(tmp_path: Path) -> None:
    path = write(tmp_path / "job.toml", 'cluster = "selene"\n[cluster]\nnodes = 2\n')
    issue = issues_of(path)[path]
    assert issue.rule == "bad-syntax"
    assert "`preset = NAME` in [cluster]" in issue.hint
    twice = write(tmp_path / "twice.toml", "name = 'a'\nname = 'b'\n")
    assert issues_of(twice)[twice].hint == ""


@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [
        ("qk_norm", "yes", "use true"),
        ("qk_norm", 1, ""),
        ("bias", "output", "use attention"),
        ("activation", "squared_relu", "use relu2"),
    ],
)
def test_a_flag_or_word_is_one_error_at_its_key(key: str, value: object, meant: str) -> None:
    with pytest.raises(InputError) as caught:
        load_job(None, {"model": "demo-llama", f"model.{key}": value})
    (issue,) = caught.value.issues
    assert (issue.rule, issue.where, issue.hint) == ("bad-value", f"model.{key}", meant)
    assert key == "activation" or "should be true, false" in issue.message
