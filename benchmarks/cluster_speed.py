"""How fast a plan of 1,000 nodes gets onto a cluster: `python -m benchmarks.cluster_speed`.

GPT-3 175B on 8,000 GPUs (tp 8, pp 8, dp 125). The nodes come from a list of Slurm's in 100 racks or
from a hostfile of 1,000 lines. Figures are medians of seven, in one process, after imports.
"""

from __future__ import annotations

import os
import platform
import tempfile
from pathlib import Path

from benchmarks.plan_speed import in_process, show
from mpctl.clusters.slurm.allocation import Allocation, agents_step, expand_node_list
from mpctl.clusters.slurm.partitions import read_partitions
from mpctl.clusters.slurm.script import render_script
from mpctl.clusters.slurm.submission import Submission
from mpctl.clusters.ssh.hostfile import hosts_of_plan, read_hostfile
from mpctl.planning.plan import Plan, make_plan
from mpctl.spec.load import load_job

RACKS = ",".join(f"rack{rack:03}n[01-10]" for rack in range(100))
SINFO = "".join(
    f"batch*|up|1-00:00:00|1-infinite|10|idle|96|2000000|gpu:8|rack{rack:03}n[01-10]\n"
    for rack in range(100)
)
SETTINGS = {
    "cluster.nodes": 1000,
    "parallel.pp": 8,
    "parallel.dp": 125,
    "training.global_batch_size": 2000,
}


def plan() -> Plan:
    made = make_plan(load_job("gpt3-175b-1024", SETTINGS))
    made.require_legal()
    return made


def slurm() -> str:
    """Node list, sinfo, plan, batch script and the srun command of the agents."""
    nodes = expand_node_list(RACKS)
    agents_step(Allocation("1", tuple(nodes)), nodes, ["agent"])
    submission, run = Submission(plan(), read_partitions(SINFO)), Path("/runs/gpt3")
    assert list(submission.issues(run)) == []
    return render_script(submission.batch_job(run))


def ssh(hostfile: Path) -> object:
    """Hostfile, plan, and the hosts that are chosen for it."""
    job = plan().job
    return hosts_of_plan(read_hostfile(hostfile).hosts, job.cluster.nodes, 8, str(hostfile))


def main() -> None:
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, load {load:.2f}")
    show("a Slurm list of 1,000 nodes", in_process(lambda: expand_node_list(RACKS)), 1e-3, "ms")
    show("plan of 1,000 nodes", in_process(plan), 1e-3, "ms")
    show("list, sinfo, plan, batch script", in_process(slurm), 1e-3, "ms")
    with tempfile.TemporaryDirectory() as folder:
        hostfile = Path(folder) / "hosts"
        hostfile.write_text("".join(f"node{n:04} slots=8\n" for n in range(1000)), "utf-8")
        show("hostfile and plan", in_process(lambda: ssh(hostfile)), 1e-3, "ms")


if __name__ == "__main__":
    main()
