"""`mpctl plan --json`: the contract that scripts rely on."""

from __future__ import annotations

from itertools import permutations

import pytest

from mpctl.core.axes import AXIS_NAMES, GROUP_KINDS
from tests.cli.calls import Mpctl, assert_refused
from tests.cli.plan_calls import GOLDEN, document
from tests.test_rank_groups import TWO_NODES

BIG = ("plan", "--nodes", 131072, "--gpus-per-node", 8, "--tp", 8, "--pp", 16)


MIB = 2**20


def test_the_document_of_the_golden_case(mpctl: Mpctl) -> None:
    """Every key of contracts.md, for the job whose groups every text prints."""
    plan = document(mpctl("plan", "two-nodes-16-gpus", "--json"))
    assert plan["schema"] == "mpctl.plan/2"
    assert plan["world_size"] == 16
    assert plan["sizes"] == {"tp": 2, "cp": 1, "dp": 2, "pp": 4}
    assert plan["order"] == "tp-cp-dp-pp"
    assert plan["groups"] == TWO_NODES
    part = {"all_reduces": 2, "volume_phi": 4, "volume_bytes": 32 * MIB}
    assert plan["communication"]["phi_bytes"] == 8 * MIB
    assert plan["communication"]["layer"] == {
        "attention": part,
        "mlp": part,
        "all_reduces": 4,
        "volume_phi": 8,
        "volume_bytes": 64 * MIB,
        "ring_bytes_per_rank": 32 * MIB,
    }
    assert len(plan["memory"]["stages"]) == 4
    assert plan["time"]["step_seconds"] == pytest.approx(sum(plan["time"]["breakdown"].values()))


def test_ranks_of_the_golden_case(mpctl: Mpctl) -> None:
    ranks = document(mpctl("plan", "two-nodes-16-gpus", "--json"))["ranks"]
    assert [entry["rank"] for entry in ranks] == list(range(16))
    assert ranks[0] == {
        "rank": 0,
        "node": 0,
        "local_rank": 0,
        "coords": {"tp": 0, "cp": 0, "dp": 0, "pp": 0},
        "layers": [[0, 6]],
    }
    assert ranks[13] == {
        "rank": 13,
        "node": 1,
        "local_rank": 5,
        "coords": {"tp": 1, "cp": 0, "dp": 0, "pp": 3},
        "layers": [[18, 24]],
    }


def test_checks_say_rule_status_and_message(mpctl: Mpctl) -> None:
    checks = document(mpctl("plan", "two-nodes-16-gpus", "--json"))["checks"]
    assert all({"rule", "status", "message"} <= set(check) for check in checks)
    status = {check["rule"]: check["status"] for check in checks}
    assert status["tp-within-nvlink-domain"] == status["memory-fits"] == "ok"


def test_without_a_model_there_is_topology_placement_and_checks(mpctl: Mpctl) -> None:
    plan = document(mpctl(*GOLDEN, "--json"))
    assert plan["groups"] == TWO_NODES
    assert [check["status"] for check in plan["checks"]] == ["ok"] * 3
    assert not {"communication", "memory", "time"} & set(plan)
    assert "layers" not in plan["ranks"][0]


def test_tp_1_sends_nothing(mpctl: Mpctl) -> None:
    sent = document(mpctl("plan", "--model", "gpt2", "--dp", 2, "--json"))["communication"]
    nothing = {"all_reduces": 0, "volume_phi": 0, "volume_bytes": 0}
    layer = {"attention": nothing, "mlp": nothing, **nothing, "ring_bytes_per_rank": 0}
    assert sent["layer"] == layer
    assert sent["phi_bytes"] == 1024 * 768 * 4


@pytest.mark.parametrize(
    ("flags", "kinds", "with_ranks"),
    [
        ((), list(GROUP_KINDS), True),
        (("--groups", "tp,dp"), ["tp", "dp"], False),
        (("--groups", "mp,mp"), ["mp"], False),
        (("--groups", "all"), list(GROUP_KINDS), False),
        (("--groups", "none"), [], False),
        (("--groups", "none", "--ranks"), [], True),
        (("--groups", "pp", "--ranks"), ["pp"], True),
        (("--ranks",), list(GROUP_KINDS), True),
    ],
)
def test_groups_says_what_is_listed_and_leaves_ranks_out_unless_asked(
    mpctl: Mpctl, flags: tuple[str, ...], kinds: list[str], with_ranks: bool
) -> None:
    plan = document(mpctl(*GOLDEN, "--json", *flags))
    assert plan["groups"] == {kind: TWO_NODES[kind] for kind in kinds}
    assert ("ranks" in plan) == with_ranks
    assert len(plan.get("ranks", range(16))) == 16


def test_groups_of_a_grid_by_name(mpctl: Mpctl) -> None:
    square = ("plan", "--tp", 4, "--tensor-mode", "2d", "--micro-batch-size", 2, "--json")
    plan = document(mpctl(*square, "--groups", "row,tp"))
    assert plan["groups"] == {"row": [[0, 2], [1, 3]], "tp": [[0, 1, 2, 3]]}
    refused = mpctl(*square, "--groups", "depth")
    assert "tp, col, row, cp, dp, pp" in refused.issues["unknown-group"]["hint"]


