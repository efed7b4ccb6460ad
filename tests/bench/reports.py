"""Reports of benches made by hand, for tests of what reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "date": "2026-01-02T03:04:05+00:00", "host": "laptop", "machine": "A processor", "cores": 2,
    "gpus": 0, "load_at_start": 0.5, "python": "3.12.1", "torch": "2.11", "mpctl": "0.9",
}  # fmt: skip


def row(name: str, seconds: float, *, spread: float = 0.05, **more: Any) -> dict[str, Any]:
    """A row of three rounds; spread: how far the shortest and the longest lie from the median."""
    return {"name": name, "seconds": seconds, "seconds_min": seconds * (1 - spread),
            "seconds_max": seconds * (1 + spread), "rounds": 3, **more}  # fmt: skip


def made_report(bench: str, rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A whole report of these rows; more: other keys of the envelope."""
    return {"schema": "mpctl.bench/1", "bench": bench, "job": None, "is_complete": True,
            "environment": dict(ENVIRONMENT), "command": f"mpctl bench {bench}", "results": rows,
            "findings": {}, **more}  # fmt: skip


def write_report(folder: Path, document: Any) -> Path:
    """Write a document as FOLDER/report.json; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "report.json"
    file.write_text(document if isinstance(document, str) else json.dumps(document), "utf-8")
    return file
