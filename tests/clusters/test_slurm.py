"""Launches through a real Slurm of two nodes on this machine."""

from __future__ import annotations

import pytest

from tests.clusters.slurm import SlurmCluster

pytestmark = pytest.mark.cluster("slurm")


def test_a_step_runs_on_both_nodes(slurm: SlurmCluster) -> None:
    """The cluster of the tests itself: two nodes with names, two CPUs and two GPUs each."""
    done = slurm.run(["srun", "-N2", "--ntasks-per-node=1", "printenv", "SLURMD_NODENAME"])
    assert (done.returncode, sorted(done.stdout.split())) == (0, ["n1", "n2"]), done.stderr
