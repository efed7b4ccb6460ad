"""The worker: `python -m mpctl.runtime.worker RUN`, started by torchrun, one process a rank.

Reads RUN/job.json and nothing else of the job. Order matters: the end with the parent first, then
the log, then the imports that take time, so that no rank outlives its launcher while it starts and
whatever fails is written down.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpctl.errors import RunFailed
from mpctl.rundir.breadcrumb import JOINED, JOINING, Breadcrumb
from mpctl.runtime.process import (
    die_with_parent,
    record_failure,
    redirect_output,
    write_json,
)

if TYPE_CHECKING:
    from mpctl.runtime.train import Trainer
    from mpctl.spec.job import JobSpec
    from mpctl.topology import Topology


@dataclass(frozen=True)
class RankEnv:
    """What torchrun's environment says of this process; read here and nowhere below."""

    rank: int
    local_rank: int
    world_size: int
    address: str = ""

    @classmethod
    def from_environment(cls) -> RankEnv:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        missing = [name for name in names if name not in os.environ]
        if missing:
            sys.exit(f"{', '.join(missing)} not set: this module is started by torchrun")
        rank, local_rank, world_size = (int(os.environ[name]) for name in names)
        address = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        return cls(rank, local_rank, world_size, address)


def main(run: Path) -> None:
    die_with_parent(run / "torchrun.pid")
    place = RankEnv.from_environment()
    redirect_output(run / "logs" / f"rank-{place.rank}.log")
    trail = Breadcrumb(run / "doing" / f"rank-{place.rank}")
    trail.keep_beating()
    from mpctl.spec.load import parse
    from mpctl.topology import Topology

    job = parse(json.loads((run / "job.json").read_text("utf-8")))
    topology = Topology.of(
        job.sizes, order=job.parallel.order, gpus_per_node=job.cluster.gpus_per_node
    )
    worker = Worker(run, job, place, topology, trail)
    print(f"rank {place.rank} of {place.world_size}, coordinates {worker.coords}")
    try:
        worker.run()
    except BaseException as error:
        record_failure(
            run / "failures" / f"rank-{place.rank}.json", error,
            rank=place.rank, coords=worker.coords, doing=worker.doing,
        )  # fmt: skip
        if isinstance(error, RunFailed):
            sys.exit(str(error))  # it is known what happened: a traceback would only hide it
        raise


@dataclass
class Worker:
    """One rank's run, from building to its account of itself."""

    run_dir: Path
    job: JobSpec
    place: RankEnv
    topology: Topology
    trail: Breadcrumb
    trainer: Trainer | None = None
    phase: str = "starting"

    @property
    def coords(self) -> dict[str, int]:
        return self.topology.coords(self.place.rank)

    @property
    def doing(self) -> str:
        return self.trainer.doing if self.trainer else self.phase

    def run(self) -> None:
        from mpctl.runtime.build import build_trainer, init_process_group, stop_file_exists

        place = self.place
        self._reach(JOINING, f"joining the other ranks at {place.address}")
        init_process_group(
            self.job, rank=place.rank, local_rank=place.local_rank, world_size=place.world_size
        )
        self._reach(JOINED, "building the model")
        self.trainer = trainer = build_trainer(
            self.run_dir, self.job, self.topology, rank=place.rank, local_rank=place.local_rank,
            stop_asked=stop_file_exists(self.run_dir),
        )  # fmt: skip
        trainer.pipeline.on_move = lambda: self.trail.write(trainer.doing)
        print(trainer.model)
        for record in trainer.run():
            print(f"step {record['step']}: loss {record['loss']:.6f}")
            if place.rank == 0:
                self._append(record)
        write_json(self.run_dir / "ranks" / f"rank-{place.rank}.json", self._account(trainer))
        self.trail.end()
        if place.world_size > 1:
            import torch.distributed as dist

            dist.destroy_process_group()

    def _reach(self, start: int, phase: str) -> None:
        self.phase = phase
        self.trail.reach(start, phase)

    def _append(self, record: dict[str, Any]) -> None:
        with (self.run_dir / "metrics.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({**record, "time": time.time()}) + "\n")

    def _account(self, trainer: Trainer) -> dict[str, Any]:
        return {
            "rank": self.place.rank,
            "coords": self.coords,
            "steps": trainer.step,
            "parameters": sum(p.numel() for p in trainer.model.parameters()),
            "peak_memory_bytes": trainer.peak_memory(),
            "step_memory": trainer.watch.found,
            "step_traffic": trainer.step_traffic,
            "validation": trainer.last_validation,
        }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
