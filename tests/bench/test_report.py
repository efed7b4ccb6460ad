"""What all reports share: the spread of rounds, CSV, the environment."""

from mpctl.bench.report import bench_environment, csv_text, environment_on, spread
from mpctl.hosts.machine import HostFacts, Machine, host_facts


def test_spread_by_hand():
    assert spread([0.5, 0.3, 0.4]) == {
        "seconds": 0.4, "seconds_min": 0.3, "seconds_max": 0.5, "rounds": 3,
    }  # fmt: skip


def test_csv_has_a_column_for_each_key_of_any_row():
    rows = [{"name": "a, b", "sizes": {"tp": 2}}, {"name": "c", "wrong": 0, "seconds": None}]
    assert csv_text(rows).split("\r\n") == [
        "name,sizes.tp,wrong,seconds", '"a, b",2,,', "c,,0,", "",
    ]  # fmt: skip


def test_the_environment_names_the_processor():
    environment = bench_environment()
    assert environment["cores"] >= 1 and environment["machine"] and environment["host"]


def test_the_environment_of_hosts_is_that_of_all_of_them():
    """Two hosts of 4 cores and 8 GPUs each; where no host is named nothing changes."""
    here = bench_environment()
    machine = Machine(cores=4, gpus=8, memory_bytes=2**30)
    hosts = [
        HostFacts(name, machine, "3.12.1", "9.9", "2.9", "python", processor="EPYC 7")
        for name in ("n1", "n2")
    ]
    there = environment_on(here, hosts)
    assert (there["host"], there["machine"]) == ("n1, n2", "EPYC 7")
    assert (there["cores"], there["gpus"], there["torch"]) == (8, 16, "2.9")
    assert there["date"] == here["date"] and environment_on(here, []) == here
    assert environment_on(here, [host_facts()]) == here
