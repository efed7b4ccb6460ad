"""Cases of the rules of context parallelism."""

from typing import Any

from tests.plan.rules.cases.case import T5, TWO_NODES, Case

MEGATRON = {"training.runtime": "megatron-core", **TWO_NODES}


def cp(comm: str, size: int = 4, **others: Any) -> dict[str, Any]:
    """Settings of Megatron with cp ranks that meet so."""
    return {**MEGATRON, "parallel.cp": size, "parallel.cp_comm": comm, **others}


A2A_2 = {"parallel.cp_a2a_size": 2}
ALIBI = {"model.position": "alibi"}
CASES = (
    Case(
        "cp-comm-needs-cp",
        cp("a2a"),
        cp("a2a", 1),
        "parallel.cp_comm",
        ("a2a", "cp is 1"),
        r"no cp_comm, or cp above 1",
    ),
    Case(
        "cp-comm-runs",
        cp("all_gather", **{"training.runtime": "torchtitan", "parallel.zero": 3}),
        cp("a2a", **{"training.runtime": "torchtitan", "parallel.zero": 3}),
        "parallel.cp_comm",
        ("torchtitan", "all_gather", "not by a2a"),
        r"use cp_comm all_gather; or no cp_comm",
    ),
    Case(
        "cp-a2a-size",
        cp("a2a+p2p", **A2A_2),
        cp("a2a+p2p"),
        "parallel.cp_comm",
        ("needs cp_a2a_size", "cp 4"),
        r"use cp_a2a_size 2; or cp_comm p2p or a2a",
    ),
    Case(
        "cp-a2a-size",
        cp("a2a+p2p", **A2A_2),
        cp("a2a+p2p", **{"parallel.cp_a2a_size": 4}),
        "parallel.cp_a2a_size",
        ("4 cuts cp 4",),
        r"use cp_a2a_size 2; or cp_comm p2p or a2a",
    ),
    Case(
        "cp-a2a-size",
        cp("a2a"),
        cp("a2a", **A2A_2),
        "parallel.cp_a2a_size",
        ("2 is of cp_comm a2a+p2p", "cp_comm is a2a"),
        r"no cp_a2a_size, or cp_comm a2a\+p2p",
    ),
    Case(  # 12 heads, 4 kv heads
        "cp-divides-heads",
        cp("a2a", 2, **{"model.kv_heads": 4, "parallel.tp": 2}),
        cp("a2a", 4, **{"model.kv_heads": 4, "parallel.tp": 2}),
        "parallel.cp",
        ("tp 2 x cp 4 = 8 ranks", "12 attention heads and 4 kv heads"),
        r"use cp 2; or cp_comm a2a\+p2p with parallel.cp_a2a_size 2; or cp_comm p2p or all_gather",
    ),
    Case(  # 12 heads; it repeats kv heads
        "cp-divides-heads",
        cp("a2a", **{"training.runtime": "deepspeed", "model.kv_heads": 2}),
        cp("a2a", **{"training.runtime": "deepspeed", "model.kv_heads": 6}),
        "parallel.cp",
        ("tp 1 x cp 4 = 4 ranks, which do not divide 6 kv heads",),
        r"use cp 2",
    ),
    Case(
        "cp-divides-heads",
        cp("a2a+p2p", 8, **A2A_2, **{"model.kv_heads": 2}),
        cp("a2a+p2p", 8, **{"model.kv_heads": 2, "parallel.cp_a2a_size": 4}),
        "parallel.cp_a2a_size",
        ("tp 1 x cp_a2a_size 4 = 4 ranks", "2 kv heads"),
        r"use cp_a2a_size 2; or cp_comm p2p or all_gather",
    ),
    Case(
        "cp-comm-window",
        cp("a2a", **{"model.attention_window": 64}),
        cp("p2p", **{"model.attention_window": 64}),
        "parallel.cp_comm",
        ("p2p with attention_window 64", "all_gather or a2a"),
        r"use cp_comm all_gather or a2a; or no cp_comm, or cp 1",
    ),
    Case(
        "cp-comm-sinks",
        cp("a2a", **{"model.attention_sinks": True}),
        cp("all_gather", **{"model.attention_sinks": True}),
        "parallel.cp_comm",
        ("all_gather with attention_sinks",),
        r"use cp_comm a2a; or no cp_comm, or cp 1",
    ),
    Case(
        "cp-comm-bias",
        cp("p2p", **ALIBI),
        cp("a2a", **ALIBI),
        "parallel.cp_comm",
        ("a2a with alibi",),
        r"use cp_comm p2p; or no cp_comm, or cp 1",
    ),
    Case(
        "cp-comm-bias",
        cp("all_gather", 2, **T5, **{"training.runtime": "mpctl"}),
        cp("a2a", 2, **T5, **{"training.runtime": "mpctl"}),
        "parallel.cp_comm",
        ("a2a with relative positions",),
        r"use cp_comm all_gather; or no cp_comm, or cp 1",
    ),
)
