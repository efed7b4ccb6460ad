"""NVLink domains and the networks above them: in words, as JSON and as frames of pictures."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mpctl.plan.planning.document import plan_document
from mpctl.plan.planning.plan import Plan, load_plan
from mpctl.plan.planning.summary import links_text
from mpctl.render.plan_map import map_of
from mpctl.render.plan_svg import plan_svg
from tests.cli.calls import Mpctl

PODS = [{"name": "pod", "gpus": 576, "oversubscription": 4.0}]
RACKS = {"cluster": "dgx-gb200", "cluster.nodes": 256, "parallel.tp": 8, "parallel.pp": 16, "cluster.fabric": PODS}


def plan_of(settings: dict[str, Any]) -> Plan:
    return load_plan(None, settings)


def test_links_beyond_the_node_are_told() -> None:
    """1,024 GPUs in 16 racks of 64 of 72, 8 racks a pod; a stage is one rack."""
    plan = plan_of(RACKS)
    topology = plan.require_legal()
    assert links_text(plan, topology) == (
        "16 NVLink domains of 64 ranks (16 nodes), NVLink5 900 GB/s a GPU; between them InfiniBand "
        "NDR 200 GB/s a node; 2 pods of 512 ranks, 1:4 oversubscribed"
    )
    document = plan_document(plan, topology, kinds=None, ranks=False)
    assert [(link["name"], link["ranks"], link["networks"]) for link in document["links"]] == [
        ("node", 4, 256),
        ("NVLink domain", 64, 16),
        ("pod", 512, 2),
    ]
    within = {kind: document["within"][kind] for kind in ("tp", "cp", "dp", "pp")}
    assert within == {"tp": "NVLink domain", "cp": "node", "dp": "NVLink domain", "pp": None}


def test_a_cluster_of_nodes_alone_is_told_as_before() -> None:
    plan = plan_of({"cluster": "selene", "cluster.nodes": 2, "parallel.tp": 8})
    topology = plan.require_legal()
    assert links_text(plan, topology) == ""
    document = plan_document(plan, topology, kinds=None, ranks=False)
    assert [link["name"] for link in document["links"]] == ["node"]
    assert document["within"]["tp"] == "node" and document["within"]["dp"] is None


@pytest.mark.parametrize(
    ("settings", "frames"),
    [
        (RACKS, [*(f"NVLink domain {n}" for n in range(16)), "pod 0, 1:4 oversubscribed", "pod 1, 1:4 oversubscribed"]),
        ({**RACKS, "cluster.nodes": 8, "parallel.pp": 1}, ["NVLink domain 0"]),
        ({**RACKS, "cluster.nodes": 36, "parallel.tp": 4, "parallel.pp": 1}, ["NVLink domain 0", "NVLink domain 1"]),
    ],
)
def test_pictures_frame_domains_and_pods(settings: dict[str, Any], frames: list[str]) -> None:
    plan = plan_of(settings)
    topology = plan.require_legal()
    drawn = plan_svg(plan, topology)
    assert sorted(re.findall(r">((?:NVLink domain|pod) \d+[^<;]*)<", drawn)) == sorted(frames)
    titles = re.findall(r"<title>(rank \d+|node \d+)</title>", drawn)
    cells = topology.world_size if titles[0].startswith("rank") else topology.nodes
    assert len(set(titles)) == len(titles) == cells
    assert drawn.count('class="box level"') == len(frames)
    page = "".join(map_of(plan, topology))
    assert sorted(re.findall(r"<h3>((?:NVLink|pod)[^<]*)</h3>", page)) == sorted(frames)
    assert len(set(re.findall(r"data-r=\"(\d+)\"", page))) == len(titles)


def test_a_table_of_groups_says_within_which_level_each_lies(mpctl: Mpctl) -> None:
    said = mpctl("plan", "--cluster", "dgx-gb200", "--nodes", 32, "--tp", 8, "--pp", 2).out
    assert re.search(r"^tp +16 +8 +NVLink domain ", said, re.M)
    assert re.search(r"^pp +64 +2 +- ", said, re.M)
    assert "within" not in mpctl("plan", "--nodes", 2, "--gpus-per-node", 8, "--tp", 2).out
