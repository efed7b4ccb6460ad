"""Jobs with experts: refused layouts as recorded, and all that is wrong with one said at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpctl.core.errors import InputError
from mpctl.plan.planning.plan import load_plan
from tests.jobs import GPT, answers

FILE = Path(__file__).parents[2] / "recorded" / "expert_groups.json"
RECORD = json.loads(FILE.read_text("utf-8"))
NODES = {"cluster.nodes": 2}


def sizes_of(case: dict[str, Any]) -> dict[str, Any]:
    sizes = {f"parallel.{key}": case[key] for key in ("tp", "cp", "pp", "etp", "ep", "order")}
    return {**NODES, "cluster.gpus_per_node": case["world_size"] // 2, **sizes}


@pytest.mark.parametrize("case", RECORD["refused"], ids=lambda case: f"ep {case['ep']}")
def test_a_layout_that_megatron_refuses_is_refused(case: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        load_plan(None, sizes_of(case))
    (issue,) = caught.value.issues
    assert issue.rule == "same-pipelines"
    assert "tp-cp-ep-dp-pp" in issue.hint


@pytest.mark.parametrize("case", RECORD["cases"], ids=lambda case: case["order"])
def test_a_layout_that_megatron_has_is_legal(case: dict[str, Any]) -> None:
    assert load_plan(None, sizes_of(case)).job.expert_sizes["edp"] == case["edp"]


def test_all_that_is_wrong_with_a_job_is_said_at_once() -> None:
    wrong = {
        **NODES,
        "cluster.gpus_per_node": 8,
        "parallel.tp": 2,
        "parallel.ep": 3,
        "parallel.etp": 3,
        "model.experts": 8,
        "model.experts_per_token": 9,
        "model.expert_ffn": 64,
        "model.router_groups": 3,
        "model.router_groups_per_token": 4,
        "model.router_bias": True,
        "model.shared_expert_gate": True,
        "model.kv_lora_rank": 32,
    }
    with pytest.raises(InputError) as caught:
        load_plan(None, {**GPT, **wrong})
    found = {issue.rule: issue for issue in caught.value.issues}
    assert set(found) == {
        "expert-world-size",
        "ep-divides-experts",
        "etp-divides-experts",
        "experts-split-tokens",
        "experts-per-token",
        "router-groups",
        "router-groups-kept",
        "router-bias",
        "shared-expert-gate",
        "latent-widths",
    }
    assert all(issue.hint for issue in found.values())


def test_tp_without_a_model_needs_no_split_sequence() -> None:
    settings = {
        "cluster.nodes": 4,
        "cluster.gpus_per_node": 8,
        "parallel.tp": 2,
        "parallel.cp": 2,
        "parallel.pp": 2,
        "parallel.ep": 4,
    }
    checks = load_plan(None, settings).checks
    assert not [check for check in checks if check.status == "error"]
    (view,) = [check for check in checks if check.rule == "expert-world-size"]
    assert view.message == "etp 1 x ep 4 x edp 4 x pp 2 fills 32 ranks"


def test_what_leaves_a_domain_is_counted_of_all_its_parts() -> None:
    """32 ranks of ep over 4 nodes: 3/4 of the rows leave a node; 2 x 1024 tokens of 768 floats."""
    job = {
        "cluster.nodes": 4,
        "cluster.gpus_per_node": 8,
        "model.experts": 32,
        "model.experts_per_token": 2,
        "parallel.ep": 32,
    }
    (check,) = answers("ep-within-nvlink-domain", job)
    assert check.status == "warning"
    assert "75% of the rows, 4.5 MiB of 6.0 MiB a rank" in check.message


def test_bounds_of_thousands_offer_the_nearest_values() -> None:
    """Once all numbers up to the bound."""
    job = {"model.experts": 2**16 - 1, "model.experts_per_token": 2**16}
    (check,) = answers("experts-per-token", job)
    assert [list(offer.values) for offer in check.offers] == [[2**16 - 3, 2**16 - 2, 2**16 - 1]]
