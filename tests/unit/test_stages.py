"""Layers over stages: which stack they are of, and the cut whose slowest stage is fastest."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.stages import Costs, Span, UnevenLayersError, balanced_layers, stack_spans, stage_layers


@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 18), min_size=2, max_size=6).map(sorted),
)
def test_every_layer_is_found_in_its_stack(sizes: list[int], cuts: list[int]) -> None:
    names = [(stack, layer) for stack, size in enumerate(sizes) for layer in range(size)]
    spans: list[Span] = list(zip(cuts[::2], cuts[1::2], strict=False))
    found = [
        (stack, layer)
        for stack, own in enumerate(stack_spans(spans, sizes))
        for span in own
        for layer in range(*span)
    ]
    held = [names[layer] for span in spans for layer in range(*span) if layer < len(names)]
    assert sorted(found) == sorted(held)


def test_costs_of_stages_by_hand() -> None:
    costs = Costs([1, 2, 3, 4], entry=0.5, exit=10)
    assert costs.of_stages([[(0, 1), (2, 3)], [(1, 2), (3, 4)]]) == [4.5, 16]


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "exit_", "counts"),
    [
        (24, 4, 1, 0, [6, 6, 6, 6]),
        (24, 4, 1, 3.5, [7, 7, 7, 3]),  # 27.5 / 4 is 6.9
        (12, 2, 1, 3, [7, 5]),  # 7 and 8: as 8 and 7, but more even
        (24, 4, 2, 3.5, [4, 8, 8, 4]),  # two of each chunk: 8 is the least
        (13, 4, 1, 0, [4, 3, 3, 3]),
        (3, 4, 1, 0, None),
        (6, 2, 4, 0, None),  # two stages of 4 chunks hold 8
    ],
)
def test_balanced_by_hand(
    layers: int, pp: int, vpp: int, exit_: float, counts: list[int] | None
) -> None:
    found = balanced_layers(Costs([1] * layers, exit=exit_), pp=pp, vpp=vpp)
    assert found == counts or (found and counts and found[::-1] == counts and not exit_)


@given(
    layers=st.lists(st.sampled_from([0.5, 1, 1, 2]), min_size=1, max_size=16),
    pp=st.integers(2, 5),
    vpp=st.integers(1, 2),
    entry=st.sampled_from([0, 2.5]),
    exit_=st.sampled_from([0, 3.5, 8]),
)
def test_no_cut_is_better(
    layers: list[float], pp: int, vpp: int, entry: float, exit_: float
) -> None:
    costs, whole = Costs(layers, entry, exit_), range(1, len(layers) + 1)
    slowest = []
    for first, last in product(whole, whole):
        try:
            stages = stage_layers(len(layers), pp=pp, vpp=vpp, first=first, last=last)
        except UnevenLayersError:
            continue
        if all(start < stop for spans in stages for start, stop in spans):
            slowest.append(max(costs.of_stages(stages)))
    counts = balanced_layers(costs, pp=pp, vpp=vpp)
    assert (counts is None) == (not slowest)
    if counts is not None:
        first, last = counts[0], counts[-1]
        stages = stage_layers(len(layers), pp=pp, vpp=vpp, first=first, last=last)
        assert [sum(b - a for a, b in spans) for spans in stages] == counts
        assert max(costs.of_stages(stages)) == pytest.approx(min(slowest))
