"""Megatron's words for a pipeline layout: read, refused, written."""

from __future__ import annotations

import re
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpctl.spec.layout_text import LayoutPart, parse_layout, stage_sizes, write_layout


@pytest.mark.parametrize(
    ("text", "parts", "written"),
    [
        ("Et*4|(t*4|)*14tmL", ["Etttt", *["tttt"] * 14, "tmL"], "E(t*4|)*15tmL"),  # MLPerf 6.0, DeepSeek-V3
        ("Et*3|(tt|)*29,m|L", ["Ettt", *["tt"] * 29, "m", "L"], "Et(tt|)*30m|L"),
        ("E|*3tL", ["E", "", "", "tL"], "E|*3tL"),
        ("E,t,*2,|t*0(t|)*2L", ["Ett", "t", "t", "L"], "Ett|t|t|L"),
    ],
)
def test_what_megatron_reads(text: str, parts: list[str], written: str) -> None:
    layout = parse_layout(text)
    assert not layout.problems
    assert [part.text for part in layout.parts] == parts
    assert write_layout(layout.parts) == written


@st.composite
def _layouts(draw: st.DrawFn) -> list[LayoutPart]:
    counts = draw(st.lists(st.integers(0, 9), min_size=1, max_size=40))
    if draw(st.booleans()):
        counts = [*counts, *[draw(st.integers(0, 4))] * draw(st.integers(0, 20))]
    counts[draw(st.integers(0, len(counts) - 1))] += 1
    last = max(n for n, count in enumerate(counts) if count)
    ahead, place = draw(st.integers(0, 3)), draw(st.integers(last, len(counts) - 1))
    return [
        LayoutPart(n == 0, count, ahead if n == place else 0, n == len(counts) - 1) for n, count in enumerate(counts)
    ]


@given(_layouts())
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read(parts: list[LayoutPart]) -> None:
    text = write_layout(parts)
    layout = parse_layout(text)
    assert list(layout.parts) == parts and not layout.problems
    assert len(text) <= len("|".join(part.text for part in parts))


@given(st.text("EtmL|()*,0123 x", max_size=30))
@settings(max_examples=200, deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    layout = parse_layout(text)
    assert all(0 <= problem.at <= len(text) and problem.hint for problem in layout.problems)
    if not layout.problems:
        assert parse_layout(write_layout(layout.parts)).parts == layout.parts


def test_the_text_is_the_shortest() -> None:
    """Beside all texts of one group with runs, of small layouts."""
    draw = Random(3)
    for _ in range(30):
        words = "E" + "".join(draw.choice("tt|") for _ in range(draw.randrange(1, 12))) + "tL"
        flat = write_layout(parse_layout(words).parts)
        for start in range(len(words)):
            for stop in range(start + 1, len(words) + 1):
                period = words[start:stop]
                count = (len(words) - start) // len(period)
                while count > 1 and words[start : start + count * len(period)] != period * count:
                    count -= 1
                other = f"{words[:start]}({period})*{count}{words[start + count * len(period) :]}"
                assert count == 1 or len(flat) <= len(other)


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        ("ET|tL", ["position 2: 'T' is no item"]),
        ("Et((t|)*2)*3L", ["position 4: a group inside the one of position 3"]),
        ("Et|(tt|tL", [r"position 4: `\(` without `\)`"]),
        ("Et|tt)|tL", [r"position 6: `\)` without `\(`"]),
        ("E(tt|)tL", ["position 6: the group is not repeated"]),
        ("E*|tL", [r"position 2: `\*` without a number"]),
        ("*2Et|tL", [r"position 1: `\*` follows no letter"]),
        ("tE|tL", ["position 2: E, the embedding, is not first"]),
        ("Et|Lt", ["position 4: L, the loss, is not last"]),
        ("EtE|t", ["2 times E", "0 times L"]),
        ("E|L", ["no layer t"]),
        ("Etm|tL", ["position 5: a layer t behind multi-token prediction m of position 3"]),
        ("Et|m|mL", ["position 6: layers m of multi-token prediction are in several stages"]),
        ("E(t|)*99999L", ["letters and bars when expanded, above 20,000"]),
        ("Xt|mt*", ["0 times E", "0 times L", "position 1: 'X'", "position 5: a layer t behind", r"position 6: `\*`"]),
    ],
)
def test_all_errors_at_once(text: str, errors: list[str]) -> None:
    problems = parse_layout(text).problems
    assert len(problems) == len(errors)
    for problem, error in zip(problems, errors, strict=True):
        assert re.search(error, str(problem)) and problem.hint


def test_sizes_follow_from_the_parts() -> None:
    assert stage_sizes("Et|t|t|tL", {"vpp": 2}) == {"pp": 2}
    assert stage_sizes("Et|t|t|tL", {"pp": 2, "vpp": 1}) == stage_sizes("Et|t|t|tL", {"pp": 3}) == {}
