"""`mpctl bench compare`: exit codes for CI, and refusals before anything is printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.reports import made_report, row, write_report
from tests.cli.calls import Mpctl, assert_refused


def write(folder: Path, seconds: float, bench: str = "kernels") -> Path:
    rows = [row("steady", 1.0), row("changes [bold]", seconds)]
    write_report(folder, made_report(bench, rows))
    return folder


def test_a_regression_is_exit_1(mpctl: Mpctl, tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", 1.0), write(tmp_path / "b", 1.3)
    said = mpctl("bench", "compare", a, b)
    assert said.code == 1
    assert "1 of 2 rows slower by more than 10 %" in " ".join(said.out.split())
    assert "changes [bold]" in said.out
    assert mpctl("bench", "compare", b, a).code == 0
    assert mpctl("bench", "compare", a, b / "report.json", "--threshold", 40).code == 0
    document = mpctl("bench", "compare", a, b, "--json").document
    assert document["schema"] == "mpctl.bench-compare/1"
    assert document["regressions"] == 1


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_what_cannot_be_compared_is_exit_2(
    mpctl: Mpctl, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    a, other = write(tmp_path / "a", 1.0), write(tmp_path / "other", 1.0, "scaling")
    (tmp_path / "schema.json").write_text('{"schema": "mpctl.run/1"}')
    for b in (tmp_path / "none", tmp_path / "schema.json", tmp_path, other):
        assert_refused(mpctl("bench", "compare", a, b, *flags), wants_json=bool(flags))
    for threshold in ("-1", "nan", "inf", "ten"):
        said = mpctl("bench", "compare", a, a, "--threshold", threshold, *flags)
        assert_refused(said, wants_json=bool(flags))
