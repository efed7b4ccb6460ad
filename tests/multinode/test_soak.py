"""A short soak over two hosts (benchmarks/soak.py): whoever is lost, the losses stay."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.cluster("ssh"), pytest.mark.cluster("netns")]
KINDS = "host-lost,link-away,link-short,agent-killed,launcher-killed"


@pytest.mark.timeout(600)
def test_the_losses_of_a_run_whose_hosts_are_lost_are_those_of_an_undisturbed_one() -> None:
    soak = [sys.executable, "-m", "benchmarks.soak", "--hosts", "2", "--faults", "5"]
    done = subprocess.run([*soak, "--kinds", KINDS], capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "steps with another loss: none" in done.stdout
    assert re.search(r"^\| a link is cut for 5 s \| 1 \| none \|", done.stdout, re.M)
    assert re.search(r"^\| all \| 5 \|", done.stdout, re.M)
