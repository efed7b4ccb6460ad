"""Gates on a comparison: what they read, when they fail, what they refuse."""

from __future__ import annotations

import pytest

from mpctl.core.errors import InputError
from mpctl.plan.planning.gates import Figures, GateEntry, judge, read_gates

GIB = 2**30
BASE: Figures = {"peak_bytes": 100 * GIB, "step_seconds": 10.0, "tokens_per_second": 70e3, "mfu": 0.5, "seconds.tp": 0}
JOB: Figures = {"peak_bytes": 103 * GIB, "step_seconds": 9.0, "tokens_per_second": 63e3, "mfu": 0.4, "seconds.tp": 0.1}


def answer(text: str, job: Figures = JOB) -> GateEntry:
    (entry,) = judge(read_gates([text]), ["base", "job"], [BASE, job])
    return entry


@pytest.mark.parametrize(
    ("text", "failed"),
    [
        ("memory>+2%", True),
        ("memory>+3.1%", False),
        ("memory > 102 GiB", True),
        ("memory>104GiB", False),
        ("peak_bytes>102GiB", True),
        ("step>+5%", False),
        ("step<-5%", True),
        ("step>8s", True),
        ("step>9500ms", False),
        ("tokens<-9%", True),
        ("tokens<-11%", False),
        ("tokens<64k", True),
        ("mfu<45%", True),
        ("mfu<0.39", False),
        ("mfu<-10%", True),
        ("seconds.tp>50ms", True),
    ],
)
def test_a_gate_fails_beyond_its_limit(text: str, failed: bool) -> None:
    """By hand: memory +3 %, step -10 %, tokens -10 %, MFU 40 % after 50 %."""
    assert answer(text)["failed"] is failed


def test_a_figure_at_its_limit_passes() -> None:
    assert not answer("step>9s")["failed"] and not answer("step<9s")["failed"]


def test_the_answer_has_base_value_and_change() -> None:
    entry = answer("memory>+2%")
    assert (entry["figure"], entry["job"], entry["limit"], entry["is_change"]) == ("memory", "job", 0.02, True)
    assert (entry["base"], entry["value"]) == (100 * GIB, 103 * GIB) and entry["change"] == pytest.approx(0.03)
    assert answer("seconds.tp>1s")["change"] is None  # from 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("memory", "write FIGURE>LIMIT or FIGURE<LIMIT"),
        ("memory>=+2%", "'memory>=+2%' is no gate"),
        ("memory>2%", "+2% and -2% are changes from the first job"),
        ("tokens<5%", "has no sign"),
        ("memory>16s", "it is a time, and memory is wanted"),
        ("step>16", "it has no unit"),
    ],
)
def test_a_bad_gate_is_refused_with_the_grammar(text: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        read_gates([text])
    assert words in str(caught.value)


def test_all_bad_gates_are_named_at_once() -> None:
    with pytest.raises(InputError) as caught:
        read_gates(["memory", "step>+5%", "mfu"])
    assert len(caught.value.issues) == 2


@pytest.mark.parametrize(
    ("text", "job", "words"),
    [
        ("step>+5%", {**JOB, "step_seconds": None}, "step is not known for job"),
        ("step>+5%", {"ranks": 2}, "step is not known for job"),
        ("stepp>+5%", JOB, "'stepp' is no figure (use memory, step, tokens, mfu, price, or one of peak_bytes"),
        ("seconds.tp>+5%", JOB, "seconds.tp is 0 in base"),
        ("price>+5%", JOB, "cluster.operations.price_per_gpu_hour"),
    ],
)
def test_a_gate_never_passes_for_want_of_a_figure(text: str, job: Figures, words: str) -> None:
    with pytest.raises(InputError) as caught:
        answer(text, job)
    assert words in str(caught.value)
