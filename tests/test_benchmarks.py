"""What docs/benchmarks.md says of the speed of planning is of this version and these commands."""

from __future__ import annotations

import re

from benchmarks.plan_speed import COLUMNS, PAGE, PART, QUICK, SEARCHES, goal_of, page_part
from mpctl import __version__

RENEW = "run `python -m benchmarks.plan_speed --write` and commit docs/benchmarks.md"


def test_the_table_of_planning_is_this_versions() -> None:
    text = PAGE.read_text("utf-8")
    part = re.search(f"<!-- measured: {PART} -->\n(.*?)\n<!-- end -->", text, re.S)
    assert part is not None
    head, _, titles, _, *lines = part[1].splitlines()
    assert f", mpctl {__version__}, " in head, RENEW
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    assert titles == f"| {' | '.join(COLUMNS)} |", RENEW
    asked = [(name, goal_of(command)) for name, command in (QUICK | SEARCHES).items()]
    assert [(row[0], row[-1]) for row in rows] == asked, RENEW


def test_a_part_says_what_measured_it() -> None:
    text = page_part([("search", "2.0 s", "20.1", "25")], rounds=5, load=1.26)
    head, *rest = text.splitlines()
    assert f"mpctl {__version__}, " in head
    assert "load 1.3 at the start, `python -m benchmarks.plan_speed 5 --write`:" in head
    assert rest[0] == "" and rest[-1] == "| search | 2.0 s | 20.1 | 25 |"
