"""The folder of a bench: replaced only when asked, and nothing in it that is not the bench's."""

from mpctl.bench.report import check_folder, save_report, take_folder
from mpctl.rundir.marker import write_marker

REPORT = {"schema": "mpctl.bench/2", "results": []}


def made(out):
    """A bench's folder: report, data, the run of a case, and a file of the user's."""
    case = out / "strong-1-r1"
    (case / "logs").mkdir(parents=True)
    write_marker(case)
    (out / "data").mkdir()
    for path in (out / "data/data.json", case / "metrics.jsonl", out / "notes.txt"):
        path.write_text("{}")
    save_report(out, REPORT)
    return out


def test_an_earlier_bench_is_replaced_only_when_asked(tmp_path):
    out = made(tmp_path / "out")
    (issue,) = check_folder(out, overwrite=False)
    assert "a bench's report" in issue.message
    assert list(check_folder(out, overwrite=True)) == []
    take_folder(out)
    assert sorted(path.name for path in out.iterdir()) == [".mpctl-bench", "notes.txt"]
    assert list(check_folder(out, overwrite=True)) == []  # as one that Ctrl-C ended leaves it
    assert list(check_folder(tmp_path / "new", overwrite=False)) == []


def test_overwrite_removes_nothing_of_others(tmp_path):
    out = made(tmp_path / "out")
    (out / "report.json").unlink()
    (issue,) = check_folder(out, overwrite=True)
    assert issue.rule == "bench-foreign" and (out / "data/data.json").exists()
    save_report(out, REPORT)
    (out / "strong-1-r1/.mpctl-run").unlink()  # now a folder of the user's that is called so
    take_folder(out)
    assert (out / "strong-1-r1/metrics.jsonl").exists()
