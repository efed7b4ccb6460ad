"""What repeats stands once: runs, groups, layers, nodes; checked against lists spelled out."""

from __future__ import annotations

from itertools import permutations, product

from mpctl.core.axes import AXIS_NAMES
from mpctl.core.topology import Topology
from mpctl.core.units import bytes_span_text, plural
from mpctl.render.fold import fold, groups_text, layers_text, members_text, nodes_are_alike


def test_runs_of_equal_keys() -> None:
    assert fold("abbbca") == [(0, 0), (1, 3), (4, 4), (5, 5)]
    assert fold("") == []


def test_members_of_a_group() -> None:
    for ranks, text in (
        (range(2), "[0,1]"),
        (range(8), "[0-7]"),
        (range(0, 64, 8), "[0,8,16,24,32,40,48,56]"),
        (range(0, 1024, 64), "[0,64,128,...,960]"),
        ([0, 1, 4, 5], "[0,1,4,5]"),
        ([r + 64 * s for s in range(16) for r in range(8)], "[0-7,64-71,128-135,...,960-967]"),
    ):
        assert members_text(ranks) == text
    assert members_text(ranks, whole=True) == str(list(ranks)).replace(" ", "")


def test_groups_that_have_no_room_are_left_out_but_the_last() -> None:
    groups = [range(s, s + 8) for s in range(0, 1024, 8)]
    assert groups_text(groups, 28) == "[0-7] [8-15] ... [1016-1023]"
    assert groups_text(groups, 27) == "[0-7] ... [1016-1023]"
    assert groups_text(groups, 14) == "[0-7] ..."
    assert groups_text(groups[:2], 60) == "[0-7] [8-15]"
    assert groups_text(groups[:1], 1) == "[0-7]"
    strided = [range(s, 64 + s, 8) for s in range(8)]
    assert groups_text(strided, 40) == "[0,8,16,...,56] ... [7,15,23,...,63]"
    assert groups_text(strided[:2], 60) == "[0,8,16,24,32,40,48,56] [1,9,17,25,33,41,49,57]"


def test_layers_at_equal_distances_are_folded() -> None:
    assert layers_text([(4 * k, 4 * k + 1) for k in range(20)]) == "0, 4, ... 76"
    assert layers_text([(0, 6), (24, 30), (48, 54), (72, 78)]) == "0-5, 24-29, ... 72-77"
    assert layers_text([(0, 6), (12, 18)]) == "0-5 12-17"
    assert layers_text([(16, 16)]) == "none"
    assert layers_text([(0, 2), (4, 5), (6, 9), (12, 13)]) == "0-1 4 6-8 12"


def test_nodes_said_to_be_alike_are() -> None:
    """Alike: the coordinates of a node's ranks, counted from its first rank, are the same."""
    worlds = ({"tp": 2, "dp": 4, "pp": 8}, {"tp": 2, "dp": 3, "pp": 4})
    for order, sizes, per_node in product(permutations(AXIS_NAMES), worlds, (2, 3, 4, 6, 8)):
        topology = Topology.of(sizes, order="-".join(order), gpus_per_node=per_node)
        if topology.world_size % per_node:
            continue
        shapes = set()
        for first in range(0, topology.world_size, per_node):
            start = topology.coords(first)
            ranks = map(topology.coords, range(first, first + per_node))
            shapes.add(tuple(tuple(c[axis] - start[axis] for axis in AXIS_NAMES) for c in ranks))
        assert nodes_are_alike(topology) == (len(shapes) == 1), (order, sizes, per_node)


def test_words_for_counts_and_ranges() -> None:
    assert (plural(1, "node"), plural(1024, "node")) == ("1 node", "1,024 nodes")
    assert plural(2, "batch", "batches") == "2 batches"
    assert bytes_span_text(614 * 2**20, 3.9 * 2**30) == "0.6-3.9 GiB"
    assert bytes_span_text(2**30, 2**30 + 1) == "1.0 GiB"
    assert bytes_span_text(3, 500) == "3-500 B"
