"""What the rules of tensor modes accept is what the grid can cut, tensor by tensor."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.model.families import get_table
from mpctl.model.layout.topology import find_topology, job_grid
from mpctl.plan.planning.plan import make_plan
from mpctl.plan.rules.validate import check_job
from mpctl.spec.job import JobSpec
from tests.jobs import job_of, shape_of

# Rules of the modes that a model's sizes can break.
OF_SIZES = {
    "tp-divides-heads",
    "tp-divides-kv-heads",
    "tp-divides-hidden",
    "tp-divides-head-columns",
    "tp-divides-ffn",
    "tensor-mode-samples",
}
GRIDS = [
    ("2d", 4, None),
    ("2d", 9, None),
    ("2.5d", 4, None),
    ("2.5d", 8, 2),
    ("2.5d", 12, 3),
    ("2.5d", 18, None),
    ("3d", 8, None),
    ("3d", 27, None),
]
NUMBERS = st.sampled_from([1, 2, 3, 4, 6, 8, 9, 12, 18, 36])


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    mode, tp, depth = draw(st.sampled_from(GRIDS))
    kv = draw(NUMBERS)
    return {
        "parallel.tensor_mode": mode,
        "parallel.tp": tp,
        "parallel.tensor_depth": depth,
        "model.heads": kv * draw(st.integers(1, 3)),
        "model.kv_heads": kv,
        "model.head_dim": draw(st.integers(1, 9)),
        "model.hidden": 2 * draw(NUMBERS),
        "model.ffn": 6 * draw(NUMBERS),
        "model.activation": draw(st.sampled_from(["gelu", "swiglu"])),
        "model.tied_embeddings": draw(st.booleans()),
        "training.micro_batch_size": draw(NUMBERS),
    }


def can_be_cut(job: JobSpec) -> bool:
    """Whether every tensor of every rank is a block, and no head is divided."""
    model, grid = shape_of(job), job_grid(job)
    micro, hidden = job.training.micro_batch_size, model.hidden
    cuts = [
        (hidden, grid.hidden_axes),
        (model.heads, grid.feature_axes),
        (model.kv_heads, grid.feature_axes),  # q, k and v are fused, and gate and up
        (model.ffn, grid.feature_axes),
        (micro, grid.sample_axes()),
        (micro, grid.sample_axes(inside=True)),
    ]
    for weight in get_table(model, tp=job.parallel.tp).weights():
        cuts += zip(weight.shape, grid.weight_axes(weight.dims), strict=True)
    try:
        for rank in range(grid.size):
            for size, axes in cuts:
                grid.block(size, axes, grid.coords(rank))
    except ValueError:
        return False
    return True


@given(jobs())
def test_a_job_is_accepted_where_every_tensor_can_be_cut(settings: dict[str, Any]) -> None:
    job = job_of(settings)
    refused = {c.rule for c in check_job(job) if c.status == "error"} & OF_SIZES
    assert bool(refused) != can_be_cut(job), refused


@pytest.mark.parametrize("tp", [1, 2, 6, 1_000_000_007])
@pytest.mark.parametrize("mode", ["2d", "2.5d", "3d"])
def test_ranks_that_are_no_grid_are_told_so_and_nothing_else_fails(mode: str, tp: int) -> None:
    settings = {"parallel.tensor_mode": mode, "parallel.tp": tp, "training.micro_batch_size": 4}
    job = job_of(settings)
    plan = make_plan(job)
    assert find_topology(job) is None
    assert "tensor-mode" in {check.rule for check in plan.errors}
    assert {check.rule for check in plan.errors} <= {"tensor-mode", "world-size"}
    assert (plan.topology, plan.estimate) == (None, None)


@pytest.mark.parametrize(("mode", "tp", "depth"), GRIDS)
def test_1d_needs_more_heads_than_a_grid(mode: str, tp: int, depth: int | None) -> None:
    """tp 4 in 2d cuts heads in two, in 1d in four."""
    grid = {"parallel.tensor_mode": mode, "parallel.tensor_depth": depth}
    heads = job_grid(job_of({**grid, "parallel.tp": tp})).feature_parts
    settings = {"model.heads": heads, "model.hidden": 36 * heads, "parallel.tp": tp, "training.micro_batch_size": tp}
    errors = [
        {check.where for check in check_job(job_of(made)) if check.status == "error"}
        for made in ({**settings, **grid}, settings)
    ]
    assert errors == [set(), {"parallel.tp"}]
