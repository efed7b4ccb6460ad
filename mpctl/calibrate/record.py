"""The results of a cross-validation as a JSON document that says from what they were made.

The fits take minutes, so tests read the record instead. It is up to date as long as three things
have not changed: the rows of the runs and the constants with their priors (compared by SHA-256),
and the estimate (compared by its residuals under the presets, which the record contains too).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpctl.calibrate.accuracy import constant_values
from mpctl.calibrate.fit import LeftOut, Residuals
from mpctl.calibrate.runs import Run

DIGITS = 6  # of a residual
TOLERANCE = 1e-5  # by which an unchanged estimate may differ between machines


@dataclass(frozen=True)
class CrossRecord:
    """The residuals of all runs, and from what they were made.

    fitted: residuals by run id under the presets; fifths: under constants that were fitted without
    the fold of the run; tables: without its table; clusters: without its cluster. date, commit:
    when and with which code.
    """

    date: str
    commit: str
    rows_sha256: str
    constants_sha256: str
    fitted: Residuals
    fifths: Residuals
    tables: Residuals
    clusters: Residuals

    @property
    def left_out(self) -> LeftOut:
        """The residuals of runs that a fit did not see."""
        return LeftOut(self.fifths, self.tables, self.clusters)

    def write(self, path: Path) -> None:
        """Write the record as JSON, one run a line."""
        table = asdict(self)
        lines = [f" {json.dumps(key)}: {_value(value)}" for key, value in table.items()]
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


def _value(value: object) -> str:
    if not isinstance(value, dict):
        return json.dumps(value)
    rounded = {key: [round(r, DIGITS) for r in rs] for key, rs in value.items()}
    rows = (f"  {json.dumps(key)}: {json.dumps(rs)}" for key, rs in rounded.items())
    return "{\n" + ",\n".join(rows) + "\n }"


def read_record(path: Path) -> CrossRecord:
    """The record in a file that `CrossRecord.write` wrote."""
    return CrossRecord(**json.loads(path.read_text("utf-8")))


def hash_json(value: object) -> str:
    """SHA-256 of a value's JSON with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def what_changed(
    record: CrossRecord,
    rows: Sequence[Mapping[str, Any]],
    runs: Sequence[Run],
    priors: Mapping[str, float],
    fitted: Residuals,
) -> list[str]:
    """What has changed since the record was made, of "rows", "constants" and "estimate".

    fitted: today's residuals of the runs under the presets.
    """
    changed = {
        "rows": hash_json(rows) != record.rows_sha256,
        "constants": hash_json(constant_values(runs, priors)) != record.constants_sha256,
        "estimate": not _are_close(fitted, record.fitted),
    }
    return [name for name, is_changed in changed.items() if is_changed]


def _are_close(first: Residuals, second: Residuals) -> bool:
    return first.keys() == second.keys() and all(
        abs(a - b) <= TOLERANCE
        for key in first
        for a, b in zip(first[key], second[key], strict=True)
    )
