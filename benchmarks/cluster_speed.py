"""How fast a plan of 1,000 nodes gets onto a cluster: `python -m benchmarks.cluster_speed`.

GPT-3 175B on 8,000 GPUs (tp 8, pp 8, dp 125). The nodes come from a list of Slurm's in 100 racks or
from a hostfile of 1,000 lines. Figures are medians of seven, in one process, after imports; those
of `--submit --dry-run` are of whole processes, next to `mpctl plan` of two nodes.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
from pathlib import Path

from benchmarks.plan_speed import MPCTL, PEER, QUICK, Command, in_process, show, show_processes
from mpctl.plan.planning.plan import Plan, make_plan
from mpctl.run.clusters.kubernetes.manifest import API_VERSIONS, manifest_text
from mpctl.run.clusters.slurm.allocation import Allocation, agents_step, expand_node_list
from mpctl.run.clusters.slurm.partitions import read_partitions
from mpctl.run.clusters.slurm.script import render_script
from mpctl.run.clusters.slurm.submission import Submission
from mpctl.run.clusters.ssh.hostfile import hosts_of_plan, read_hostfile
from mpctl.spec.load import load_job

RACKS = ",".join(f"rack{rack:03}n[01-10]" for rack in range(100))
SINFO = "".join(
    f"batch*|up|1-00:00:00|1-infinite|10|idle|96|2000000|gpu:8|rack{rack:03}n[01-10]\n" for rack in range(100)
)
SETTINGS = {
    "cluster.nodes": 1000,
    "parallel.pp": 8,
    "parallel.dp": 125,
    "training.global_batch_size": 2000,
    "data.corpus": ["python-stdlib"],
}
KUBERNETES = {
    "device": "cuda",
    "kubernetes.image": "mpctl:1",
    "kubernetes.claim": "runs",
    "kubernetes.mount_path": "/runs",
}
RUN = Path("/runs/gpt3")
SMALL_PLAN = "mpctl plan two-nodes-16-gpus (with model)"
DRY_RUNS = 7


def plan(**launch: str) -> Plan:
    settings = {f"launch.{key}": value for key, value in launch.items()}
    made = make_plan(load_job("gpt3-175b-1024", {**SETTINGS, **settings}))
    made.require_legal()
    return made


def slurm() -> str:
    """Node list, sinfo, plan, batch script and the srun command of the agents."""
    nodes = expand_node_list(RACKS)
    agents_step(Allocation("1", tuple(nodes)), nodes, ["agent"])
    submission = Submission(plan(), read_partitions(SINFO), {})
    assert list(submission.issues(RUN)) == []
    return render_script(submission.batch_job(RUN))


def kubernetes(kind: str) -> str:
    """Plan and manifest."""
    return manifest_text(plan(**KUBERNETES, **{"kubernetes.kind": kind}), RUN, name="gpt3")


def dry_run(scheduler: str, **launch: str) -> Command:
    """`mpctl launch --submit --dry-run`, by itself."""
    launched = {f"launch.{key}": value for key, value in launch.items()}
    sets = [f"{key}={json.dumps(value)}" for key, value in {**SETTINGS, **launched}.items()]
    words = [part for one in sets for part in ("--set", one)]
    submit = ["--on", scheduler, "--submit", "--dry-run", "--run-dir", str(RUN)]
    return Command([*MPCTL, "launch", "gpt3-175b-1024", *submit, *words])


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
    for kind in API_VERSIONS:
        show(f"plan and manifest of a {kind}", in_process(lambda k=kind: kubernetes(k)), 1e-3, "ms")
    print(f"medians of {DRY_RUNS} runs: wall, processor, times the peer's")
    commands = {name: QUICK[name] for name in (PEER, SMALL_PLAN)}
    commands["launch --on slurm --submit --dry-run, 8,000 ranks"] = dry_run("slurm")
    for kind in API_VERSIONS:
        name = f"the same, --on kubernetes, {kind}"
        commands[name] = dry_run("kubernetes", **KUBERNETES, **{"kubernetes.kind": kind})
    show_processes(commands, DRY_RUNS)


if __name__ == "__main__":
    main()
