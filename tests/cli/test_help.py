"""What --help and `mpctl help` show, and the commands that were options of `mpctl plan`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpctl.cli.app import COMMANDS, PANELS
from mpctl.cli.options import FLAGS
from tests.cli.calls import Mpctl, assert_refused


def test_commands_are_listed_by_what_they_are_for(mpctl: Mpctl) -> None:
    lines = mpctl("--help").out.splitlines()
    heads = [line.strip("╭─╮ ") for line in lines if line.startswith("╭─")]
    assert heads == ["Options", *PANELS]
    listed = [line.split()[1] for line in lines if line.startswith("│ ") and line[2] not in " -"]
    assert listed == list(COMMANDS)


@pytest.mark.parametrize("command", ["plan", "search", "launch", "bench scaling"])
def test_the_options_of_a_job_are_in_the_help_of_none(mpctl: Mpctl, command: str) -> None:
    said = mpctl(*command.split(), "--help").out
    assert "--micro-batch-size" not in said and "mpctl help job" in said
    assert "--micro-batch-size" in mpctl("help", *command.split(), "--full").out


def test_help_of_a_job_has_each_of_its_options_once(mpctl: Mpctl) -> None:
    usual, full = mpctl("help", "job").out, mpctl("help", "job", "--full").out
    for flag in FLAGS:
        name = flag.option.split("/")[0][:17]  # a long name is cut
        assert (f"│ {name}" in usual) != flag.is_rare and full.count(f"│ {name} ") <= 1
        assert name in usual  # a rare one in the last line


def test_help_of_a_command_is_its_dash_h(mpctl: Mpctl) -> None:
    assert mpctl("help", "bench", "machine").out == mpctl("bench", "machine", "-h").out
    assert mpctl("help").out == mpctl("--help").out
    for wrong in (("zzz",), ("plan", "zzz")):
        assert_refused(mpctl("help", *wrong), wants_json=False)


@pytest.mark.parametrize(
    ("former", "today"),
    [
        (("plan", "--compare", "demo", "tp=1,dp=2"), ("compare", "demo", "tp=1,dp=2")),
        (("plan", "demo", "--explain", "time.mfu", "--json"), ("explain", "demo", "time.mfu", "--json")),
        (
            ("plan", "demo", "--tp", 4, "--gpus-per-node=4", "--compare-tensor-modes", 4),
            ("tensor-modes", "demo", 4, "--tp", 4, "--gpus-per-node=4"),
        ),
        (("plan", "demo", "--emit", "torch"), ("emit", "demo", "torch")),
        (
            ("plan", "--nodes", 1, "--gpus-per-node", 4, "--emit", "torch"),
            ("emit", "torch", "--nodes", 1, "--gpus-per-node", 4),
        ),
        (
            ("plan", "--from", "megatron", "--micro-batch-size 1", "--gpus-per-node", 2, "--emit", "torch"),
            ("emit", "--from", "megatron", "--micro-batch-size 1", "--gpus-per-node", 2, "torch"),
        ),
    ],
)
def test_a_former_option_of_plan_is_the_command(
    mpctl: Mpctl, former: tuple[object, ...], today: tuple[object, ...]
) -> None:
    said = mpctl(*today)
    assert said.code == 0 and said.out and said == mpctl(*former)


@pytest.mark.parametrize("former", ["--batch", "--batch="])
def test_a_batch_by_its_former_option(mpctl: Mpctl, tmp_path: Path, former: str) -> None:
    file = tmp_path / "jobs.jsonl"
    file.write_text(json.dumps({"id": 1, "model": "gpt2"}), "utf-8")
    words = (former + str(file),) if former.endswith("=") else (former, file)
    said = mpctl("batch", file)
    assert said.document["id"] == 1 and said == mpctl("plan", *words)


def test_emit_needs_one_launcher(mpctl: Mpctl) -> None:
    for wrong in (("emit",), ("emit", "demo", "torch", "nanotron")):
        assert "usage" in mpctl(*wrong, "--json").issues
    small = ("--set", "cluster.device.memory_bytes=1000000")
    assert mpctl("emit", "demo", "megatron", *small).code == 3
