"""Sums of gradients of a runtime whose stages reduce one after the other (`overlap.chained`)."""

from __future__ import annotations

from itertools import accumulate

import pytest

from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.batch.rows import load_row
from mpctl.plan.estimate.time import step_time_model
from mpctl.spec.runtime import get_profile


def layout(zero: int) -> JobLayout:
    """A small model on 3 stages of 4 replicas."""
    model = {"layers": 6, "hidden": 1024, "heads": 16, "vocab": 32000, "seq_length": 1024}
    parallel = {"pp": 3, "dp": 4, "zero": zero}
    training = {"global_batch_size": 16, "micro_batch_size": 1, "dtype": "bf16", "runtime": "nanotron"}
    cluster = {"preset": "hf-h100", "nodes": 2, "gpus_per_node": 6}
    job = load_row({"cluster": cluster, "model": model, "parallel": parallel, "training": training}).job
    assert job is not None
    return JobLayout.of(job)


def sums(zero: int, **overlap: object) -> list[float]:
    """Exposed seconds over the replicas, by stage."""
    profile = get_profile("nanotron")
    changed = profile.model_copy(update={"overlap": profile.overlap.model_copy(update=overlap)})
    return [stage.dp_cp for stage in step_time_model(layout(zero), changed)._closing]


def test_each_stage_waits_for_those_after_it_and_nothing_is_hidden() -> None:
    alone = sums(0, chained=False, dp=0.0)
    assert sums(0, chained=True) == pytest.approx([*accumulate(reversed(alone))][::-1])
    assert sums(0, chained=False)[0] < alone[0]


def test_zero_1_is_as_before() -> None:
    assert sums(1, chained=True) == sums(1, chained=False)
