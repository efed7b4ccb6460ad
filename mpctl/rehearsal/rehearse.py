"""A rank's step without its machine: `python -m mpctl.rehearsal.rehearse JOB.json RANK...`.

The worker's own code builds the stage and trains one step of it, a steady one (moments are there),
on fake tensors in a world of peers that answer nothing (imagined.py); what it would send is
recorded as in a run, what it would hold is kept in a ledger. Prints one JSON line a rank.

Of m micro batches only m' are run. They are alike: each sends the same, which is checked, so a
step sends once-a-step + m x one micro batch. And the memory of a stage repeats once as many are in
flight as its schedule ever holds, so m' is the fewest that reach that number
(pipeline/schedule/orders.py), and two more; where chunks take turns, in whole rounds of the stages.
Batches alone add up: their token ids, some KiB each, are counted of m' micro batches. Initial
values are not drawn, and the norm is taken in few blocks instead of thousands.

By hand, 1f1b, p = 16, m = 192: stage 0 holds 16 at most, so m' = 18; stage 15 holds 1, m' = 3.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from mpctl.layout.job_layout import job_topology, zero_stage
from mpctl.pipeline.schedule.orders import peak_in_flight
from mpctl.rehearsal.fake_backend import DEVICES, FakeBatches, fake_tensors, fake_world
from mpctl.runtime import build
from mpctl.runtime.memory_tracker import KINDS, MemoryTracker
from mpctl.runtime.memory_watch import current_action, state_tensors, storage_bytes
from mpctl.runtime.optimizer import MOMENTS
from mpctl.runtime.process import die_with_parent
from mpctl.runtime.traffic import TrafficCounter
from mpctl.runtime.train import Trainer
from mpctl.runtime.zero import gradients
from mpctl.spec.job import JobSpec
from mpctl.spec.load import parse
from mpctl.topology import Topology
from mpctl.transport.group import Collective

MORE = 2  # rounds beyond those in flight
NORM_BLOCK = 1 << 28
NO_RUN = Path(os.devnull) / "no-run"  # cannot exist: nothing is found or written there
Sent = tuple[str, str, int]  # axis, kind, bytes


def main(path: Path, ranks: list[int]) -> None:
    die_with_parent(path.with_name("no-launcher.pid"))
    job = parse(json.loads(path.read_text("utf-8")))
    topology = job_topology(job)
    for rank in ranks:
        print(json.dumps(rehearse(job, topology, rank)), flush=True)


def rehearse(job: JobSpec, topology: Topology, rank: int) -> dict[str, Any]:
    """One rank's account; `failure` says what would end its step, and where."""
    began = time.perf_counter()
    short = shortened(job, topology.coords(rank)["pp"])
    rehearsal = Rehearsal(short, topology, rank)
    account: dict[str, Any] = {
        "rank": rank, "coords": topology.coords(rank), "failure": None,
        "micro_batches": job.num_microbatches, "micro_batches_run": short.num_microbatches,
    }  # fmt: skip
    try:
        account |= rehearsal.run(job.num_microbatches)
    except Exception as error:
        account["failure"] = {
            "error": f"{type(error).__name__}: {error}".strip().splitlines()[0][:500],
            "doing": rehearsal.where,
            "traceback": traceback.format_exception(error)[-20:],
        }
    return account | {"seconds": time.perf_counter() - began}


def shortened(job: JobSpec, stage: int) -> JobSpec:
    """The job with as few micro batches as show all that `stage` does; without what a rehearsal
    has not: weights to read, ranks to share memory with."""
    training, dp = job.training, job.sizes["dp"]
    samples = micro_batches_run(job, stage) * training.micro_batch_size * dp
    training = training.model_copy(update={"global_batch_size": samples, "init_from": None})
    alone = {"shared_memory": False, "threads_per_rank": 1, "track_memory": False, "compile": False}
    launch = job.launch.model_copy(update=alone)
    return job.model_copy(update={"training": training, "launch": launch})


def micro_batches_run(job: JobSpec, stage: int) -> int:
    p, m = job.parallel, job.num_microbatches
    schedule = p.schedule if p.pp > 1 else "1f1b"
    sizes = {"stage": stage, "stages": p.pp, "chunks": p.vpp}
    round_ = p.pp if p.vpp > 1 else 1

    def in_flight(count: int) -> int:
        return peak_in_flight(schedule, microbatches=count, **sizes)

    most = in_flight(m)
    enough = next(n for n in range(round_, m + 1, round_) if in_flight(n) == most)
    return min(m, enough + MORE * round_)


