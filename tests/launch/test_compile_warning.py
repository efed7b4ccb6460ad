"""launch.compile is warned of where torch.compile cannot help, with what would make it help."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.launch.node.machine import Machine
from mpctl.launch.preflight import launch_warnings
from mpctl.spec.load import load_job
from tests.runtime.tiny import SETTINGS


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"parallel.tp": 2, "cluster.gpus_per_node": 2}, ["parallel.tp 2", "use parallel.tp 1"]),
        ({"training.dropout": 0.1}, ["training.dropout 0.1", "dropout 0"]),
        ({"training.attention_dropout": 0.1}, ["training.attention_dropout 0.1"]),
        ({"training.recompute": "full", "training.dropout": 0.2},
         ["training.dropout 0.2 and training.recompute full", "recompute none or selective"]),
        ({"training.recompute": "selective"}, []),
    ],
)  # fmt: skip
def test_compiling_what_does_not_compile_is_said(changes: dict[str, Any], says: list[str]) -> None:
    plain = {**SETTINGS, "training.dropout": 0.0, "training.attention_dropout": 0.0}
    for on in (True, False):
        job = load_job(None, {**plain, "cluster.gpus_per_node": 1, "launch.device": "cpu",
                              **changes, "launch.compile": on})  # fmt: skip
        words = " ".join(launch_warnings(job, Machine(8, 0, 2**40)))
        assert ("launch.compile does not help" in words) == (on and bool(says))
        assert not on or all(part in words for part in says)
