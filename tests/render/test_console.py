"""What comes from outside cannot command the terminal; numbers stay whole at any width."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from mpctl.cli.app import run as mpctl
from mpctl.core.errors import Issue
from mpctl.render.console import Console, NamedRows, say, visible
from mpctl.render.output import print_issues

EVIL = "a\x1b[31mred\x1b]0;title\x07\x9b2J\x08\x7f\x00b"
TAME = "a[31mred]0;title2Jb"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
OWN = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")  # rich's colours and cursor


def test_control_characters_go_and_layout_stays() -> None:
    assert visible(EVIL) == TAME
    assert visible("tab\tand\nnewline, ü, → and \U0001f600") == "tab\tand\nnewline, ü, → and \U0001f600"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_whatever_is_printed_is_clean(is_terminal: bool) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=80, markup=False)
    table = Table()
    table.add_column(EVIL)
    table.add_row(Text(EVIL, style="bold"))
    with Progress(console=console) as bar:
        bar.update(bar.add_task(EVIL, total=1), completed=1)
        console.print(EVIL, Text(EVIL, style="red"), table)
    written = file.getvalue()
    assert written.count(TAME) >= 4
    assert not CONTROL.search(OWN.sub("", written).replace("\r", ""))
    assert ("\x1b" in written) == is_terminal


def test_an_issue_from_a_file_name(capsys: pytest.CaptureFixture[str]) -> None:
    print_issues([Issue("rule", EVIL, EVIL, EVIL)], wants_json=False)
    say(EVIL)
    shown = capsys.readouterr()
    assert not CONTROL.search(shown.err + shown.out) and shown.err.count(TAME) == 3


@pytest.mark.parametrize("is_terminal", [True, False])
def test_named_rows_stand_in_two_columns_and_end_without_spaces(is_terminal: bool) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=24, markup=False)
    rows = [("step time", "2 s"), ("of", EVIL), ("layout", "tp 2 dp 4 pp 8, zero")]
    console.print(NamedRows(rows))
    lines = OWN.sub("", file.getvalue()).split("\n")
    assert lines == [
        "step time  2 s",
        "of         a[31mred]0;ti",
        "           tle2Jb",
        "layout     tp 2 dp 4 pp",
        "           8, zero",
        "",
    ]


def test_a_path_typed_with_escapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job\x1b[2J.toml"
    job.write_text('name = "x\\u001b]0;title\\u0007"\n[model]\nlayerz = 3\n')
    for argv in (["plan", str(job)], ["launch", "demo", "--run-dir", str(tmp_path / "\x1b[1m"), "--dry-run"]):
        mpctl(argv)
        shown = capsys.readouterr()
        assert not CONTROL.search(shown.err + shown.out)


@pytest.mark.parametrize("columns", [70, 30])
@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "two-nodes-16-gpus"),
        ("plan", "--compare", "demo", "tp=1,dp=2"),
        ("search", "demo", "--fix", "tp=1", "--gpus", "1,2"),
    ],
    ids=lambda words: words[0] + words[1],
)
def test_no_width_parts_a_number_from_its_unit(
    arguments: tuple[str, ...], columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor cuts it: every number with a unit of the wide output is there whole, in one line."""

    def figures() -> list[str]:
        assert mpctl([*arguments]) == 0
        return re.findall(r"[0-9.,]+ (?:[KMG]iB|[µm]?s|%)(?!\w)", capsys.readouterr().out)

    monkeypatch.setenv("COLUMNS", "200")
    wide = figures()
    monkeypatch.setenv("COLUMNS", str(columns))
    assert sorted(figures()) == sorted(wide)
