"""A renamed key is read under its old name, with a warning, wherever a job comes from: files,
presets, run directories, lines of a batch, `--set`. The rows are toy ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpctl.core.errors import InputError
from mpctl.plan.batch.answers import answers
from mpctl.plan.planning.plan import load_plan
from mpctl.plan.search.request import read_request
from mpctl.spec import names as renamed
from mpctl.spec.load import load_job, load_partial, parse_settings
from mpctl.spec.names import RENAMED_KEYS, RenamedKey
from mpctl.spec.presets import VARIABLE

KERNELS = "cluster.device.kernels"
ROWS = (
    RenamedKey("training.peak_rate", "training.learning_rate", "9.9"),
    RenamedKey("training.save_after", "checkpoint.interval", "9.9"),
    RenamedKey("cluster.device.hbm_bytes", "cluster.device.memory_bytes", "9.9"),
    RenamedKey(f"{KERNELS}.eight_bits", f"{KERNELS}.narrow.fp8", "9.9"),
)


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renamed, "RENAMED_KEYS", ROWS)


def test_a_file_is_read_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[training]\npeak_rate = 1e-4\n")
    loaded = load_partial(str(path))
    assert loaded.job is not None and loaded.job.training.learning_rate == 1e-4
    assert loaded.issues == ()
    (warning,) = loaded.warnings
    assert warning.where == "training.peak_rate"
    assert "training.learning_rate since version 9.9" in warning.message
    assert load_partial(str(path), {"training.learning_rate": 2e-4}).job == load_job(
        None, {"training.learning_rate": 2e-4}
    )


def test_a_plan_tells_it(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[training]\npeak_rate = 1e-4\n")
    (check,) = load_plan(str(path)).warnings
    assert (check.rule, check.where) == ("renamed-key", "training.peak_rate")


def test_a_run_directorys_job_is_read(tmp_path: Path) -> None:
    job = load_job("demo", {"training.learning_rate": 1e-4}).model_dump()
    job["training"]["peak_rate"] = job["training"].pop("learning_rate")
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job))
    loaded = load_partial(str(path))
    assert loaded.job == load_job("demo", {"training.learning_rate": 1e-4})
    assert loaded.warnings == ()  # a launch wrote it: nobody can mend that


def test_a_key_becomes_one_of_a_table_within(tmp_path: Path) -> None:
    """Beside the keys of that table; also in the job.json that an older version wrote."""
    job = load_job("demo", {"cluster": "selene"}).model_dump()
    kernels = job["cluster"]["device"]["kernels"]
    kernels["eight_bits"] = 0.5
    del kernels["narrow"]["fp8"]
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job))
    loaded = load_partial(str(path))
    assert loaded.issues == () and loaded.job is not None and loaded.job.cluster.device is not None
    narrow = loaded.job.cluster.device.kernels.narrow
    assert (narrow.fp8, narrow.mxfp8) == (0.5, None)
    del kernels["narrow"]  # as it was
    path.write_text(json.dumps(job))
    assert load_partial(str(path)).job == loaded.job
    typed = load_partial(None, {"cluster": "selene", "cluster.device.kernels.eight_bits": 0.5})
    (warning,) = typed.warnings
    assert "cluster.device.kernels.narrow.fp8 since version 9.9" in warning.message


@pytest.mark.parametrize("name", ["training.peak_rate", "peak_rate", "peak-rate"])
def test_set_takes_it(name: str) -> None:
    loaded = load_partial(None, parse_settings([f"{name}=1e-4"]))
    assert loaded.job is not None and loaded.job.training.learning_rate == 1e-4
    assert [warning.where for warning in loaded.warnings] == ["training.peak_rate"]


def test_a_search_tells_it() -> None:
    settings = {"model": "gpt2", "cluster": "selene", "training.peak_rate": 1e-4}
    request = read_request(None, settings, [], {})
    assert request.job.training.learning_rate == 1e-4
    assert [warning.where for warning in request.warnings] == ["training.peak_rate"]


@pytest.mark.parametrize("line", [{"training": {"peak_rate": 1e-4}}, {"peak_rate": 1e-4}])
def test_a_line_of_a_batch_takes_it(line: dict[str, object]) -> None:
    rows = [json.dumps({**line, "model": "gpt2"}).encode()] * 2  # the second one from memory
    for answer in answers(rows):
        (issue,) = [i for i in answer["issues"] if i["rule"] == "renamed-key"]
        assert issue["status"] == "warning" and answer["peak_memory_bytes"]


def test_a_table_within_a_table_and_a_users_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "mine.toml").write_text('[device]\npreset = "h200"\nhbm_bytes = 1024\n')
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    loaded = load_partial(None, {"cluster": "mine"})
    assert loaded.job is not None and loaded.job.cluster.device is not None
    assert loaded.job.cluster.device.memory_bytes == 1024
    assert [warning.where for warning in loaded.warnings] == ["cluster.device.hbm_bytes"]


@pytest.mark.parametrize(
    ("old", "new"), [("training.peak_rate", "training.learning_rate"), ("training.save_after", "checkpoint.interval")]
)
def test_both_names_at_once_are_refused(old: str, new: str) -> None:
    with pytest.raises(InputError) as caught:
        load_job(None, {old: 1, new: 1})
    (issue,) = caught.value.issues
    assert issue.rule == "given-twice" and issue.where == old


def test_a_key_moves_to_another_table(tmp_path: Path) -> None:
    """Beside the keys that are there already; what lies above or below it wins as ever."""
    path = tmp_path / "a.toml"
    path.write_text("[training]\nsave_after = 5\nsteps = 9\n[checkpoint]\nkeep_last = 2\n")
    loaded = load_partial(str(path))
    assert loaded.job is not None and loaded.job.training.steps == 9
    assert (loaded.job.checkpoint.interval, loaded.job.checkpoint.keep_last) == (5, 2)
    (warning,) = loaded.warnings
    assert warning.where == "training.save_after" and "checkpoint.interval" in warning.message
    assert load_job(str(path), {"checkpoint.interval": 7}).checkpoint.interval == 7
    assert load_job(str(path), parse_settings(["save-after=8"])).checkpoint.interval == 8


def test_tables_that_are_none_are_left_to_the_schema() -> None:
    for raw in ({"training": 3}, {"training": {"save_after": 1}, "checkpoint": 3}):
        assert load_partial(None, raw).issues
        assert renamed.with_all_new_names(dict(raw)) == raw
    wrong = {"cluster.device.kernels": {"eight_bits": 0.5, "narrow": 3}}
    assert load_partial(None, {"cluster": "selene", **wrong}).issues


def test_every_row_names_a_key_that_there_is() -> None:
    from mpctl.spec.names import keys_at

    for row in (*RENAMED_KEYS, *ROWS):
        (*today, new), (*before, old) = row.new.split("."), row.old.split(".")
        assert new in keys_at(today) and old not in keys_at(before)


def test_a_key_that_moved_under_its_own_name_is_found_by_the_key_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renamed, "RENAMED_KEYS", RENAMED_KEYS)
    loaded = load_partial(None, parse_settings(["keep_last=4", "checkpoint_interval=3"]))
    assert loaded.job is not None
    assert (loaded.job.checkpoint.keep_last, loaded.job.checkpoint.interval) == (4, 3)
    assert [warning.where for warning in loaded.warnings] == ["training.checkpoint_interval"]
