"""Progress: what matters stays on a narrow terminal; lines on stderr where there is none."""

from __future__ import annotations

import io

import pytest

from mpctl.render.console import Console
from mpctl.render.progress import TaskBar, clock, progress_bar
from mpctl.render.run import step_figures

NOTE = " · ".join(
    step_figures({"loss": 5.3104, "tokens_per_second": 4812.3, "step_seconds": 0.8512}, 5.4, 0.745)  # type: ignore[typeddict-item]
)


def shown(width: int) -> str:
    """The line of a step on a terminal of so many columns."""
    bar = progress_bar(Console(file=io.StringIO(), force_terminal=True, width=width))
    bar.add_task("step 12/80", total=80, completed=12, note=NOTE)
    console = Console(file=(said := io.StringIO()), width=width, color_system=None)
    console.print(bar.get_renderable())
    return said.getvalue().rstrip("\n")


def test_a_narrow_line_loses_its_end_first() -> None:
    """The step, the time left (not known yet) and the loss; the bar where there is room."""
    for width in (40, 60, 79, 80, 100, 160):
        line = shown(width)
        assert "\n" not in line and len(line) <= width
        assert line.startswith("step 12/80 -:--:-- ") and "loss 5.310" in line
        assert ("━" in line) == (width >= 80)
    assert NOTE in shown(160)


def test_the_time_left_in_hours_minutes_and_seconds() -> None:
    assert clock(80.4) == "0:01:20"


def test_a_note_is_a_line_where_lines_are_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    with TaskBar(lines=True) as bar:
        bar.update("train", 0, 10)
        bar.note("strong tp2, round 1 of 3")
        bar.update("train", 10, 10)
    assert capsys.readouterr().err.splitlines() == ["train", "strong tp2, round 1 of 3"]
    with TaskBar() as bar:
        bar.update("train", 0, 10)
        bar.note("strong tp2")
    assert capsys.readouterr().err == ""


def test_a_note_stands_behind_the_stage_that_goes_on() -> None:
    bar = TaskBar()
    bar.update("read", 4, 4)
    bar.update("train", 3, 10)
    bar.note("strong tp2")
    assert [task.fields["note"] for task in bar.bar.tasks] == ["", "strong tp2"]
    bar.stop()
