"""Parts of a tensor, of any cuts: they are the boxes of their blocks, and meet in boxes."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.core.shard import Box, Coverage, Shard, covers, meetings, numel

Element = tuple[int, ...]


def elements(box: Box) -> set[Element]:
    return set(product(*box))


def held(shard: Shard) -> set[Element]:
    return {element for box in shard.boxes() for element in elements(box)}


@st.composite
def some_blocks(draw: st.DrawFn, size: int) -> tuple[range, ...]:
    """Blocks of a dimension that do not overlap, in any order, some of them empty."""
    edges = sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=6)))
    blocks = [range(a, b) for a, b in zip(edges[::2], edges[1::2], strict=False)]
    return tuple(draw(st.permutations(blocks)))


@st.composite
def some_shards(draw: st.DrawFn, shape: tuple[int, ...]) -> Shard:
    dims = draw(st.sets(st.sampled_from(range(len(shape))))) if shape else set()
    return Shard(shape, {dim: draw(some_blocks(shape[dim])) for dim in dims})


SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@given(st.data())
def test_a_shard_is_its_boxes(data: st.DataObject) -> None:
    """They share no element, and side by side they fill the local tensor."""
    shard = data.draw(SHAPES.flatmap(some_shards))
    boxes = list(shard.boxes())
    local = [set(product(*(range(s.start, s.stop) for s in shard.slices(b)))) for b in boxes]
    assert sum(map(numel, boxes)) == len(held(shard)) == numel(tuple(map(range, shard.local_shape)))
    assert set().union(*local) == set(product(*map(range, shard.local_shape)))
    for dim, blocks in shard.cuts.items():
        assert shard.local_shape[dim] == sum(map(len, blocks))


@given(st.data())
def test_what_two_shards_share_is_boxes(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    one, other = (data.draw(some_shards(shape)) for _ in range(2))
    found = list(meetings(one, other))
    assert set().union(*map(elements, found)) == held(one) & held(other)
    assert sum(map(numel, found)) == len(held(one) & held(other))


@given(st.data())
def test_what_is_missing_is_what_no_part_holds(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    target = data.draw(some_shards(shape))
    parts = data.draw(st.lists(some_shards(shape), max_size=5))
    boxes = [box for part in parts for box in meetings(part, target)]
    coverage, left = Coverage(target, boxes), held(target)
    for box in boxes:
        assert coverage.add(box) == bool(left & elements(box))
        left -= elements(box)
    assert set().union(*map(elements, coverage.missing)) == left
    assert sum(map(numel, coverage.missing)) == len(left)
    everything = set(product(*map(range, shape)))
    assert covers(shape, parts) == (everything <= set().union(*map(held, parts)))


@pytest.mark.parametrize(
    ("cuts", "words"),
    [
        ({2: (range(1),)}, "dimension 2 of a shape of 2"),
        ({-1: (range(1),)}, "dimension -1 of"),
        ({0: (range(5, 7),)}, r"block \[5, 7\) leaves dimension 0 of \(6, 4\)"),
        ({1: (range(3, 1),)}, r"block \[3, 1\)"),
        ({1: (range(-1, 1),)}, r"block \[-1, 1\)"),
        ({0: (range(2, 4), range(3))}, r"\[0, 3\) and \[2, 4\) of dimension 0 overlap"),
    ],
)
def test_what_is_no_part_is_refused(cuts: dict[int, tuple[range, ...]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Shard((6, 4), cuts)


def test_a_box_that_it_does_not_hold_has_no_place() -> None:
    shard = Shard((6, 4), {0: (range(2), range(4, 6))})
    with pytest.raises(ValueError, match="in no block of dimension 0"):
        shard.slices((range(1, 5), range(4)))
