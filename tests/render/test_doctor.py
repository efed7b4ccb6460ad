"""A diagnosis in words: hosts that say the same together, findings, Markdown that stays text."""

from __future__ import annotations

import pytest

from mpctl.render.doctor import fact_rows, markdown_lines, print_diagnosis, shown_findings
from mpctl.run.doctor.documents import CollectiveReport, CollectiveTiming, Diagnosis, Finding, HostReport, PairResult
from tests.run.doctor.synthetic import GIB, gpu_host, host, pair

QUOTA = Finding(
    status="warning",
    rule="cpu-quota",
    where="processors",
    hosts=["n1"],
    message="the control group grants 2",
    hint="raise it",
)
LOCKS = Finding(status="error", rule="locks", where="run directory", hosts=["n2"], message="no")


def diagnosis(*hosts: HostReport, findings: tuple[Finding, ...] = (), pairs: tuple[PairResult, ...] = ()) -> Diagnosis:
    count = len(hosts)
    return Diagnosis(
        mpctl="0.2.0",
        backend="ssh",
        job="demo",
        hosts=list(hosts),
        skew=[0.0] * count,
        pairs=list(pairs),
        all_pairs=count * (count - 1) // 2,
        collectives=[],
        findings=list(findings),
    )


def test_hosts_that_say_the_same_are_named_together() -> None:
    hosts = [host(f"n{i}") for i in range(1, 4)]
    other = host("n4", software={"torch": "2.12.1"}, memory={"available": 10 * GIB})
    rows = dict(fact_rows(diagnosis(*hosts, other)))
    first, second = rows["software"].splitlines()
    assert first.startswith("n1, n2, n3: Python 3.12.3")
    assert second.startswith("n4: ") and "torch 2.12.1" in second
    assert rows["processors"].count("\n") == 0
    assert rows["free memory"] == "10.0 GiB (n4) to 200.0 GiB (n3)"


def test_gpus_and_their_links() -> None:
    rows = dict(fact_rows(diagnosis(gpu_host())))
    assert rows["GPUs"] == ("8 x NVIDIA H100 80GB HBM3, 80.0 GiB, driver 570.86.15; links NV18 (28)")
    assert rows["backends"] == "gloo works, NCCL 2.27.3 works, CUDA 12.8"


def test_few_pairs_are_listed_and_many_summed_up() -> None:
    few = diagnosis(host("n1"), host("n2"), pairs=(pair(0, 1),))
    assert dict(fact_rows(few))["pairs"] == ("n1 to n2: 953.7 MiB/s, 50 µs, connected in 1.0 ms")
    hosts = [host(f"n{i}") for i in range(8)]
    pairs = tuple(pair(a, b, rate=1e8 if b == 7 else 1e9) for b in range(8) for a in range(b))
    rows = dict(fact_rows(diagnosis(*hosts, pairs=pairs)))
    assert rows["pairs"].startswith("28 of 28 pairs of hosts: median 953.7 MiB/s (95.4 MiB/s to")
    assert all("to n7: 95.4 MiB/s" in line for line in rows["slowest pairs"].splitlines())


def test_an_all_reduce_is_told_by_its_bus_rate() -> None:
    timings = [
        CollectiveTiming(size=4096, seconds=1e-4, bus_rate=1e6),
        CollectiveTiming(size=16 << 20, seconds=0.01, bus_rate=1e9),
    ]
    report = CollectiveReport(backend="gloo", hosts=2, world_size=2, timings=timings)
    whole = diagnosis(host()).model_copy(update={"collectives": [report]})
    assert dict(fact_rows(whole))["all-reduce"] == (
        "gloo, 2 ranks on 2 hosts: 953.7 MiB/s (bus rate at 16.0 MiB), 100 µs at 4.0 KiB"
    )


def test_the_verdict_comes_last(capsys: pytest.CaptureFixture[str]) -> None:
    print_diagnosis(diagnosis(host("n1"), host("n2"), findings=(LOCKS, QUOTA)))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 hosts (ssh): n1, n2, for demo"
    assert lines[-4:] == [
        "✗ n2 run directory: no  [locks]",
        "! n1 processors: the control group grants 2  [cpu-quota]",
        "  → raise it",
        "✗ 1 error would break a launch of demo (1 warning)",
    ]
    print_diagnosis(diagnosis(host("n1")))
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "✓ nothing found that would break a launch of demo"


def test_control_characters_of_a_host_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_diagnosis(diagnosis(host("n\x1b[31m1", software={"system": "\x1b]0;owned\x07"})))
    assert "\x1b" not in capsys.readouterr().out


def test_of_many_findings_of_a_rule_the_last_shown_counts_the_rest() -> None:
    many = [QUOTA.model_copy(update={"message": str(n)}) for n in range(20)]
    shown = shown_findings([*many, LOCKS])
    assert [each.message for each in shown] == [*"0123", "4 (and 15 more like this)", "no"]


def test_markdown_escapes_what_hosts_say() -> None:
    ill = host("n1", software={"system": "<b>|`x`|</b>", "environment": {"LANG": "a|b"}})
    text = "\n".join(markdown_lines(diagnosis(ill, findings=(LOCKS,))))
    assert "&lt;b>\\|\\`x\\`\\|&lt;/b>" in text
    assert "| n1: `LANG` | a\\|b |" in text
    assert "- **error** run directory on n2: no \\[locks\\]" in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert all(line.replace("\\|", "").count("|") == 3 for line in rows)
