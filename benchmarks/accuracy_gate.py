"""Each source's error beside that of the last release: `make accuracy`, or `python -m benchmarks.accuracy_gate`.

Prints every source; writes benchmarks/results/accuracy.md with them, every row of MLPerf Training 6.0, every row
with experts and the dense runs outside their bands. Exits with 1 if a source got worse by more than a point
(tests/released.py). `--release` records today's figures as those of the release.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path

from mpctl import __version__
from mpctl.measure.calibrate.runs import Run
from tests.published import expert_runs, mlperf6_runs, published_runs
from tests.released import RELEASED, Source, every_source, read_released, run_error, worse

PAGE = Path(__file__).with_name("results") / "accuracy.md"
HEAD = """\
# Step times: planned beside measured

Made by `make accuracy` from the runs of tests/recorded, whose rows name their sources. Plans are those of the presets,
which were fitted to these runs; what a fit without a source says of it is in
[measurements.md](measurements.md). Band: nine of ten steps are expected within this factor.
"""


def source_lines(before: Mapping[str, Source], now: Mapping[str, Source]) -> Iterator[str]:
    """One line a source."""
    yield "| source | rows | error: release | today | bias | in band: release | today |"
    yield "|---|---|---|---|---|---|---|"
    for name, own in now.items():
        then = before.get(name)
        old, held = (f"{then.error:.1f} %", f"{then.inside:.0f} %") if then else ("", "")
        cells = (str(own.rows), old, f"{own.error:.1f} %", f"{own.bias:+.1f} %", held, f"{own.inside:.0f} %")
        yield f"| {name} | {' | '.join(cells)} |"


def row_lines(title: str, runs: Iterable[Run]) -> Iterator[str]:
    """One line a row, under a title."""
    yield from ("", f"## {title}", "")
    yield "| run | step, planned | measured | error | band | in band |"
    yield "|---|---|---|---|---|---|"
    for run in runs:
        time, seconds = run.estimate(), run.measured["step_seconds"]
        error, is_inside = run_error(run)
        cells = (f"{time.total:.4g} s", f"{seconds:.4g} s", f"{100 * error:+.1f} %", f"{time.band.factor:.2f}x")
        yield f"| {run.id} | {' | '.join(cells)} | {'yes' if is_inside else '**no**'} |"


def page(before: Mapping[str, Source], now: Mapping[str, Source]) -> Iterator[str]:
    """The lines of the page."""
    yield HEAD
    yield from source_lines(before, now)
    yield from row_lines("MLPerf Training 6.0", mlperf6_runs())
    yield from row_lines("Mixtures of experts", expert_runs(software=True))
    steps = (run for run in published_runs() if "step_seconds" in run.measured)
    yield from row_lines("Dense runs outside their bands", (run for run in steps if not run_error(run)[1]))


def write_release(sources: Mapping[str, Source]) -> None:
    """Record these figures as the release's, one source a line."""
    line = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip()
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(asdict(own))}" for name, own in sources.items())
    head = f'"version": "{__version__}", "date": "{date.today().isoformat()}", "commit": "{commit}"'
    RELEASED.write_text(f'{{\n {head},\n "sources": {{\n{rows}\n }}\n}}\n', "utf-8")


def main(arguments: Sequence[str]) -> int:
    """Print the sources and write the page; return 1 if a source got worse."""
    now = every_source()
    if "--release" in arguments:
        write_release(now)
    before = read_released()
    print("\n".join(source_lines(before, now)))
    PAGE.write_text("\n".join([*page(before, now), ""]), "utf-8")
    found = list(worse(before, now))
    print("\n".join(found), file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
