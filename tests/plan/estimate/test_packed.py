"""Packed and padded rows of conversations, planned."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.model.families import batch_arrays, get_table
from mpctl.model.operators.attention import AttentionOp
from mpctl.plan.planning.plan import Plan, make_plan
from mpctl.plan.planning.summary import chat_text
from mpctl.spec.chat import PackedAttention
from tests.jobs import job_of

LLAMA = {"cluster": "dgx-h100", "model": "llama-3-8b", "cluster.nodes": 1, "parallel.zero": 3}


def plan_of(**changes: Any) -> Plan:
    named = {key.replace("__", "."): value for key, value in changes.items()}
    return make_plan(job_of(LLAMA | named, model=False))


def test_pairs_of_a_segment_by_hand() -> None:
    """Rows of 8 that hold conversations of 2 and 6: 4 + 36 of 64 pairs, 5 a query; with a window of 2, the 2 s w -
    w^2 of a sequence of 5, by its length, a query."""
    core = AttentionOp("attention", is_causal=True, segment=5.0)
    assert core.counted_pairs(8, 8) == 40 and core.counted_pairs(4, 8) == 20
    assert core._replace(window=2).counted_pairs(10, 10) == 10 * (2 * 5 - 2) * 2 // 5
    assert core._replace(segment=99.0).counted_pairs(8, 8) == 64


def test_only_attention_changes_in_the_table() -> None:
    model = job_of({}).model
    assert model is not None
    plain, packed = get_table(model, tp=1), get_table(model, tp=1, packed=PackedAttention(True))
    assert (
        packed.stacks[0].blocks[0].cores[0].has_sample_mask and not plain.stacks[0].blocks[0].cores[0].has_sample_mask
    )
    assert len(packed.stacks[0].kinds) == len(plain.stacks[0].kinds)
    assert list(packed.weights()) == list(plain.weights())


def test_arrays_of_a_batch() -> None:
    job = job_of({"data.chat.packing": "none"})
    assert job.model is not None and job.data.chat is not None
    assert set(batch_arrays(job.model, None)) == {"tokens", "targets"}
    assert set(batch_arrays(job.model, job.data.chat)) == {"tokens", "targets", "weights"}
    packed = job.data.chat.model_copy(update={"packing": "wrapped"})
    assert set(batch_arrays(job.model, packed)) == {"tokens", "targets", "weights", "places"}


def test_short_conversations_cost_less_attention_where_kernels_skip() -> None:
    times = [plan_of(training__runtime="torchtitan", data__chat__mean_length=length) for length in (8192.0, 512.0)]
    full, short = (plan.estimate.step_seconds for plan in times if plan.estimate)
    text = plan_of(training__runtime="torchtitan").estimate
    assert text is not None and full is not None and short is not None and text.step_seconds is not None
    assert full == pytest.approx(text.step_seconds, rel=1e-12)
    assert 0.6 * full < short < 0.9 * full


def test_what_a_plan_says() -> None:
    def said(**changes: Any) -> str:
        estimate = plan_of(training__runtime="torchtitan", **changes).estimate
        assert estimate is not None
        return chat_text(estimate)

    assert said() == ""
    filled = said(data__chat__row_tokens=7372.8, data__chat__row_counted=2048.0, data__chat__mean_length=400.0)
    assert filled.startswith("90% are no padding, ") and "; 25% are counted by the loss, " in filled
    assert filled.endswith("attention within conversations of 400 tokens")
    assert said(data__chat__packing="none", data__chat__mean_length=2048.0).startswith("25% are no padding")
    unknown = said(data__chat__packing="wrapped")
    assert "data.chat.row_tokens sets it" in unknown and "data.chat.mean_length sets it" in unknown
