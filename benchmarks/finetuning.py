"""Plans of fine-tuning beside published runs: `python -m benchmarks.finetuning > benchmarks/results/finetuning.md`.

Two tables in Markdown: by source, then every layout, misses too (tests/finetuning.py says what is
compared with what). Layouts that several vendors ran are one line with the range that they measured.
`--sources` prints the first table alone.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence

from tests.finetuning import Judged, judged_rows, summary

HEAD = """\
# Fine-tuning: planned beside measured

Made by `python -m benchmarks.finetuning` from tests/recorded/finetune_runs.json, whose rows name their sources.
Rows are planned as they stand. Layouts count once, however many vendors ran them.
"""


def source_lines(rows: Sequence[Judged]) -> Iterator[str]:
    """One line a source, adapters and full fine-tuning apart, then both kinds in all."""
    groups: dict[str, list[Judged]] = defaultdict(list)
    for row in rows:
        kind = "adapters" if row.has_adapter else "full"
        groups[f"{row.group}, {kind}"].append(row)
        groups[f"**all, {kind}**"].append(row)
    yield "| source | runs | step: error | bias | in band | memory: error | within 10 % | said to fit |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, own in sorted(groups.items(), key=lambda item: ("all" in item[0], item[0])):
        s = summary(own)
        cells = (_percent(s.step), _percent(s.bias, "+"), *map(_percent, (s.inside, s.memory, s.near, s.fits)))
        yield f"| {name} | {s.rows} | {' | '.join(cells)} |"


def layout_lines(rows: Sequence[Judged]) -> Iterator[str]:
    """One line a layout: seconds of a step and GB, planned and measured, with the error."""
    layouts: dict[object, list[Judged]] = defaultdict(list)
    for row in rows:
        same = row.id if row.step is None else (row.group, row.step[0], row.weight)
        layouts[same if row.weight < 1 else row.id].append(row)
    yield "| run | step, planned | measured | error | in band | GB, planned | measured | error | fits |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for own in layouts.values():
        first = own[0]
        name = first.id if len(own) == 1 else f"{first.id} and {len(own) - 1} more"
        cells = (*_step_cells(own), *_memory_cells(first), {True: "yes", False: "no", None: ""}[first.fits])
        yield f"| {name} | {' | '.join(cells)} |"


def _step_cells(rows: Sequence[Judged]) -> tuple[str, str, str, str]:
    steps = [row.step for row in rows if row.step]
    if not steps:
        return rows[0].why, "", "", ""
    measured = sorted(step[1] for step in steps)
    least, most = f"{measured[0]:.4g}", f"{measured[-1]:.4g}"
    error = sum(row.step_error for row in rows) / len(rows)
    inside = f"{sum(row.inside for row in rows)} of {len(rows)}" if len(rows) > 1 else "yes" if rows[0].inside else "no"
    return f"{steps[0][0]:.4g}", least if least == most else f"{least} to {most}", f"{error:+.0%}", inside


def _memory_cells(row: Judged) -> tuple[str, str, str]:
    if row.memory is None:
        return "", "", ""
    planned, measured = (figure / 1e9 for figure in row.memory)
    return f"{planned:.1f}", f"{measured:.1f}", f"{row.memory_error:+.0%}"


def _percent(value: float | None, sign: str = "") -> str:
    return "" if value is None else f"{value:{sign}.1f} %"


def main(arguments: Sequence[str]) -> None:
    """Print both tables, or the first."""
    rows = judged_rows()
    if "--sources" in arguments:
        print("\n".join(source_lines(rows)))
        return
    print(HEAD, *source_lines(rows), "", *layout_lines(rows), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
