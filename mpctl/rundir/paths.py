"""The paths of a run directory; mpctl/rundir/__init__.py says what each file is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunPaths:
    """The run directory at `path`, which need not exist yet."""

    path: Path

    @property
    def job(self) -> Path:
        """The job as it was launched, with all defaults filled in."""
        return self.path / "job.json"

    @property
    def metrics(self) -> Path:
        """One record a step; only rank 0 writes it."""
        return self.path / "metrics.jsonl"

    @property
    def bench(self) -> Path:
        """What the ranks measure, where a bench started them instead of a training."""
        return self.path / "bench.json"

    @property
    def answers(self) -> Path:
        """What the ranks of a bench measured, one JSON object a line; only rank 0 writes it."""
        return self.path / "answers.jsonl"

    @property
    def summary(self) -> Path:
        """How the run ended; absent while it runs and after a launcher that was killed."""
        return self.path / "summary.json"

    @property
    def manifest(self) -> Path:
        """The object that was created in Kubernetes, where the run was submitted there."""
        return self.path / "kubernetes.yaml"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def data(self) -> Path:
        """The folder of the token files that the launch prepared, where it did."""
        return self.path / "data"

    @property
    def stop(self) -> Path:
        """A file that asks the ranks, by existing, to finish their step, save and exit."""
        return self.path / "stop"

    @property
    def stop_request(self) -> Path:
        """A file that asks the launcher to stop the run (stop_request.py)."""
        return self.path / "stop-request"

    @property
    def launcher(self) -> Path:
        """Which process launched the run (launcher.py)."""
        return self.path / "launcher.json"

    @property
    def batch_script(self) -> Path:
        """The batch script of a run that was submitted to Slurm."""
        return self.path / "slurm.sh"

    def batch_log(self, job_id: str) -> Path:
        """What a batch job of Slurm printed that was submitted for this run."""
        return self.path / "logs" / f"slurm-{job_id}.out"

    @property
    def torchrun_pid(self) -> Path:
        """The process id of torchrun, while it runs."""
        return self.path / "torchrun.pid"

    @property
    def torchrun_log(self) -> Path:
        """The output of every torchrun of this run, one after the other."""
        return self.path / "logs" / "torchrun.log"

    @property
    def nodes(self) -> Path:
        """What the hosts of a launch by node agents share (launch/control/)."""
        return self.path / "nodes"

    @property
    def lost_hosts(self) -> Path:
        """The hosts that did not answer at the end of the last launch, a line each; absent when all
        did."""
        return self.nodes / "lost"

    @property
    def hosts(self) -> Path:
        """The host of every rank, where node agents run them (hosts.py)."""
        return self.nodes / "hosts.json"

    def node_log(self, node: int) -> Path:
        """The output of every torchrun of a node: torchrun.log, torchrun-1.log, ..."""
        return self.torchrun_log if node == 0 else self.path / "logs" / f"torchrun-{node}.log"

    @property
    def status(self) -> Path:
        """What the launcher knows of all hosts and ranks, while an attempt runs."""
        return self.nodes / "status.json"

    @property
    def collective_trace(self) -> Path:
        """The beginning of the files in which torch's flight recorder leaves the last collectives
        of a rank whose collective timed out; the rank's number follows, without a dot."""
        return self.path.resolve() / "logs" / "nccl_trace_rank_"

    @property
    def launcher_log(self) -> Path:
        """What the launchers of this run told, a line each with its time."""
        return self.path / "logs" / "launcher.log"

    def log(self, rank: int) -> Path:
        """The output of one rank, of all attempts."""
        return self.path / "logs" / f"rank-{rank}.log"

    def report(self, rank: int) -> Path:
        """What a rank measured, written when it has finished."""
        return self.path / "ranks" / f"rank-{rank}.json"

    def failure(self, rank: int) -> Path:
        """Why a rank failed, written by the rank."""
        return self.path / "failures" / f"rank-{rank}.json"
