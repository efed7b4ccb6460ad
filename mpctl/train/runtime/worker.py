"""The worker: `python -m mpctl.train.runtime.worker RUN`, started by torchrun, one process a rank.

Reads the job from RUN/job.json alone, and trains; if a bench wrote RUN/bench.json it answers that
request instead (probes/). Order matters: die_with_parent first, then the log, then the slow
imports, so that no rank outlives its launcher while it starts and every failure is logged.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpctl.core.durable import LineFile
from mpctl.core.errors import RunFailed
from mpctl.records.rundir.breadcrumb import JOINED, JOINING, TORCHRUN, Breadcrumb, rank_memory
from mpctl.records.rundir.origin import Origin
from mpctl.records.rundir.profile_files import profile_path
from mpctl.records.rundir.rank_files import RankReport, StepRecord, loss_text
from mpctl.train.runtime.process import (
    die_with_parent,
    end_beside_gloo,
    failure_record,
    garbage_collection_paused,
    redirect_output,
    write_json,
    write_stacks_on_signal,
)

if TYPE_CHECKING:
    from mpctl.core.topology import Topology
    from mpctl.records.rundir.requests import BenchRequest
    from mpctl.spec.job import JobSpec
    from mpctl.train.runtime.environment import RuntimeEnvironment
    from mpctl.train.runtime.mesh import Mesh
    from mpctl.train.runtime.profile import StepProfile
    from mpctl.train.runtime.train import Trainer
    from mpctl.train.transport.timing import SecondsByAxis


@dataclass(frozen=True)
class RankEnv:
    """This process's part of torchrun's environment variables, which no other module reads.
    address: HOST:PORT at which the ranks meet; origin: what they start from."""

    rank: int
    local_rank: int
    world_size: int
    address: str = ""
    origin: Origin = field(default_factory=Origin)

    @classmethod
    def from_environment(cls) -> RankEnv:
        """Ends the process with a message if it was not started by torchrun."""
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        missing = [name for name in names if name not in os.environ]
        if missing:
            sys.exit(f"{', '.join(missing)} not set: this module is started by torchrun")
        rank, local_rank, world_size = (int(os.environ[name]) for name in names)
        address = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        return cls(rank, local_rank, world_size, address, Origin.from_environment(os.environ))


def main(run_dir: Path) -> None:
    """Train one rank of the run in `run_dir`, or do its part of a bench, and write its measurements
    or failure."""
    # The torchrun that started this process, if it gave its id: it may have ended by now and left
    # this process to another parent, whose end means nothing.
    die_with_parent(int(os.environ.get(TORCHRUN, os.getppid())))
    is_new = "torch" not in sys.modules
    rank_env = RankEnv.from_environment()
    redirect_output(run_dir / "logs" / f"rank-{rank_env.rank}.log")
    write_stacks_on_signal()
    breadcrumb = Breadcrumb(rank_memory(rank_env.rank, os.environ))
    breadcrumb.keep_beating()
    from mpctl.model.layout.topology import job_topology
    from mpctl.spec.load import parse

    breadcrumb.write("waiting for job.json as the launcher wrote it")
    job = parse(json.loads(rank_env.origin.read_job(run_dir / "job.json")))
    worker = Worker(run_dir, job, rank_env, job_topology(job), breadcrumb)
    print(f"rank {rank_env.rank} of {rank_env.world_size}, coordinates {worker.coords}")
    print("started anew" if is_new else "forked from torchrun, which had imported torch")
    request = run_dir / "bench.json"
    try:
        if request.exists():
            worker.measure(json.loads(request.read_text("utf-8")))
        else:
            worker.run()
    except BaseException as error:
        worker.record_failure(error)
        if worker.trainer is not None:
            worker.trainer.saver.drain()
        if isinstance(error, RunFailed):
            sys.exit(str(error))  # the cause is known: a traceback would only hide it
        raise
    end_beside_gloo()


Probe = Callable[[Any, "JobSpec", "Mesh"], Iterator[Mapping[str, object]]]
"""probe(request, job, mesh): the answers of one rank. Every rank of the mesh runs the same probe on
the same request and yields the same number of answers; rank 0's are written."""


