"""The state of a job, as squeue prints it."""

from __future__ import annotations

import pytest

from mpctl.clusters.slurm.job_state import read_job_state
from mpctl.errors import InputError


@pytest.mark.parametrize(
    ("line", "text", "is_active"),
    [
        ("7|PENDING|Resources|0:00|1:00:00|N/A||a|b", "PENDING (Resources)", True),
        ("7|RUNNING|None|3:21|12:00:00|2026-11-22T02:39:14|n[1-2]|demo",
         "RUNNING on n[1-2] for 3:21 of 12:00:00", True),
        ("7|COMPLETED|None|0:01|UNLIMITED|2026-11-22T02:39:14|n1|demo", "COMPLETED", False),
        ("7|FAILED|NonZeroExitCode|0:01|1:00|2026-11-22T02:39:14|n1|x", "FAILED (NonZeroExitCode)",
         False),
        ("7|COMPLETING|None|0:01|1:00|N/A|n1|x", "COMPLETING", True),
    ],
)  # fmt: skip
def test_a_line_of_squeue(line: str, text: str, is_active: bool) -> None:
    state = read_job_state(f"{line}\n")
    assert state is not None
    assert (state.job_id, state.text, state.is_active) == ("7", text, is_active)
    assert state.name == line.split("|", 7)[7]


def test_a_forgotten_job_and_other_output() -> None:
    assert read_job_state("") is None
    with pytest.raises(InputError, match="output of squeue"):
        read_job_state("slurm_load_jobs error")
