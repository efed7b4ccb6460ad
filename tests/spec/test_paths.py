"""Paths in a job file are relative to the file, those that are typed to the shell."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpctl.core.errors import InputError
from mpctl.plan.planning.plan import load_plan
from mpctl.run.hosts.machine import Machine
from mpctl.run.launch.launch_plan import resolved_job
from mpctl.spec.load import load_job

JOB = """
preset = "demo"
[data]
path = "prepared"
corpus = ["texts", "python-stdlib", "/abs/one.txt"]
tokenizer = "tokenizer.json"
validation = { old = "../old" }
[training]
init_from = "runs/base"
[launch.ssh]
hostfile = "hosts"
config = "/abs/ssh_config"
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A job file in jobs/, read from the folder above it."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "a.toml").write_text(JOB, "utf-8")
    monkeypatch.chdir(tmp_path)
    return "jobs/a.toml"


def test_paths_of_a_file_are_joined_to_its_folder(job: str) -> None:
    read = load_job(job)
    assert read.data.path == "jobs/prepared" and read.data.tokenizer == "jobs/tokenizer.json"
    assert read.data.corpus == ["jobs/texts", "python-stdlib", "/abs/one.txt"]
    assert read.data.validation == {"old": "jobs/../old"}
    assert read.training.init_from == "jobs/runs/base"
    assert read.launch.ssh.hostfile == "jobs/hosts"
    assert read.launch.ssh.config == "/abs/ssh_config"


def test_a_file_in_the_shell_s_folder_means_the_same(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("jobs")
    read = load_job("a.toml")
    assert (read.data.path, read.training.init_from) == ("prepared", "runs/base")


def test_typed_paths_stay_relative_to_the_shell(job: str) -> None:
    typed = {"data.path": "mine", "training.init_from": "runs/x", "data.validation": {"a": "b"}}
    read = load_job(job, typed)
    assert (read.data.path, read.training.init_from) == ("mine", "runs/x")
    assert read.data.validation == {"a": "b"}


def test_a_config_named_in_a_file_is_looked_for_beside_it(job: str, tmp_path: Path) -> None:
    Path(job).write_text('[model]\nhf_config = "hf"\n', "utf-8")
    with pytest.raises(InputError) as caught:
        load_job(job)
    assert caught.value.issues[0].message.startswith("jobs/hf")
    config = '{"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 9, '
    (tmp_path / "jobs" / "hf").mkdir()
    (tmp_path / "jobs" / "hf" / "config.json").write_text(config + '"n_positions": 8}')
    read = load_job(job).model
    assert read is not None and read.layers == 2


def test_what_a_run_writes_down_means_the_same_from_anywhere(job: str, tmp_path: Path) -> None:
    machine = Machine(cores=2, memory_bytes=2**40, gpus=0)
    written = resolved_job(load_plan(job), machine)
    folder = tmp_path / "jobs"
    assert written.data.path == str(folder / "prepared")
    assert written.data.corpus == [str(folder / "texts"), "python-stdlib", "/abs/one.txt"]
    assert written.data.tokenizer == str(folder / "tokenizer.json")
    assert written.data.validation == {"old": str(tmp_path / "old")}
    assert written.training.init_from == str(folder / "runs" / "base")
    assert written.launch.ssh.hostfile == str(folder / "hosts")


@pytest.mark.parametrize("value", ["5", "[5, {}]", "{ a = 5 }", '""'])
def test_what_is_no_path_is_left_to_the_schema(job: str, value: str) -> None:
    Path(job).write_text(f"[data]\npath = {value}\n", "utf-8")
    try:
        assert load_job(job).data.path == ""
    except InputError as error:
        assert {issue.rule for issue in error.issues} == {"bad-value"}
