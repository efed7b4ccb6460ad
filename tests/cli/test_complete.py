"""Shell completion: what bash, zsh and fish are told, asked as their scripts ask."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from mpctl.cli import complete
from mpctl.spec.load import load_job
from mpctl.spec.presets import preset_names
from mpctl.spec.schedules import SCHEDULES
from mpctl.spec.schema import choices_of, settings

MPCTL = str(Path(sysconfig.get_path("scripts")) / "mpctl")
CALL = [sys.executable, "-m", "mpctl"]


def asked(folder: Path, **environment: str) -> list[str]:
    """The lines that mpctl answers in a folder, to a question in its environment."""
    done = subprocess.run(
        CALL,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment},
    )
    assert done.stderr == ""
    return done.stdout.split("\n")[:-1]


def bash(folder: Path, *words: str) -> list[str]:
    typed = ["mpctl", *words]
    return asked(folder, COMP_WORDS="\n".join(typed), COMP_CWORD=str(len(typed) - 1), _MPCTL_COMPLETE="complete_bash")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with presets, a job file and two runs, which is the working directory."""
    for name in (
        "presets/clusters/mine.toml",
        "presets/jobs/own.toml",
        "job.toml",
        "runs/first/job.json",
        "elsewhere/second/job.json",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("", "utf-8")
    (tmp_path / "runs/no-run").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_bash_completes_commands_flags_and_names(folder: Path) -> None:
    assert bash(folder, "pre") == ["presets"]
    assert bash(folder, "plan", "--clu") == ["--cluster"]
    assert {"megascale-a100", "mine"} <= set(bash(folder, "plan", "--cluster", "m"))
    assert bash(folder, "plan", "--cluster", "=", "min") == ["mine"]
    assert {"own", "job.toml", "demo"} <= set(bash(folder, "plan", ""))


def test_bash_which_splits_words_at_equals_completes_values(folder: Path) -> None:
    assert bash(folder, "plan", "--set", "recompute", "=", "s") == ["selective"]
    assert set(bash(folder, "plan", "--set", "schedule", "=")) == set(SCHEDULES)
    assert bash(folder, "plan", "--set", "vp") == ["vpp="]


def test_zsh_and_fish_complete_the_same(folder: Path) -> None:
    said = asked(folder, _MPCTL_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS="mpctl plan --dtype bf")
    assert said == ["_arguments '*: :((\"bf16\"))'"]
    typed = {"_MPCTL_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    said = asked(folder, _TYPER_COMPLETE_ARGS="mpctl plan --set recompute=s", **typed)
    assert said == ["recompute=selective"]
    assert asked(folder, _TYPER_COMPLETE_ARGS="mpctl status f", **typed) == ["first"]


def test_a_path_is_left_to_the_shell(folder: Path) -> None:
    assert bash(folder, "plan", "presets/j") == [""]


def test_the_script_that_bash_sources_works(folder: Path) -> None:
    script = subprocess.run(
        [*CALL, "--show-completion", "bash"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
    )
    ask = 'COMP_WORDS=(mpctl plan --model gpt2-x); COMP_CWORD=3; _mpctl_completion "$1"; '
    done = subprocess.run(
        ["bash", "-c", f'{script.stdout}\n{ask} echo "${{COMPREPLY[@]}}"', "bash", MPCTL],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
    )
    assert done.stdout == "gpt2-xl\n"


def test_runs_are_found_by_name_and_by_path(folder: Path) -> None:
    assert complete.run("") == ["first"]
    assert complete.run("elsewhere/") == ["elsewhere/second"]
    assert complete.run("nowhere/") == []


def test_lists_of_groups_and_kinds_of_presets(folder: Path) -> None:
    assert complete.groups("tp,") == ["tp,cp", "tp,dp", "tp,pp"]
    assert "all" in complete.groups("") and complete.groups("none") == ["none"]
    assert complete.kind_or_preset("mod") == ["models"] and complete.kind_or_preset("own") == ["own"]


def test_what_fails_completes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPCTL_PRESETS", "nowhere")
    assert complete.preset_of("models")("gp") == []


def test_a_name_that_a_shell_would_run_is_not_offered(folder: Path) -> None:
    for name in ("$(true).toml", "`true`.toml", "a b.toml", "a\x1b[2J.toml", "a;true.toml"):
        (folder / "presets" / "models" / name).parent.mkdir(exist_ok=True)
        (folder / "presets" / "models" / name).write_text("", "utf-8")
        (folder / name).write_text("", "utf-8")
    offered = complete.preset_of("models")("")
    assert "gpt2" in offered and "job.toml" in offered
    assert not [name for name in offered if "true" in name or name.startswith("a")]


def test_every_completed_value_is_legal() -> None:
    """Each word that is offered for a setting of training or of the layout is one that it takes."""
    refused = []
    for name in settings():
        if name.split(".")[0] in ("training", "parallel", "checkpoint", "data", "launch"):
            for word in choices_of(name):
                value = {"true": True, "false": False}.get(word, word)
                value = int(word) if word.isdigit() else value
                try:
                    load_job(None, {name: value})
                except Exception as error:
                    refused.append((name, word, error))
    assert refused == []
    assert choices_of("parallel.zero") == ["0", "1", "2", "3"] and choices_of("parallel.tp") == []
    assert choices_of("training.runtime") == preset_names("runtimes")
    assert choices_of("cluster.device") == preset_names("devices") and choices_of("no.such") == []


def test_names_are_completed_without_importing_the_job_s_models(folder: Path) -> None:
    """Somebody waits for it: half a second on a busy machine, pydantic left out."""
    code = (
        "import sys, mpctl.cli.complete as c; c.preset_of('models')('g'); c.run(''); c.groups('');"
        "import mpctl.cli.options; print([m for m in ('pydantic', 'rich', 'torch') "
        "if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.stdout == "[]\n"


def test_a_completion_takes_a_fraction_of_a_second(folder: Path) -> None:
    """0.2 s of one core; the bound leaves room for a machine that is busy otherwise."""

    def seconds() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    start = seconds()
    bash(folder, "plan", "--cluster", "mi")
    assert seconds() - start < 1.0
