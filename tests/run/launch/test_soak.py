"""A short soak (benchmarks/soak.py): whatever is killed, stopped or damaged, the losses stay."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

KINDS = "rank-killed,launcher-killed,rank-stopped,checkpoint-cut-live,checkpoint-flipped"


@pytest.mark.slow
def test_the_losses_of_a_disturbed_run_are_those_of_an_undisturbed_one() -> None:
    command = [sys.executable, "-m", "benchmarks.soak", "--faults", "5", "--kinds", KINDS]
    result = subprocess.run([*command, "--seed", "3", "--no-root"], capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "steps with another loss: none" in result.stdout
    assert re.search(r"^\| all \| 5 \|", result.stdout, re.M)
