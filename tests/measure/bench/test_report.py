"""What all reports share: CSV, environment, and the folder."""

from mpctl.measure.bench.report import (
    bench_environment,
    check_folder,
    csv_text,
    environment_on,
    save_report,
    take_folder,
)
from mpctl.records.rundir.marker import write_marker
from mpctl.run.hosts.machine import HostFacts, Machine, host_facts


def test_csv_has_a_column_for_each_key_of_any_row():
    rows = [{"name": "a, b", "sizes": {"tp": 2}}, {"name": "c", "wrong": 0, "seconds": None}]
    assert csv_text(rows).split("\r\n") == ["name,sizes.tp,wrong,seconds", '"a, b",2,,', "c,,0,", ""]


def test_the_environment_names_the_processor():
    environment = bench_environment()
    assert environment["cores"] >= 1 and environment["machine"] and environment["host"]


def test_the_environment_of_hosts_is_that_of_all_of_them():
    """Two hosts of 4 cores and 8 GPUs each; where no host is named nothing changes."""
    here = bench_environment()
    machine = Machine(cores=4, gpus=8, memory_bytes=2**30)
    hosts = [HostFacts(name, machine, "3.12.1", "9.9", "2.9", "python", processor="EPYC 7") for name in ("n1", "n2")]
    there = environment_on(here, hosts)
    assert (there["host"], there["machine"]) == ("n1, n2", "EPYC 7")
    assert (there["cores"], there["gpus"], there["torch"]) == (8, 16, "2.9")
    assert there["date"] == here["date"] and environment_on(here, []) == here
    assert environment_on(here, [host_facts()]) == here


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
