"""Commands and options that there are not, and -h."""

from __future__ import annotations

import pytest
import typer

from mpctl.cli.app import app
from mpctl.cli.hints import COMMANDS
from tests.cli.calls import Mpctl, assert_refused
from tests.reference.commands import commands


@pytest.mark.parametrize("typed", [typed for typed, _ in commands()])
def test_a_dash_h_is_help(mpctl: Mpctl, typed: str) -> None:
    words = typed.split()[1:]
    said = mpctl(*words, "-h")
    assert said.code == 0 and said.out == mpctl(*words, "--help").out
    assert f"Usage: {typed}" in said.out


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["train", "demo"], "mpctl launch"),
        (["run"], "mpctl launch"),
        (["resume"], "mpctl launch --resume"),
        (["diff"], "mpctl compare"),
        (["lora"], "mpctl fit MODEL"),
        (["plam"], "mpctl plan"),
        (["tokenize"], "mpctl data prepare"),
        (["data", "prepar"], "mpctl data prepare"),
        (["zzzz"], "commands: fit, init, plan, search, report"),
        (["checkpoint", "zzzz"], "commands: list, inspect, verify, reshard, export, import"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_an_unknown_command_names_the_one_that_is_meant(mpctl: Mpctl, words: list[str], meant: str) -> None:
    said = mpctl(*words, "--json")
    assert_refused(said, wants_json=True)
    assert meant in said.issues["unknown-command"]["hint"]
    assert_refused(mpctl(*words), wants_json=False)


def test_every_command_that_is_hinted_exists() -> None:
    known = {typed.removeprefix("mpctl ") for typed, _ in commands()} | {""}
    group = typer.main.get_command(app)
    for meant, names in COMMANDS.items():
        words = [word for word in meant.partition("--")[0].split() if word.islower()]
        assert " ".join(words) in known, meant
        assert not set(names) & set(group.list_commands(None)), meant  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("--tensor-model-parallel-size", "use --tp"),
        ("--pipeline-parallel", "use --pp"),
        ("--lr", "use --set training.learning_rate=VALUE"),
        ("--dropout", "use --set training.dropout=VALUE"),
        ("--jsn", "--json"),
        ("--lora-alpha", "use --set training.adapter.alpha=VALUE"),
        ("--load-in-4bit", "use --set training.adapter.base_precision=VALUE"),
        ("--zzzzzz", "mpctl plan --help"),
    ],
)
def test_an_unknown_option_names_the_one_that_is_meant(mpctl: Mpctl, option: str, meant: str) -> None:
    said = mpctl("plan", option, "2", "--json")
    assert_refused(said, wants_json=True)
    assert meant in said.issues["usage"]["hint"]


def test_a_command_without_a_job_hints_at_no_setting(mpctl: Mpctl) -> None:
    said = mpctl("data", "prepare", "--out", "x", "--lr", "1", "--json")
    assert "--set" not in said.issues["usage"]["hint"]


def test_a_hint_names_no_flag_that_the_command_lacks(mpctl: Mpctl) -> None:
    said = mpctl("checkpoint", "reshard", "run", "out", "--micro-batch-size", "1", "--json")
    assert said.issues["usage"]["hint"] == "use --set training.micro_batch_size=VALUE"


LONG = "x" * 300  # more than a file system allows in a name


@pytest.mark.parametrize(
    "words",
    [
        ["eval", LONG],
        ["sample", LONG, "--prompt", "a"],
        ["weights", "import", "a", LONG],
        ["data", "prepare", "python-stdlib", "--out", "a", "--tokenizer", LONG],
        ["launch", "demo", "--dry-run", "--set", f"data.path={LONG}"],
        ["launch", "demo", "--dry-run", "--set", f"training.init_from={LONG}"],
    ],
    ids=lambda words: " ".join(words).replace(LONG, "LONG"),
)
def test_a_path_that_the_system_refuses_is_no_traceback(mpctl: Mpctl, words: list[str]) -> None:
    issue = mpctl(*words, "--json").issues["path-unusable"]
    assert LONG in issue["where"] and issue["message"] == "File name too long"
