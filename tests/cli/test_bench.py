"""How benches end: folder, tables or JSON, pictures; `mpctl bench compare` for CI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from mpctl.cli.bench.common import BenchCommand
from mpctl.core.errors import InputError
from mpctl.measure.bench.report import BenchReport
from tests.cli.calls import Mpctl, assert_refused
from tests.measure.bench.reports import made_report, row, verify_report, write_report


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


def test_of_many_rows_only_those_beyond_the_threshold_are_shown(mpctl: Mpctl, tmp_path: Path) -> None:
    rows = [row(f"row{at}", 1.0) for at in range(30)]
    write_report(tmp_path / "a", made_report("kernels", rows))
    rows[7] = row("row7", 2.0)
    write_report(tmp_path / "b", made_report("kernels", [*rows, row("new", 1.0)]))
    said = mpctl("bench", "compare", tmp_path / "a", tmp_path / "b")
    assert "row7" in said.out and "row8" not in said.out
    assert "29 more rows within 10 % of A" in said.out and "only in B: new" in said.out
    assert "row8" in mpctl("bench", "compare", tmp_path / "a", tmp_path / "b", "--json").out


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_what_cannot_be_compared_is_exit_2(mpctl: Mpctl, tmp_path: Path, flags: tuple[str, ...]) -> None:
    a, other = write(tmp_path / "a", 1.0), write(tmp_path / "other", 1.0, "scaling")
    (tmp_path / "schema.json").write_text('{"schema": "mpctl.run/2"}')
    for b in (tmp_path / "none", tmp_path / "schema.json", tmp_path, other):
        assert_refused(mpctl("bench", "compare", a, b, *flags), wants_json=bool(flags))
    for threshold in ("-1", "nan", "inf", "ten"):
        said = mpctl("bench", "compare", a, a, "--threshold", threshold, *flags)
        assert_refused(said, wants_json=bool(flags))


def test_a_report_is_drawn_again(mpctl: Mpctl, tmp_path: Path) -> None:
    file = write_report(tmp_path / "old", verify_report())
    said = mpctl("bench", "report", tmp_path / "old")
    assert said.code == 0 and "report.html" in said.out and "rehearsal" in said.err
    assert {"report.csv", "report.html", *PICTURES} <= {p.name for p in (tmp_path / "old").iterdir()}
    copy = file.rename(tmp_path / "from-elsewhere.json")
    (tmp_path / "notes.txt").write_text("mine")
    said = mpctl("bench", "report", copy)
    assert said.code == 2 and "--out" in said.err  # the folder is no bench's
    assert mpctl("bench", "report", copy, "--out", tmp_path / "new" / "one").code == 0
    assert json.loads((tmp_path / "new/one/report.json").read_text()) == verify_report()
    assert mpctl("bench", "report", copy, "--out", tmp_path / "new/one").code == 2
    assert mpctl("bench", "report", copy, "--out", tmp_path / "new/one", "--overwrite").code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["from-elsewhere.json", "new", "notes.txt", "old"]


def test_what_is_no_report_is_not_drawn(mpctl: Mpctl, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"schema": "mpctl.plan/2"}')
    file = write_report(tmp_path / "old", verify_report())
    for arguments in (
        (tmp_path / "plan.json",),
        (tmp_path,),
        (tmp_path / "none",),
        (file, "--out", tmp_path / "plan.json"),
        (file, "--out", tmp_path / "plan.json/sub"),
    ):
        assert_refused(mpctl("bench", "report", *arguments), wants_json=False)
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["report.json"]


PICTURES = ["layouts.svg", "predicted.svg"]


def end(folder: Path, report: Any, *, as_json: bool = False) -> list[str]:
    """What BenchCommand.finish wrote."""
    folder.mkdir()
    bench = BenchCommand("verify", out=folder, as_json=as_json)
    bench.finish(report)
    return sorted(path.name for path in folder.iterdir())


def test_a_bench_ends_with_its_folder_and_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = end(tmp_path / "out", verify_report())
    out, err = capsys.readouterr()
    assert {"report.json", "report.csv", *PICTURES} <= set(names)
    assert out.startswith("step time 5.0% off on average over 8 layouts within cores")
    assert "wrote report.json, report.csv, " in out
    assert all(name in out for name in names) and err == ""


def test_json_stands_alone_on_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    end(tmp_path / "out", verify_report(), as_json=True)
    out, err = capsys.readouterr()
    assert json.loads(out) == json.loads((tmp_path / "out/report.json").read_text())
    assert err.startswith("wrote report.json")


def test_a_picture_that_cannot_be_written_costs_no_report(tmp_path: Path) -> None:
    bench = BenchCommand("verify", out=tmp_path)
    assert bench.folder == tmp_path
    (tmp_path / "layouts.svg").mkdir()
    with pytest.raises(InputError, match="layouts"):
        bench.finish(cast(BenchReport, verify_report()))
    assert json.loads((tmp_path / "report.json").read_text()) == verify_report()
