"""What the README tells people to type works as it stands; launches are typed as dry runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from mpctl.cli.app import app, run
from mpctl.core.units import bytes_text, seconds_text
from mpctl.plan.planning.plan import load_plan
from tests import readme
from tests.cli.calls import Mpctl

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
PAGES = "\n".join(page.read_text("utf-8") for page in readme.PAGES)
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", PAGES, re.S)
LINES = [line for _, block in BLOCKS for line in block.splitlines()]
COMMANDS = [line.partition("#")[0].strip() for line in LINES if line.startswith("mpctl ")]
# Those of the other documents, whose options must exist too.
OTHERS = [
    match.partition("#")[0].removeprefix("$ ").strip()
    for path in [*sorted(ROOT.glob("docs/**/*.md")), ROOT / "CONTRIBUTING.md"]
    if path.name not in ("reference.md", "guide.md", "tour.md")
    for block in re.findall(r"```\w*\n(.*?)```", path.read_text("utf-8").replace("\\\n", " "), re.S)
    for match in re.findall(r"^(?:\$ )?mpctl .*", block, re.M)
]
QUICK = ("plan", "search", "presets", "schema", "launch")


def test_there_is_something_to_check() -> None:
    assert len(COMMANDS) > 12 and len(OTHERS) > 12


@pytest.mark.parametrize("command", [*COMMANDS, *OTHERS])
def test_every_option_exists(command: str) -> None:
    """Also of commands that need a run, a folder of weights or minutes."""
    typed = re.split(r"\s[>|]\s", command)[0]  # no sign of a gate: "step>+5%"
    name, words = "mpctl", shlex.split(typed)[1:]
    found: Any = typer.main.get_command(app)
    while hasattr(found, "get_command"):
        context = typer.Context(found, info_name=name)
        name, *words = words
        found = found.get_command(context, name)
        assert found is not None, name
    found.make_context(name, words)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `my-texts/` and `job.toml`, prepared as the pages prepare them."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "my-texts").mkdir()
    (folder / "hosts").write_text("n1 slots=1\nn2 slots=1\n")
    for number in range(20):
        words = (f"line {n} of text {number}, {n * number % 97}" for n in range(600))
        (folder / "my-texts" / f"{number}.txt").write_text("\n".join(words))
    for start in ("mpctl data prepare", "mpctl init"):
        command = next(command for command in COMMANDS if command.startswith(start))
        words = shlex.split(command)[1:]
        subprocess.run([sys.executable, "-m", "mpctl", *words], cwd=folder, check=True)
    return folder


def _case(command: str) -> object:
    """Slow: a rehearsal, which starts a process that imports torch, and the search of a job whose
    like a block of README shows."""
    is_slow = "--rehearse" in command or command.startswith("mpctl search job.toml")
    marks = [pytest.mark.slow] if is_slow else []
    return pytest.param(command, id=command, marks=marks)


@pytest.mark.parametrize("command", [_case(c) for c in COMMANDS if c.split()[1] in QUICK])
@pytest.mark.quick(4)
def test_every_command_is_accepted(
    command: str, texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(texts)
    arguments = shlex.split(command.partition(">")[0])[1:]
    if "kubernetes" in arguments or "slurm" in arguments:
        pytest.skip("needs a cluster; tests/multinode and tests/run/launch submit to one")
    if "--resume" in arguments:
        pytest.skip("needs the run before it; tests/run/launch/test_run.py resumes on another layout")
    if arguments[0] == "launch" and not {"--dry-run", "--rehearse"} & {*arguments}:
        arguments.append("--dry-run")
    assert run(arguments) == 0, capsys.readouterr().err
    assert capsys.readouterr().out


RENEW = "run `make readme` and commit the pages and their pictures"


@pytest.mark.parametrize(
    ("command", "block"), [pair for pair in readme.SHOWN.findall(PAGES) if not readme.is_slow(pair[0])]
)
def test_what_a_command_prints_is_what_the_readme_shows(command: str, block: str) -> None:
    assert readme.shown(command) == block, RENEW


@pytest.mark.parametrize(
    ("command", "block"), [pair for page in readme.EXCERPTS for pair in readme.SHOWN.findall(page.read_text("utf-8"))]
)
def test_an_excerpt_is_of_what_the_command_prints(mpctl: Mpctl, command: str, block: str) -> None:
    """Each line to the last figure, in their order."""
    said = mpctl(*shlex.split(command.partition(" | ")[0])[1:])
    printed = iter([line.rstrip() for line in said.out.splitlines() + said.err.splitlines()])
    assert [line for line in block.splitlines() if line not in printed] == []


def test_the_published_runs_are_those_of_the_record() -> None:
    (table,) = readme.TABLE.findall(README)
    assert table[1] == readme.published_table(), RENEW


@pytest.mark.parametrize(("path", "command"), readme.pictures(PAGES).items())
def test_a_picture_is_what_its_command_draws(path: str, command: str) -> None:
    assert readme.drawn(command, path) == (ROOT / path).read_text("utf-8"), RENEW


def test_every_picture_and_every_output_has_a_command() -> None:
    """A block without a language is of commands to type, or the output of one that it names."""
    images = {Path(path).name for path in re.findall(r"!\[[^]]*\]\(([^)]+)\)", PAGES)}
    assert images == {*(Path(path).name for path in readme.pictures(PAGES)), readme.PAGE.name}
    assert readme.SHOWN_PAGE in README and readme.PAGE.exists()
    for language, body in BLOCKS:
        assert language or body.startswith(("mpctl ", "make ", "pip ", "$ mpctl ")), body[:80]


def test_the_demos_forecast_is_the_plans() -> None:
    """Of the block that a training makes, what does not depend on the machine's load."""
    (block,) = (body for command, body in readme.SHOWN.findall(README) if readme.is_slow(command))
    estimate = load_plan("demo").estimate
    assert estimate is not None and estimate.step_seconds is not None
    assert f"predicted {seconds_text(estimate.step_seconds)}\n" in block
    assert f"planned {bytes_text(estimate.fullest_stage.allocated_bytes)} " in block


def test_the_job_file_is_a_job(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (body,) = (body for kind, body in BLOCKS if kind == "toml")
    monkeypatch.chdir(texts)
    Path("written.toml").write_text(body)
    assert run(["launch", "written.toml", "--dry-run"]) == 0


@pytest.mark.parametrize("body", [body for kind, body in BLOCKS if kind == "python"])
def test_the_library_examples_run(body: str) -> None:
    subprocess.run([sys.executable, "-c", body], check=True)
