"""What a layout sends: 4 all-reduces and 8 phi a block, in exact bytes, and nothing for tp 1."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.document import communication_entry
from mpctl.estimate.communication import block_traffic, local_parameters, phi_bytes
from mpctl.estimate.messages import Message
from mpctl.families.gpt.ops import BLOCK, HIDDEN, operator_table
from mpctl.families.shapes import head, lookup
from mpctl.families.table import OperatorTable
from mpctl.plan import Plan, load_plan, make_plan
from mpctl.spec.job import JobSpec
from tests.unit.jobs import job_of, shape_of

MIB = 2**20


def table_of(job: JobSpec) -> OperatorTable:
    return operator_table(shape_of(job), tp=job.parallel.tp)


@pytest.fixture(scope="module")
def golden() -> Plan:
    return load_plan("two-nodes-16-gpus")


def messages(plan: Plan, stage: int) -> list[Message]:
    assert plan.estimate is not None
    return list(plan.estimate.messages[stage])


@given(
    tp=st.sampled_from([2, 3, 4, 6, 12]),
    micro=st.integers(1, 8),
    dtype=st.sampled_from([("fp32", 4), ("bf16", 2), ("fp16", 2)]),
    cp=st.sampled_from([1, 2, 4]),
)
def test_a_block_all_reduces_four_times(
    tp: int, micro: int, dtype: tuple[str, int], cp: int
) -> None:
    job = job_of(
        {
            "parallel.tp": tp,
            "parallel.cp": cp,
            "training.micro_batch_size": micro,
            "training.dtype": dtype[0],
        }
    )
    phi = micro * (1024 // cp) * 768 * dtype[1]
    block = block_traffic(job, shape_of(job), table_of(job).stacks[0])
    assert block.phi_bytes == phi_bytes(job, shape_of(job), table_of(job).stacks[0]) == phi
    assert set(block.parts) == {"attention", "mlp"}
    for part in block.parts.values():
        assert (part.all_reduces, part.volume_phi, part.volume_bytes) == (2, 4, 4 * phi)
    assert (block.all_reduces, block.volume_phi, block.volume_bytes) == (4, 8, 8 * phi)
    assert block.ring_bytes_per_rank * tp == 4 * 2 * (tp - 1) * phi


def test_one_rank_of_tp_sends_nothing() -> None:
    job = job_of({"parallel.dp": 4})
    block = block_traffic(job, shape_of(job), table_of(job).stacks[0])
    totals = (block.all_reduces, block.volume_phi, block.volume_bytes, block.ring_bytes_per_rank)
    assert totals == (0, 0, 0, 0)
    assert block.phi_bytes == 1024 * 768 * 4


def test_f_and_g_of_each_product() -> None:
    """arXiv 1909.08053, figure 3: columns reduce backward (f), rows forward (g)."""
    ends = (lookup(HIDDEN), head(HIDDEN, tied=True))
    axes = {p.name: (p.forward_axes, p.backward_axes) for p in (*BLOCK, *ends)}
    assert axes == {
        "attention.qkv": ((), ("tp",)),
        "attention.output": (("tp",), ()),
        "mlp.up": ((), ("tp",)),
        "mlp.down": (("tp",), ()),
        "embedding.word": (("tp",), ()),
        "head": ((), ("tp",)),
    }


def test_bytes_of_the_golden_case(golden: Plan) -> None:
    """GPT-2 medium: micro batch 4 x sequence 1024 x hidden 1024 x 2 bytes = 8 MiB."""
    assert golden.estimate is not None
    entry = communication_entry(golden.estimate)
    part = {"all_reduces": 2, "volume_phi": 4, "volume_bytes": 32 * MIB}
    assert entry["phi_bytes"] == 8 * MIB
    assert entry["layer"] == {
        "attention": part,
        "mlp": part,
        "all_reduces": 4,
        "volume_phi": 8,
        "volume_bytes": 64 * MIB,
        "ring_bytes_per_rank": 32 * MIB,  # 4 x 2 (2 - 1)/2 x 8 MiB
    }


def test_messages_of_each_stage_of_the_golden_case(golden: Plan) -> None:
    """8 micro batches, 6 layers a stage; stage 0 looks tokens up, stage 3 has head and loss."""
    blocks = ("tp", "blocks", 8 * MIB, 8 * 6 * 4)
    norm = ("tp", "gradient norm", 8, 1)
    status = ("world", "status", (2 + 16) * 8, 1)
    ends = {
        0: [("tp", "embedding.word", 8 * MIB, 8)],
        3: [("tp", "head", 8 * MIB, 8), ("tp", "loss", 4 * 1024 * 4, 3 * 8)],
    }
    for stage in range(4):
        found = messages(golden, stage)
        *rest, gradients = [(m.axis, m.what, m.bytes, m.count) for m in found]
        # Others may be added (between stages, over the embedding group); these are there.
        assert {blocks, norm, status, *ends.get(stage, [])} <= {*rest, gradients}
        assert [what for _, what, _, _ in rest].count("loss") == (stage == 3)
        dp = [m for m in found if m.axis == "dp"]
        assert [(m.what, m.count) for m in dp] == [("gradients", 1)]


def test_gradients_are_reduced_in_the_reduction_dtype(golden: Plan) -> None:
    """Stage 1: 6 layers of 12 h^2 + 13 h over tp 2; norms and row-parallel biases are whole."""
    h = 1024
    split = 12 * h * h + (3 + 4) * h  # four matrices; biases of qkv and of the MLP's first
    whole = (4 + 2) * h  # two norms; biases of both outputs
    (gradients,) = [m for m in messages(golden, 1) if m.axis == "dp"]
    assert gradients.bytes == 6 * (split // 2 + whole) * 4
    halved = load_plan("two-nodes-16-gpus", {"training.gradient_dtype": "bf16"})
    (half,) = [m for m in messages(halved, 1) if m.axis == "dp"]
    assert half.bytes * 2 == gradients.bytes


@pytest.mark.parametrize("settings", [{}, {"parallel.tp": 1}, {"parallel.dp": 1}])
def test_one_rank_alone_sends_nothing_at_all(settings: dict[str, int]) -> None:
    assert messages(make_plan(job_of(settings)), 0) == []


@given(tp=st.sampled_from([1, 2, 4]), pp=st.sampled_from([1, 2, 3, 4, 6]))
def test_ranks_hold_every_split_weight_once_and_every_whole_one_tp_times(tp: int, pp: int) -> None:
    job = job_of({"parallel.tp": tp, "parallel.pp": pp})
    table = table_of(job)
    stages = [[(k * 12 // pp, (k + 1) * 12 // pp)] for k in range(pp)]
    held = sum(tp * local_parameters(job, table, s, stage=k) for k, s in enumerate(stages))
    whole = sum(w.numel for w in table.weights() if not w.is_split)
    word = next(table.weights())
    copies = word.numel if pp > 1 else 0  # the last stage's word table
    assert held == table.numel + (tp - 1) * whole + copies


@given(tp=st.sampled_from([1, 2, 4]), pp=st.sampled_from([1, 2, 3, 4]), stage=st.integers(0, 3))
def test_parameters_of_a_rank_are_those_of_its_named_weights(tp: int, pp: int, stage: int) -> None:
    """What local_parameters multiplies out, stage_weights names one by one."""
    job = job_of({"parallel.tp": tp, "parallel.pp": pp})
    stage = min(stage, pp - 1)
    spans = [(stage * 12 // pp, (stage + 1) * 12 // pp)]
    named = table_of(job).stage_weights(spans, is_first=stage == 0, is_last=stage == pp - 1)
    expected = sum(weight.local_numel(tp) for weight in named)
    assert local_parameters(job, table_of(job), spans, stage=stage) == expected
