"""`--set` and job.json: values as text, and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpctl.core.errors import InputError
from mpctl.spec.load import load_job, parse, parse_settings
from mpctl.spec.presets import preset_names
from tests.spec.jobs_on_disk import write


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


@pytest.mark.parametrize("setting", ["data.corpus=texts", "launch.metrics=9400"])
def test_a_value_of_another_type_has_a_way_out_that_works(setting: str) -> None:
    """As it is written: the setting in its place is read."""
    with pytest.raises(InputError) as refused:
        load_job("demo", parse_settings([setting]))
    (issue,) = refused.value.issues
    way_out = issue.hint.partition("--set '")[2].removesuffix("'")
    assert load_job("demo", parse_settings([way_out]))


def test_set_reaches_the_job() -> None:
    job = load_job("demo", parse_settings(["parallel.tp=1", "training.dropout=0", "model=gpt2"]))
    assert (job.parallel.tp, job.training.dropout) == (1, 0.0)
    assert job.parallel.dp == 2


@pytest.mark.parametrize("name", preset_names("jobs"))
def test_job_json_round_trip(name: str, tmp_path: Path) -> None:
    job = load_job(name)
    text = job.model_dump_json()
    assert parse(json.loads(text)) == job
    read = load_job(write(tmp_path / "job.json", text))
    if job.training.init_from is None:
        assert read == job
    else:  # a path follows the folder of its file
        assert read.training.init_from == str(tmp_path / job.training.init_from)


def test_a_job_without_a_model_survives_the_round_trip() -> None:
    job = load_job(None, {"cluster.nodes": 2, "cluster.gpus_per_node": 8, "parallel.tp": 2})
    assert parse(json.loads(job.model_dump_json())) == job
