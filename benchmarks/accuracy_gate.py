"""Each source's error beside that of the last release: `make accuracy`, or `python -m benchmarks.accuracy_gate`.

Prints a table in Markdown, every source, then every row of MLPerf Training 6.0, and exits with 1 if a source
got worse by more than a point (tests/released.py). `--release` records today's figures as those of the release.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import date

from mpctl import __version__
from tests.published import mlperf6_runs
from tests.released import RELEASED, Source, every_source, read_released, worse


def source_lines(before: Mapping[str, Source], now: Mapping[str, Source]) -> Iterator[str]:
    """One line a source."""
    yield "| source | rows | error: release | today | bias | in band: release | today |"
    yield "|---|---|---|---|---|---|---|"
    for name, own in now.items():
        then = before.get(name)
        old, held = (f"{then.error:.1f} %", f"{then.inside:.0f} %") if then else ("", "")
        cells = (str(own.rows), old, f"{own.error:.1f} %", f"{own.bias:+.1f} %", held, f"{own.inside:.0f} %")
        yield f"| {name} | {' | '.join(cells)} |"


def row_lines() -> Iterator[str]:
    """One line a row of MLPerf Training 6.0."""
    yield "| run | step, planned | measured | error | band | in band |"
    yield "|---|---|---|---|---|---|"
    for run in mlperf6_runs():
        time, seconds = run.estimate(), run.measured["step_seconds"]
        inside = "yes" if time.low <= seconds <= time.high else "no"
        error = f"{100 * (time.total / seconds - 1):+.1f} %"
        name = run.id.removeprefix("mlperf_v60_")
        yield f"| {name} | {time.total:.4g} s | {seconds:.4g} s | {error} | {time.band.factor:.2f}x | {inside} |"


def write_release(sources: Mapping[str, Source]) -> None:
    """Record these figures as the release's, one source a line."""
    line = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip()
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(asdict(own))}" for name, own in sources.items())
    head = f'"version": "{__version__}", "date": "{date.today().isoformat()}", "commit": "{commit}"'
    RELEASED.write_text(f'{{\n {head},\n "sources": {{\n{rows}\n }}\n}}\n', "utf-8")


def main(arguments: Sequence[str]) -> int:
    """Print the tables; return 1 if a source got worse."""
    now = every_source()
    if "--release" in arguments:
        write_release(now)
    before = read_released()
    print("\n".join([*source_lines(before, now), "", *row_lines()]))
    found = list(worse(before, now))
    print("\n".join(found), file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