def find_probe(request: BenchRequest) -> Probe:
    """The probe that answers a bench's request (measure/bench/probe.py). Raises RunFailed for an unknown
    task."""
    if request["task"] == "layers":
        from mpctl.train.runtime.probes.layers import probe_layers

        return probe_layers
    if request["task"] == "kernels":
        from mpctl.train.runtime.probes.kernels import probe_kernels

        return probe_kernels
    if request["task"] == "collectives":
        from mpctl.train.runtime.probes.collectives import probe_collectives

        return probe_collectives
    raise RunFailed(f"no probe answers {request['task']!r}: this mpctl is another version")


def log_step(record: StepRecord, metrics: LineFile | None) -> None:
    """Append a step's record to metrics.jsonl, on rank 0, then its line to this rank's log. A full
    disk ends training at the first line that does not fit (run/launch/diagnose.py names it)."""
    if metrics is not None:
        _write_record(metrics, {**record, "time": time.time()})
    print(f"step {record['step']}: {loss_text(record)}")


def _write_record(metrics: LineFile, record: Mapping[str, object]) -> None:
    """Append a step's record. While the log takes a warning, training goes on without it; the
    records follow when there is space again."""
    waited, error = len(metrics.waiting), metrics.append(json.dumps(record))
    if error and not waited:
        why = error.strerror or error
        print(f"WARNING: {metrics.path} cannot be written: {why}; records wait until it can be")


