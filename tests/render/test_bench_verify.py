"""A verify report as text: the verdict first, what was left out and what did not run as planned."""

from __future__ import annotations

import pytest

from mpctl.render.bench_verify import print_verify
from mpctl.units import seconds_span_text
from tests.bench.verify_runs import verification


def test_the_verdict_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    report = verification(within=0.05, left_out={"layouts of 8 ranks": "1 GPU"}).report()
    print_verify(report)
    out = capsys.readouterr().out
    first, text = out.split("\n")[0], " ".join(out.split())
    assert "9.1% off on average over 1 layout within cores (at most 5% wanted)" in first
    assert first.startswith(("✗", "x"))
    for words in ("tp4*", "rehearsal: more ranks than the 2 cores", "left out layouts of 8 ranks",
                  "tp4 did not run as planned: rank 0, tp all_reduce", "not complete",
                  "the rank of layout 1 rank had a core for less than 85% of a step"):  # fmt: skip
        assert words in text


def test_a_report_of_nothing_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    empty = verification()
    empty.runs.clear()
    print_verify(empty.report())
    assert capsys.readouterr().out.startswith("nothing was measured")


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (0.525, 0.7793, "525 to 779 ms"),
        (0.93, 1.34, "0.93 to 1.34 s"),
        (0.0123, 0.0456, "12.3 to 45.6 ms"),
        (2e-6, 9e-6, "2.00 to 9.00 µs"),
        (900.0, 90_000.0, "15 to 1500 min"),
    ],
)
def test_a_span_of_time_has_its_unit_once(low: float, high: float, text: str) -> None:
    assert seconds_span_text(low, high) == text
