"""What a rank keeps of rotary positions: one table a law of angles, of however many layers."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.estimate.activation_shapes import activation_shapes
from mpctl.plan.estimate.memory import rotary_table_bytes
from mpctl.spec.load import load_job


def table_bytes(**changes: Any) -> int:
    """Of stage 0 of Llama-like layers: 8 heads of 128, 2048 positions, bf16."""
    model = {"layers": 4, "hidden": 1024, "heads": 8, "vocab": 512, "seq_length": 2048, "position": "rotary"}
    named = {f"model.{name}": value for name, value in model.items()}
    named |= {"training.dtype": "bf16", "training.runtime": "mpctl"}
    named |= {"training.global_batch_size": 8}
    own = {name.replace("__", "."): value for name, value in changes.items()}
    layout = JobLayout.of(load_job(None, named | own))
    return rotary_table_bytes(layout, 0, activation_shapes(layout))


@pytest.mark.parametrize(
    ("changes", "mebibytes"),
    [
        ({}, 1.0),
        ({"parallel__cp": 2}, 0.5),
        ({"parallel__tp": 2}, 1.0),
        ({"parallel__pp": 2}, 1.0),
        ({"model__rotary_fraction": 0.25}, 0.25),
        ({"training__dtype": "fp64"}, 2.0),
        ({"model__position": "learned"}, 0.0),
        ({"training__runtime": "megatron-core"}, 0.0),
        ({"model__attention_window": 64, "model__full_attention_every": 2}, 1.0),
        ({"model__attention_window": 64, "model__full_attention_every": 2, "model__window_rotary_base": 500.0}, 2.0),
    ],
)
def test_a_table_is_cosines_and_sines_of_the_turned_columns(changes: dict[str, Any], mebibytes: float) -> None:
    assert table_bytes(**changes) == mebibytes * 2**20
