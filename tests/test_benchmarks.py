"""What benchmarks/results/planning.md says of the speed of planning is of this version and these commands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mpctl import __version__

ROOT = Path(__file__).parent.parent
RENEW = "run `python -m benchmarks.plan_speed --write` and commit benchmarks/results/planning.md"
# Run on its own, since benchmarks are no part of the tests' process.
PROGRAM = """
import json; from benchmarks.plan_speed import COLUMNS, PART, QUICK, SEARCHES, goal_of, page_part
goals = [(name, goal_of(command)) for name, command in (QUICK | SEARCHES).items()]
text = page_part([("search", "2.0 s", "20.1", "25")], rounds=5, load=1.26)
print(json.dumps({"columns": COLUMNS, "part": PART, "goals": goals, "text": text}))
"""


@pytest.fixture(scope="module")
def benchmark() -> dict[str, Any]:
    """What the benchmark measures, and a part that it writes."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_table_of_planning_is_this_versions(benchmark: dict[str, Any]) -> None:
    text = (ROOT / "benchmarks" / "results" / "planning.md").read_text("utf-8")
    part = re.search(f"<!-- measured: {benchmark['part']} -->\n(.*?)\n<!-- end -->", text, re.S)
    assert part is not None
    head, _, titles, _, *lines = part[1].splitlines()
    assert f", mpctl {__version__}, " in head, RENEW
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert titles == f"| {' | '.join(benchmark['columns'])} |", RENEW
    assert [[row[0], row[-1]] for row in rows] == benchmark["goals"], RENEW


def test_a_part_says_what_measured_it(benchmark: dict[str, Any]) -> None:
    head, *rest = benchmark["text"].splitlines()
    assert f"mpctl {__version__}, " in head
    assert "load 1.3 at the start, `python -m benchmarks.plan_speed 5 --write`:" in head
    assert rest[0] == "" and rest[-1] == "| search | 2.0 s | 20.1 | 25 |"