@dataclass
class MicroBatchTraffic(TrafficCounter):
    """Traffic that knows whose it was; None: sent once a step, as gradients are that a step's last
    micro batch starts to sum."""

    trainer: Trainer | None = None
    sent: dict[int | None, Counter[Sent]] = field(default_factory=dict)

    def record(self, collective: Collective) -> None:
        super().record(collective)
        at = self.trainer.pipeline.at if self.trainer else None
        if self.trainer and collective.axis == "dp" and zero_stage(self.trainer.job) < 2:
            at = None
        counts = self.sent.setdefault(at.action.microbatch if at else None, Counter())
        counts[collective.axis, collective.kind, collective.bytes] += 1

    def clear(self) -> None:
        super().clear()
        self.sent.clear()

    def of_step(self, micro_batches: int, run: int) -> dict[str, dict[str, int]]:
        """What a step of so many micro batches sends, in the form of `snapshot`."""
        first, once = self.sent.get(0, Counter()), self.sent.get(None, Counter())
        for j in range(run):
            assert self.sent.get(j, Counter()) == first, f"micro batch {j} sends other than 0"
        whole = TrafficCounter()
        for counts, times in ((once, 1), (first, micro_batches)):
            for (axis, kind, size), count in counts.items():
                whole.counts[axis, kind] += count * times
                whole.bytes[axis, kind] += count * size * times
        return whole.snapshot()


@dataclass
class Rehearsal:
    """One rank of a shortened job."""

    job: JobSpec
    topology: Topology
    rank: int
    trainer: Trainer | None = None
    building_bytes: int = 0

    @property
    def where(self) -> str:
        return self.trainer.doing if self.trainer else "building"

    def run(self, micro_batches: int) -> dict[str, Any]:
        kind = self.job.launch.device
        assert kind != "auto", "the launcher has filled it in"
        device, traffic = DEVICES[kind], MicroBatchTraffic()
        with fake_world(self.rank, self.topology.world_size), fake_tensors(device):
            with patch.object(gradients, "NORM_BLOCK", NORM_BLOCK), MemoryTracker(device) as ledger:
                trainer = self._build(device, traffic, ledger)
                trainer.one_step()
            trainer.step_traffic = traffic.of_step(micro_batches, self.job.num_microbatches)
            return {**_account(trainer, ledger), "building_bytes": self.building_bytes}

    def _build(
        self, device: torch.device, traffic: MicroBatchTraffic, ledger: MemoryTracker
    ) -> Trainer:
        with ExitStack() as stack:
            for name, stand_in in (
                ("TrafficCounter", lambda: traffic),
                ("DatasetBatches", _batches),
                ("draw", lambda *_: None),
                ("select_device", lambda *_: device),
                ("_memory_reader", lambda _: lambda: ledger.peak),
            ):
                stack.enter_context(patch.object(build, name, stand_in))
            self.trainer = trainer = build.build_trainer(
                NO_RUN, self.job, self.topology, rank=self.rank, local_rank=0,
                stop_asked=lambda: False,
            )  # fmt: skip
        traffic.trainer, self.building_bytes = trainer, ledger.peak
        _take_a_step_before(trainer)
        for kind, tensors in state_tensors(trainer).items():
            ledger.name(kind, tensors)
        ledger.doing = lambda: current_action(trainer)
        ledger.restart()
        return trainer


def _batches(job: JobSpec, _: Path, **place: Any) -> FakeBatches:
    return FakeBatches(job, **place)


def _take_a_step_before(trainer: Trainer) -> None:
    """The optimizer's state as one update leaves it: memory is asked of a steady step."""
    for value in trainer.optimizer.values:
        moments = {name: torch.zeros_like(value.detach()) for name in MOMENTS}
        trainer.optimizer.adam.state[value] = {"step": torch.tensor(1.0), **moments}


def _account(trainer: Trainer, ledger: MemoryTracker) -> dict[str, Any]:
    states = state_tensors(trainer)
    return {
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "step_traffic": trainer.step_traffic,
        "state_bytes": {kind: storage_bytes(states[kind]) for kind in states},
        "activation_bytes": ledger.kept,
        "peak_bytes": ledger.peak,
        "at_peak": {kind: ledger.at_peak.get(kind, 0) for kind in KINDS},
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(rank) for rank in sys.argv[2:]])
