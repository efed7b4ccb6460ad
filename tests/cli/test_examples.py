"""The job files in examples/ and every command that examples/README.md tells people to type."""

from __future__ import annotations

import csv
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mpctl.cli.app import run as mpctl
from mpctl.plan.planning.plan import load_plan

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(EXAMPLES.glob("*.toml"))
BLOCKS = re.findall(r"```\n(.*?)```", (EXAMPLES / "README.md").read_text("utf-8"), re.S)
COMMANDS = [line.partition("#")[0].strip() for block in BLOCKS for line in block.splitlines()]
# What makes a command cheap, without changing which code it takes.
CHEAPER = {"--rehearse": ["--set", "model.layers=2"], "--tensorboard": ["--steps", "4"], "--resume": ["--dry-run"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder above a copy of examples/."""
    folder = tmp_path_factory.mktemp("reader")
    shutil.copytree(EXAMPLES, folder / "examples")
    return folder


def test_readme_names_every_file_and_no_other() -> None:
    named = set(re.findall(r"\]\((\S+\.toml)\)", (EXAMPLES / "README.md").read_text("utf-8")))
    assert named == {path.name for path in FILES} and len(FILES) == 3


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_job_fits_and_says_what_it_is(path: Path) -> None:
    plan = load_plan(str(path))
    assert plan.job.name == path.stem and plan.job.description
    statuses = {check.issue.rule: check.status for check in plan.checks}
    assert statuses["memory-fits"] == "ok" and "error" not in statuses.values()
    lines = [line for line in path.read_text("utf-8").splitlines() if line]
    assert sum("#" in line for line in lines) > len(lines) / 3  # each explains what it uses


def _case(number: int) -> object:
    """A rehearsal starts a process that imports torch, a search of 512 GPUs takes seconds: too slow
    for every run of the tests."""
    is_slow = "--rehearse" in COMMANDS[number] or COMMANDS[number].startswith("mpctl search")
    marks = [pytest.mark.slow] if is_slow else []
    return pytest.param(number, id=COMMANDS[number], marks=marks)


@pytest.mark.parametrize("number", [_case(n) for n in range(len(COMMANDS))])
def test_every_command_runs(
    number: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the order in which the README has them: later ones look at the run of an earlier one."""
    monkeypatch.chdir(folder)
    arguments = shlex.split(COMMANDS[number])
    assert arguments.pop(0) == "mpctl"
    more = [flag for name, flags in CHEAPER.items() if name in arguments for flag in flags]
    assert mpctl([*arguments, *more]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out


def test_the_launch_left_csv_and_events_of_every_step(folder: Path) -> None:
    """After the commands: metrics.csv (the job's own key) and the events of --tensorboard say what
    metrics.jsonl says."""
    run = folder / "runs/laptop-gpt"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {record["step"]: record["loss"] for record in records}
    assert list(losses) == [1, 2, 3, 4]
    rows = list(csv.DictReader((run / "metrics.csv").read_text().splitlines()))
    assert {int(row["step"]): float(row["loss"]) for row in rows if row["loss"]} == losses
    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    events = {event.step: event.value for event in board.Scalars("loss")}
    assert events == pytest.approx(losses, rel=1e-6)
    assert (folder / "loss.png").stat().st_size > 5000