@dataclass
class Worker:
    """One rank's run, from building to its report."""

    run_dir: Path
    job: JobSpec
    rank_env: RankEnv
    topology: Topology
    breadcrumb: Breadcrumb
    trainer: Trainer | None = None

    def __post_init__(self) -> None:
        from mpctl.train.runtime.activity import Activity

        stage = self.coords["pp"]
        self.activity = Activity.of(self.job, stage, lambda: self.breadcrumb.write(self.doing))

    @property
    def coords(self) -> dict[str, int]:
        """This rank's coordinate on each axis."""
        return self.topology.whole_coords(self.rank_env.rank)

    @property
    def doing(self) -> str:
        """Current activity of this rank, as text."""
        return self.trainer.doing if self.trainer else self.activity.text

    def run(self) -> None:
        """Join the other ranks, train, write RUN/ranks/rank-N.json."""
        with garbage_collection_paused():
            trainer = self._build()
        from mpctl.train.runtime.report import CommunicationSeconds, DeviceFigures

        communication, device = CommunicationSeconds(), DeviceFigures.of(trainer)
        print(trainer.model)
        print(f"attention: {', '.join(device.attention)}", flush=True)
        metrics = LineFile(self.run_dir / "metrics.jsonl") if self.rank_env.rank == 0 else None
        for record in trainer.run():
            communication.add(record)
            device.add(record)
            log_step(record, metrics)
        report = self._report(trainer)
        communication.report(report)
        device.report(report)
        self._end(report)

    def measure(self, request: BenchRequest) -> None:
        """Join the other ranks and answer a bench's request; rank 0 appends each answer to
        RUN/answers.jsonl."""
        with garbage_collection_paused():
            probe, environment = find_probe(request), self._join("making groups")
            mesh = self._mesh(environment)
        answers = LineFile(self.run_dir / "answers.jsonl")
        for number, answer in enumerate(probe(request, self.job, mesh), start=1):
            self._reach(JOINED, f"measuring {request['task']}, after answer {number}")
            if self.rank_env.rank == 0 and (error := answers.append(json.dumps(answer))):
                raise error
        report: RankReport = {
            "rank": self.rank_env.rank,
            "coords": self.coords,
            "steps": 0,
            "parameters": 0,
            "peak_memory_bytes": environment.peak_memory(),
            "step_memory": {},
            "step_traffic": {},
            "validation": None,
            "reserved_memory_bytes": environment.reserved_memory(),
        }
        self._end(report)

    def record_failure(self, error: BaseException) -> None:
        """Leave the record of a failure for the agent of this host. If a save failed on this rank,
        that is recorded as the cause."""
        if self.trainer is not None and self.trainer.saver.failure is not None:
            error = self.trainer.saver.failure
        rank, doing = self.rank_env.rank, self.doing
        self.breadcrumb.fail(failure_record(error, rank=rank, coords=self.coords, doing=doing))

    def _build(self) -> Trainer:
        from mpctl.model.layout.job_layout import JobLayout
        from mpctl.train.runtime.build import build_trainer

        environment = self._join("building the model")
        if self.job.launch.profile:
            environment = replace(environment, profile=self._profile(environment.communication))
        layout = JobLayout.of(self.job)
        self.trainer = build_trainer(self.run_dir, layout, self.rank_env.rank, environment)
        return self.trainer

    def _join(self, then: str) -> RuntimeEnvironment:
        """Meet the other ranks; returns this machine's environment. then: what the rank does next,
        as text."""
        from mpctl.train.runtime.device import prepare_device
        from mpctl.train.runtime.environment import RuntimeEnvironment
        from mpctl.train.runtime.process_group import init_process_group

        rank, local_rank = self.rank_env.rank, self.rank_env.local_rank
        prepare_device(self.job, local_rank)
        self._reach(JOINING, f"joining the other ranks at {self.rank_env.address}")
        init_process_group(self.job, rank=rank, local_rank=local_rank, world_size=self.rank_env.world_size)
        self._reach(JOINED, "choosing kernels")
        environment = RuntimeEnvironment.of_machine(
            self.job,
            self.run_dir,
            local_rank=local_rank,
            breadcrumb=self.breadcrumb,
            origin=self.rank_env.origin,
            activity=self.activity,
        )
        self._reach(JOINED, then)
        return environment

    def _mesh(self, environment: RuntimeEnvironment) -> Mesh:
        from mpctl.model.layout.topology import dense_view, other_views
        from mpctl.train.runtime.mesh import build_mesh

        views = (dense_view(self.job), *other_views(self.job))
        return build_mesh(
            self.topology,
            self.rank_env.rank,
            environment.device,
            launch=self.job.launch,
            views={view.name: view for view in views},
            log=environment.log,
        )

    def _profile(self, timer: SecondsByAxis) -> StepProfile:
        from mpctl.train.runtime.profile import StepProfile, clock_name

        head = {
            "rank": self.rank_env.rank,
            "world_size": self.rank_env.world_size,
            "coords": self.coords,
            "host": platform.node(),
            "clock": clock_name(),
        }
        path = profile_path(self.run_dir, self.rank_env.rank)
        return StepProfile(self.job.launch.profile, path, head, timer, self.activity)

    def _reach(self, start: int, phase: str) -> None:
        self.activity.phase = phase
        self.breadcrumb.reach(start, phase)

    def _end(self, report: RankReport) -> None:
        write_json(self.run_dir / "ranks" / f"rank-{self.rank_env.rank}.json", report)
        self.breadcrumb.end()
        from mpctl.train.runtime.process_group import leave_process_group

        leave_process_group(self.rank_env.rank, self.rank_env.world_size)

    def _report(self, trainer: Trainer) -> RankReport:
        return {
            "rank": self.rank_env.rank,
            "coords": self.coords,
            "steps": trainer.step,
            "parameters": sum(p.numel() for p in trainer.model.parameters()),
            "peak_memory_bytes": trainer.environment.peak_memory(),
            "step_memory": trainer.memory_watch.measured,
            "step_traffic": trainer.step_traffic,
            "validation": trainer.last_validation,
            "saves": trainer.saver.times,
        }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
