"""Memory and events that logs print besides their steps."""

from __future__ import annotations

import pytest

from mpctl.interop.log_events import LogEvents
from mpctl.interop.logs import read_log
from tests.interop import example_logs as logs

MEMORY = {
    "[Rank 4] (after 2 iterations) memory (MB) | allocated: 9.1 | max allocated: 2048.0 | reserved: 3000.0 | max "
    "reserved: 3072.0": {"allocated": 2 * 2**30, "reserved": 3 * 2**30},
    "[INFO] [timer.py:264:stop] CurrSamplesPerSec=10.0, MemAllocated=2.0GB, MaxMemAllocated=9.5GB": {
        "allocated": 9.5 * 2**30
    },
    "step: 10  loss: 8.0  memory: 41.25GiB(51.86%)  tps: 5,756": {"reserved": 41.25 * 2**30},
    "Training epoch 0, iteration 4/9 | global_step: 4 | peak_memory_usage: 68719476736 | x": {"allocated": 64 * 2**30},
    "memory (MB) is unknown": {},
}


@pytest.mark.parametrize("line", MEMORY)
def test_memory_is_in_bytes(line: str) -> None:
    events = LogEvents()
    events.read(line, 1)
    events.read(line.replace("2048.0", "1024.0"), 2)  # the most counts
    assert events.memory == MEMORY[line]


def test_a_log_keeps_every_step_and_what_came_before_it() -> None:
    lines = logs.megatron([9.0, *[2.0] * 9]).splitlines()
    lines.insert(5, "  successfully saved checkpoint from iteration 4 to /data")
    lines.insert(7, "validation loss at iteration 5 | lm loss value: 2.0")
    lines.insert(9, "WARNING - 3 CUDA memory allocation retries.")
    lines.append("WARNING - 2 CUDA memory allocation retries.")
    run = read_log("\n".join(lines))
    assert [row.step.number for row in run.every] == [*range(1, 11)]
    assert {row.step.number: row.after for row in run.every if row.after} == {5: "checkpoint", 6: "evaluation"}
    found = run.events.found["retries"]
    assert (found.total, found.lines, found.first, found.last) == (5, 2, 6, 10)
    assert len(run.steps) == 6
