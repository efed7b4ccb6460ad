"""GPUs as cells: every rank once, places as the rank law says, and words that stay words."""

from __future__ import annotations

from io import StringIO
from itertools import permutations, product

from rich.console import Console

from mpctl.core.axes import AXIS_NAMES, GROUP_KINDS
from mpctl.core.topology import Topology
from mpctl.plan.planning.plan import load_plan
from mpctl.render.cells import TILES, boxes, experts_text, extent, group_number, letters, place_names
from mpctl.render.markup import Raw, el
from mpctl.render.plan_layout import node_letters

ORDERS = ["-".join(order) for order in permutations(AXIS_NAMES)]


def test_a_group_number_is_one_group() -> None:
    for order, kind in product(ORDERS[::5], ("tp", "cp", "dp", "pp", "mp")):
        topology = Topology.of({"tp": 2, "cp": 3, "dp": 2, "pp": 4}, order=order, gpus_per_node=8)
        numbers = [
            {group_number(topology, rank, GROUP_KINDS[kind]) for rank in group} for group in topology.kind_groups(kind)
        ]
        assert all(len(found) == 1 for found in numbers), (order, kind)
        assert set.union(*numbers) == set(range(len(numbers))), (order, kind)


def experts_topology() -> Topology:
    """32 ranks, experts along etp 2, ep 4 and edp 2."""
    dense = Topology.of({"tp": 2, "cp": 2, "dp": 4, "pp": 2}, gpus_per_node=8)
    sizes = {"etp": 2, "ep": 4, "edp": 2, "pp": 2}
    view = dense.view(sizes, order="etp-ep-edp-pp", unions={"etp_ep": ("etp", "ep")})
    return dense.joined(view)


def test_a_cell_says_where_the_experts_of_its_ranks_are() -> None:
    topology = experts_topology()
    for kind in ("etp", "ep", "edp", "etp_ep"):
        for at, group in enumerate(topology.kind_groups(kind)):
            assert {group_number(topology, rank, (kind,)) for rank in group} == {at}, kind
    for rank in range(32):
        coords = topology.whole_coords(rank)
        text = experts_text(topology, range(rank, rank + 1))
        assert text == f"ep {coords['ep']} etp {coords['etp']}"
    assert experts_text(topology, range(8)) == "ep 0-3 etp 0-1"
    assert place_names(topology) == "dp (d), pp (p), cp (c); then ep and etp"
    dense = Topology.of({"dp": 4})
    assert experts_text(dense, range(4)) == "" and place_names(dense) == "dp (d), pp (p)"


def test_a_node_s_box_holds_its_longest_row() -> None:
    """Places of two digits are in the second row of node 2 alone."""
    plan = load_plan(None, {"nodes": 4, "gpus_per_node": 8, "tp": 2})
    printed = StringIO()
    console = Console(file=printed, width=100)
    for part in node_letters(plan, plan.require_legal(), full=True):
        console.print(part)
    for place in range(16):
        assert printed.getvalue().count(f" d{place} p0") == 2, place


def test_every_rank_is_in_one_cell() -> None:
    for world in (2, 512, 513, 8192, 2**20):
        topology = Topology.of({"dp": world}, gpus_per_node=8)
        cells = [cell for box in boxes(topology) for cell in box.cells]
        assert [cell.start for cell in cells[1:]] == [cell.stop for cell in cells[:-1]]
        assert (cells[0].start, cells[-1].stop) == (0, world)
        assert len(cells) <= TILES


def test_the_extent_of_a_cell_holds_its_coordinates() -> None:
    for order, start, size in product(ORDERS[::7], range(0, 120, 6), (1, 6, 24)):
        topology = Topology.of({"tp": 2, "cp": 3, "dp": 4, "pp": 5}, order=order, gpus_per_node=6)
        ranks = range(start, min(start + size, 120))
        for axis in AXIS_NAMES:
            found = {topology.coords(rank)[axis] for rank in ranks}
            assert extent(topology, axis, ranks) == (min(found), max(found)), (order, ranks)


def test_letters_go_on_after_z() -> None:
    assert [letters(n) for n in (0, 25, 26, 27, 701, 702)] == ["a", "z", "aa", "ab", "zz", "aaa"]


def test_words_are_escaped_and_markup_is_not() -> None:
    assert el("p", "a<b", el("i", "&"), title='"x') == ('<p title="&quot;x">a&lt;b<i>&amp;</i></p>')
    assert el("p", Raw("<br>"), "\x00\x1b[31m") == "<p><br>\ufffd\ufffd[31m</p>"
