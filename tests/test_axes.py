"""Orders of axes and the kinds of groups."""

from __future__ import annotations

import pytest

from mpctl.axes import AXIS_NAMES, DEFAULT_ORDER, GROUP_KINDS, parse_order

BUSY = dict.fromkeys(AXIS_NAMES, 2)


@pytest.mark.parametrize(
    ("order", "sizes", "parsed"),
    [
        (DEFAULT_ORDER, BUSY, ("tp", "cp", "dp", "pp")),
        ("tp-cp-pp-dp", BUSY, ("tp", "cp", "pp", "dp")),
        ("dp-tp", {"tp": 2, "dp": 2}, ("dp", "tp", "cp", "pp")),
        ("pp", {}, ("pp", "tp", "cp", "dp")),
    ],
)
def test_an_order_names_the_axes_fastest_first(
    order: str, sizes: dict[str, int], parsed: tuple[str, ...]
) -> None:
    assert parse_order(order, sizes) == parsed


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        ("tp-cp-dp", "missing pp"),
        ("tp-cp-dp-pp-ep", "unknown ep"),
        ("tp-tp-cp-dp-pp", "repeated tp"),
        ("tp,cp,dp,pp", "unknown tp,cp,dp,pp"),
        ("TP-cp-dp-pp", "unknown TP; missing tp"),
        ("", "unknown ; missing tp, cp, dp, pp"),
    ],
)
def test_a_bad_order_says_what_is_wrong_with_it(order: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_order(order, BUSY)


def test_group_kinds_are_made_of_axes() -> None:
    assert all(set(axes) <= set(AXIS_NAMES) for axes in GROUP_KINDS.values())
    assert GROUP_KINDS["mp"] == ("tp", "pp")
