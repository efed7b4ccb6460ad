"""RUN/metrics.csv: the records of metrics.jsonl as a table, a row a step, a column a metric.

A cell is empty where the step has no such number. The columns are `step`, those of
scalars.COLUMNS, then further metrics by name.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mpctl.durable import temporary_beside
from mpctl.rundir.rank_files import StepRecord
from mpctl.rundir.scalars import COLUMNS, ScalarPoint, ordered, points


@dataclass
class CsvFile:
    """One file. columns: names of the metrics that have a column, also before any step has a value
    for them."""

    path: Path
    columns: tuple[str, ...] = ()

    def rebuild(self, records: Iterable[StepRecord]) -> None:
        """Write the whole file again; it replaces the old one when it is complete."""
        rows = [point for record in records for point in points(record)]
        names = (name for point in rows for name in point.values)
        self.columns = tuple(ordered([*COLUMNS, *self.columns, *names]))
        text = _line(("step", *self.columns)) + "".join(map(self._row, rows))
        temporary = temporary_beside(self.path)
        temporary.write_text(text, "utf-8")
        temporary.replace(self.path)

    def has_columns_for(self, record: StepRecord) -> bool:
        """Whether every metric of the record has a column."""
        return all(set(self.columns) >= point.values.keys() for point in points(record))

    def add(self, record: StepRecord) -> None:
        """Append the record's row."""
        with self.path.open("a", encoding="utf-8") as stream:
            stream.writelines(map(self._row, points(record)))

    def _row(self, point: ScalarPoint) -> str:
        return _line([point.step, *(point.values.get(name, "") for name in self.columns)])


def _line(cells: Iterable[object]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()
