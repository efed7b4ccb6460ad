"""How ranks of cp meet, in the keys of Megatron, Megatron-Bridge, DeepSpeed, accelerate and others, both ways."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.core.errors import InputError
from mpctl.interop.deepspeed import read_deepspeed
from mpctl.interop.emitted import get_launcher
from mpctl.interop.from_accelerate import read_accelerate
from mpctl.interop.from_bridge import read_bridge
from mpctl.interop.from_megatron import read_megatron
from mpctl.interop.from_torchtitan import read_torchtitan
from mpctl.plan.planning.plan import make_plan
from tests.jobs import job_of

FLAGS = (
    "--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 4096 --max-position-embeddings 4096 "
    "--micro-batch-size 1 --vocab-size 50000 --context-parallel-size 4 "
)
JOB: dict[str, Any] = {
    "cluster.preset": "dgx-h100",
    "training.runtime": "megatron-core",
    "training.dtype": "bf16",
    "parallel.cp": 4,
}


def cp_of(read: Any) -> tuple[Any, ...]:
    return tuple(read.settings.get(f"parallel.{key}") for key in ("cp", "cp_comm", "cp_a2a_size"))


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("", (4, None, None)),
        ("--cp-comm-type p2p", (4, "p2p", None)),
        ("--cp-comm-type a2a a2a a2a a2a", (4, "a2a", None)),
        ("--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2", (4, "a2a+p2p", 2)),
        ("--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4 1", (4, "a2a", None)),
        ("--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 1 4", (4, "p2p", None)),
        ("--cp-comm-type a2a+p2p", (4, "a2a+p2p", None)),  # refused by cp-a2a-size, as Megatron refuses it
    ],
)
def test_megatrons_flags(more: str, expected: tuple[Any, ...]) -> None:
    assert cp_of(read_megatron(FLAGS + more)) == expected


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("--cp-comm-type a2a p2p a2a p2p", "layers differ"),
        ("--cp-comm-type ring", "use p2p, all_gather, a2a, a2a"),
        ("--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 4", "2 x 4 is not cp 4"),
        ("--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4", "a job says two sizes"),
    ],
)
def test_what_no_job_says(more: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        read_megatron(FLAGS + more)


def body(launcher: str, **settings: Any) -> str:
    found = {key.replace("__", "."): value for key, value in settings.items()}
    return get_launcher(launcher).body(make_plan(job_of({**JOB, **found})))


def test_megatron_and_bridge_there_and_back() -> None:
    both = {"parallel__cp_comm": "a2a+p2p", "parallel__cp_a2a_size": 2}
    flags, python = body("megatron", **both), body("megatron-bridge", **both)
    assert "--cp-comm-type a2a+p2p" in flags
    assert "--hierarchical-context-parallel-sizes 2 2" in flags
    assert cp_of(read_bridge(python)) == (4, "a2a+p2p", 2)
    assert "cp-comm" not in body("megatron")


def test_ulysses_of_deepspeed() -> None:
    text = body("deepspeed", parallel__cp_comm="a2a", training__runtime="deepspeed")
    assert '"sequence_parallel_size": 4' in text
    assert cp_of(read_deepspeed(text)) == (4, "a2a", None)
    refused = get_launcher("deepspeed").refusals(make_plan(job_of({**JOB, "parallel.cp_comm": "p2p"})))
    assert "emit-cp-comm" in {issue.rule for issue in refused}


def test_ulysses_is_approximated_only_where_the_plan_has_a_ring() -> None:
    for comm in (None, "a2a"):
        plan = make_plan(job_of({**JOB, "parallel.cp_comm": comm}))
        notes = " ".join(get_launcher("deepspeed").notes(plan))
        assert ("approximated: Ulysses" in notes) == (comm is None)


def test_words_of_torch() -> None:
    """torch's alltoall is a ring."""
    base = "distributed_type: FSDP\nnum_processes: 8\nnum_machines: 1\nmixed_precision: bf16\n"
    for theirs, ours in (("allgather", "all_gather"), ("alltoall", "p2p")):
        sizes = f"parallelism_config_cp_size: 4\nparallelism_config_cp_comm_strategy: {theirs}\n"
        assert cp_of(read_accelerate(base + sizes)) == (4, ours, None)
    titan = "[parallelism]\ncontext_parallel_degree = 4\ncontext_parallel_rotate_method = 'alltoall'\n"
    read = read_torchtitan(titan)
    assert any("rotate_method" in warning.message for warning in read.warnings)
