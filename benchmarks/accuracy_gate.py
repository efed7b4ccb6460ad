"""Each source's error beside that of the last release: `make accuracy`, or `python -m benchmarks.accuracy_gate`.

Prints every source; writes benchmarks/results/accuracy.md with them, every row of MLPerf Training 6.0, every row
with experts and all others outside their bands. Exits with 1 if a source got worse by more than a point
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
from tests.released import RELEASED, Planned, Source, every_plan, other_sources, read_released, sources_of, worse

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


def row_lines(title: str, plans: Iterable[Planned]) -> Iterator[str]:
    """One line a row, under a title."""
    yield from ("", f"## {title}", "")
    yield "| run | step, planned | measured | error | band | in band |"
    yield "|---|---|---|---|---|---|"
    for own in plans:
        cells = (f"{own.planned:.4g} s", f"{own.measured:.4g} s", f"{100 * own.error:+.1f} %", f"{own.band:.2f}x")
        yield f"| {own.id} | {' | '.join(cells)} | {'yes' if own.inside else '**no**'} |"


def page(before: Mapping[str, Source], now: Mapping[str, Source], plans: Sequence[Planned]) -> Iterator[str]:
    """The lines of the page."""
    yield HEAD
    yield from source_lines(before, now)
    newest = [own for own in plans if own.source.startswith("mlperf6")]
    experts = [own for own in plans if own.source.endswith("_moe")]
    yield from row_lines("MLPerf Training 6.0", newest)
    yield from row_lines("Mixtures of experts", experts)
    shown = {own.id for own in (*newest, *experts)}
    yield from row_lines("Other runs outside their bands", (p for p in plans if not p.inside and p.id not in shown))


def write_release(sources: Mapping[str, Source]) -> None:
    """Record these figures as the release's, one source a line."""
    line = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip()
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(asdict(own))}" for name, own in sources.items())
    head = f'"version": "{__version__}", "date": "{date.today().isoformat()}", "commit": "{commit}"'
    RELEASED.write_text(f'{{\n {head},\n "sources": {{\n{rows}\n }}\n}}\n', "utf-8")


def main(arguments: Sequence[str]) -> int:
    """Print the sources and write the page; return 1 if a source got worse."""
    plans = every_plan()
    now = {**sources_of(plans), **other_sources()}
    if "--release" in arguments:
        write_release(now)
    before = read_released()
    print("\n".join(source_lines(before, now)))
    PAGE.write_text("\n".join([*page(before, now, plans), ""]), "utf-8")
    found = list(worse(before, now))
    print("\n".join(found), file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
