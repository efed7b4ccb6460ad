"""Workspaces of matrix libraries, and communicators, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.model.layout.groups import LINK_CHANNELS
from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.estimate.libraries import Communicators, workspace_bytes
from mpctl.plan.estimate.memory import layout_memory
from mpctl.spec.load import load_job

SMALL = {
    "model.family": "gpt",
    "model.layers": 8,
    "model.hidden": 256,
    "model.heads": 8,
    "model.vocab": 512,
    "model.seq_length": 64,
    "training.global_batch_size": 64,
}
EACH = 4 * 2**20 + 512 * 8 * 8 * 16 + 640 * 120 * 8 * 8  # buffers of the three protocols


def layout_of(**changes: Any) -> JobLayout:
    given = {key.replace("__", "."): value for key, value in changes.items()}
    return JobLayout.of(load_job(None, {**SMALL, **given}))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"cluster__device": "h100-sxm"}, 2 * 32 * 2**20),
        ({"cluster__device": "a100-80gb"}, 2 * (4096 * 2 + 16 * 8) * 1024),
        ({"cluster__device": "b200"}, 2 * (4096 * 2 + 16 * 8) * 1024),
        ({"cluster__device": "mi300x"}, 2 * (128 + 76) * 2**20),
        ({"cluster__device": "mi250x"}, 2 * (32 + 76) * 2**20),
        ({"launch__device": "cuda"}, 2 * 32 * 2**20),
        ({"launch__device": "cpu"}, 0),
        ({"launch__device": "cpu", "cluster__device": "h100-sxm"}, 0),
        ({"cluster__device": "h100-sxm", "training__runtime": "megatron-core"}, 0),
    ],
)
def test_forward_and_backward_have_a_workspace_each(settings: Any, expected: int) -> None:
    layout = layout_of(**settings)
    assert workspace_bytes(layout) == expected
    (memory,) = layout_memory(layout)
    assert memory.workspace_bytes == memory.allocated_bytes - memory.tensor_bytes == expected


def held(stage: int = 0, **changes: Any) -> float:
    """Connections of one channel that a rank's communicators hold."""
    layout = layout_of(**{"cluster__gpus_per_node": 8, "cluster__device": "h100-sxm", **changes})
    return Communicators(layout).of_stage(layout, stage) / EACH


def test_a_group_within_a_node() -> None:
    """World and tp of 8, in rings and trees; sequence parallelism gathers and scatters alone."""
    assert held(parallel__tp=8) == 2 * 24 * 2
    assert held(parallel__tp=8, parallel__sequence_parallel=True) == 24 * 2 + 24
    assert held(parallel__tp=1, parallel__dp=1, cluster__gpus_per_node=1) == 0


def test_a_group_over_nodes_has_channels_by_its_cards() -> None:
    """32 ranks on 4 nodes: the world has 8 ranks on each, 16 channels; gradients over 4 ranks of
    equal tp one on each, 2 channels, and under ZeRO rings alone."""
    four = {"cluster__nodes": 4, "parallel__tp": 8, "parallel__dp": 4}
    assert held(**four) == 16 * 2 + 24 * 2 + 2 * 2
    assert held(**four, parallel__zero=1) == 16 * 2 + 24 * 2 + 2


def test_links_count_where_a_stage_receives() -> None:
    """Stages 0 and 3 receive from one neighbour, others from two; the table of words that stages 0
    and 3 share has a group of two. The group of all stages sends nothing."""
    four = {"parallel__pp": 4, "cluster__gpus_per_node": 4}
    world, tied = 24 * 2, 24
    assert held(0, **four) == world + LINK_CHANNELS + tied
    assert held(1, **four) == world + 2 * LINK_CHANNELS
    assert held(0, **four, parallel__vpp=2) == world + 2 * LINK_CHANNELS + tied
    memory = layout_memory(layout_of(**four, cluster__device="h100-sxm"))[1]
    beside = memory.device_bytes - memory.reserved_bytes - memory.context_bytes
    assert beside == memory.communicator_bytes == (world + 2 * LINK_CHANNELS) * EACH
