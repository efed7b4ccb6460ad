"""Which attentions keep scores and which run again: by device, dropout and variant."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.estimate.attention import fuses_variants, keeps_no_scores, repeats_core
from tests.jobs import job_of

GPU, CPU = {"launch.device": "cuda"}, {"launch.device": "cpu"}
DROPPED = {"training.attention_dropout": 0.1}
SELECTIVE = {"training.recompute": "selective"}
WINDOW, SLOPES = {"model.attention_window": 64}, {"model.position": "alibi"}
MEGATRON = {"training.runtime": "megatron-core"}
UNFUSED = {"model.attention": "unfused"}


@pytest.mark.parametrize(
    ("settings", "fuses", "scoreless"),
    [
        ({**GPU, **DROPPED}, True, True),
        ({**GPU, **DROPPED, "training.dtype": "fp64"}, False, False),
        ({**GPU, **DROPPED, "model.head_dim": 288}, False, False),
        ({**CPU, **DROPPED}, False, False),
        (CPU, False, True),
        ({**GPU, **MEGATRON}, False, True),
        ({**GPU, **MEGATRON, **DROPPED}, False, True),
        ({**GPU, **MEGATRON, **DROPPED, **UNFUSED}, False, False),
    ],
)
def test_scores_are_held_where_no_kernel_drops(settings: dict[str, Any], fuses: bool, scoreless: bool) -> None:
    layout = JobLayout.of(job_of(settings))
    assert (fuses_variants(layout), keeps_no_scores(layout)) == (fuses, scoreless)


@pytest.mark.parametrize(
    ("settings", "again"),
    [
        ({**GPU, **DROPPED}, False),
        ({**CPU, **DROPPED}, True),
        (CPU, False),
        (GPU, False),
        ({**CPU, **WINDOW}, True),
        ({**GPU, **WINDOW}, False),
        ({**CPU, **SLOPES}, True),
        ({**GPU, **SLOPES}, False),
        ({**GPU, **DROPPED, "training.dtype": "fp64"}, True),
        ({**GPU, **MEGATRON}, True),
    ],
)
def test_selective_recomputation_repeats_what_keeps_pairs(settings: dict[str, Any], again: bool) -> None:
    layout = JobLayout.of(job_of({**settings, **SELECTIVE}))
    (core,) = layout.table.stacks[0].block_of(0).cores
    assert repeats_core(layout, core) == again
    without = JobLayout.of(job_of(settings))
    assert not repeats_core(without, core)