def test_one_rank_with_every_group_it_is_in(mpctl: Mpctl) -> None:
    """Rank 5 is in stage 1, which no embedding group holds."""
    rank = document(mpctl("plan", "two-nodes-16-gpus", "--rank", 5, "--json"))
    assert rank == {
        "schema": "mpctl.rank/1",
        "world_size": 16,
        "rank": 5,
        "node": 0,
        "local_rank": 5,
        "coords": {"tp": 1, "cp": 0, "dp": 0, "pp": 1},
        "layers": [[6, 12]],
        "groups": {
            "tp": [4, 5],
            "cp": [5],
            "dp": [5, 7],
            "pp": [1, 5, 9, 13],
            "dp_cp": [5, 7],
            "mp": [0, 1, 4, 5, 8, 9, 12, 13],
        },
    }
    last = document(mpctl(*GOLDEN, "--rank", 14, "--json"))["groups"]
    assert (last["embedding"], "position_embedding" in last) == ([2, 14], False)


@pytest.mark.parametrize("rank", [99, 16, -1])
def test_a_rank_that_does_not_exist(mpctl: Mpctl, rank: int) -> None:
    said = mpctl(*GOLDEN, f"--rank={rank}", "--json")
    assert said.code == 2
    assert said.issues["no-such-rank"]["hint"] == "use 0 to 15"
    assert str(rank) in said.issues["no-such-rank"]["message"]
    assert_refused(mpctl(*GOLDEN, f"--rank={rank}"), wants_json=False)


def test_an_unknown_group_kind(mpctl: Mpctl) -> None:
    said = mpctl(*GOLDEN, "--groups", "tp,xp", "--json")
    assert (said.code, said.issues["unknown-group"]["where"]) == (2, "--groups")
    assert "'xp'" in said.issues["unknown-group"]["message"]


def test_a_million_ranks_are_summarised(mpctl: Mpctl) -> None:
    plan = document(mpctl(*BIG, "--json"))
    assert plan["world_size"] == 1_048_576
    assert "ranks" not in plan
    assert plan["groups"]["tp"] == {
        "count": 131072,
        "size": 8,
        "first": [0, 1, 2, 3, 4, 5, 6, 7],
        "last": list(range(1_048_568, 1_048_576)),
    }
    pp = plan["groups"]["pp"]
    assert (pp["count"], pp["size"], pp["last"][-1]) == (65536, 16, 1_048_575)
    assert plan["groups"]["embedding"]["first"] == [0, 983040]
    assert plan["groups"]["position_embedding"]["last"] == [65535]
    rank = document(mpctl(*BIG, "--rank", 1_048_575, "--json"))
    assert rank["coords"] == {"tp": 7, "cp": 0, "dp": 8191, "pp": 15}


def test_many_groups_are_listed_when_asked(mpctl: Mpctl) -> None:
    large = ("plan", "--nodes", 4096, "--gpus-per-node", 8, "--tp", 8)
    groups = document(mpctl(*large, "--json", "--groups", "tp"))["groups"]
    assert (len(groups["tp"]), groups["tp"][-1]) == (4096, list(range(32760, 32768)))


@pytest.mark.parametrize(("nodes", "listed"), [(512, True), (513, False)])
def test_up_to_4096_ranks_everything_is_listed(mpctl: Mpctl, nodes: int, listed: bool) -> None:
    plan = document(mpctl("plan", "--nodes", nodes, "--gpus-per-node", 8, "--tp", 8, "--json"))
    assert ("ranks" in plan) == isinstance(plan["groups"]["tp"], list) == listed


def test_pp_may_lie_inside_dp(mpctl: Mpctl) -> None:
    """Megatron's --use-tp-pp-dp-mapping."""
    plan = document(mpctl(*GOLDEN, "--order", "tp-cp-pp-dp", "--json"))
    assert plan["order"] == "tp-cp-pp-dp"
    assert plan["groups"]["pp"] == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    assert plan["groups"]["dp"][:2] == [[0, 8], [1, 9]]
    assert plan["groups"]["embedding"] == [[0, 6], [1, 7], [8, 14], [9, 15]]


@pytest.mark.parametrize("order", ["-".join(order) for order in permutations(AXIS_NAMES)])
def test_any_order_fills_the_same_world(mpctl: Mpctl, order: str) -> None:
    flags = ("--cp", 2, "--dp", 1, "--order", order, "--allow-tp-across-nodes")
    plan = document(mpctl(*GOLDEN, *flags, "--json"))
    for kind, groups in plan["groups"].items():
        assert groups == sorted(groups)
        if "embedding" not in kind:
            assert sorted(rank for group in groups for rank in group) == list(range(16))
    first = next(axis for axis in order.split("-") if plan["sizes"][axis] > 1)
    assert plan["groups"][first][0] == list(range(plan["sizes"][first]))
