"""The audit of a rehearsal: what loses most, on terminals of several widths."""

from __future__ import annotations

from rich.console import Console

from mpctl.records.rundir.rank_files import AuditRow, StepAudit
from mpctl.render.parts import Sentence
from mpctl.render.rehearsal import WIDE, audit_parts
from mpctl.render.terminal import print_parts

ROW: AuditRow = {
    "module": "layers.*.attention",
    "phase": "backward",
    "times": 48,
    "launches": 9,
    "bytes": 4 * 2**20,
    "least_bytes": 2**20,
    "flops": 0,
    "seconds": 3e-3,
    "least_seconds": 1e-3,
    "operations": {"slice_backward": 8, "cat": 1},
}


def printed(audit: StepAudit, width: int) -> list[str]:
    console = Console(width=width)
    with console.capture() as capture:
        print_parts(audit_parts(audit, width), console=console)
    return capture.get().splitlines()


def audit(row: AuditRow, unknown: list[str]) -> StepAudit:
    figures = {key: row[key] for key in ("launches", "bytes", "least_bytes", "flops")}  # type: ignore[literal-required]
    total = {"part": "layers.*", "phase": "backward", **figures, "seconds": None, "least_seconds": None}
    return {"rows": [row] * 11, "totals": [total], "unknown": unknown, "assumption": "here"}  # type: ignore[list-item]


def test_ten_rows_what_they_move_and_what_a_step_saves() -> None:
    lines = printed(audit(ROW, []), WIDE)
    rows = [line.split() for line in lines if line.startswith("layers.*.attention")]
    assert len(rows) == 10
    figures = "48 9 4.0 MiB 1.0 MiB 4.0x 3.0 ms 1.0 ms 96.0 ms"
    assert rows[0][2:-4] == figures.split()
    assert rows[0][-4:] == ["slice_backward", "8,", "cat", "1"]
    assert any(line.split()[:4] == ["layers.*", "backward", "9", "4.0"] for line in lines)


def test_a_narrow_terminal_is_spared_the_operations() -> None:
    assert not any("slice_backward" in line for line in printed(audit(ROW, []), 80))


def test_without_a_known_device_no_seconds() -> None:
    row: AuditRow = {**ROW, "seconds": None, "least_seconds": None}
    assert not any(" ms" in line for line in printed(audit(row, []), 80))


def test_unknown_operations_are_said() -> None:
    parts = list(audit_parts(audit(ROW, ["aten.strange.default"]), 80))
    assert isinstance(parts[-1], Sentence) and "aten.strange.default" in parts[-1].text
