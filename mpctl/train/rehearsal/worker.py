"""A rank's step without its machine: `python -m mpctl.train.rehearsal.worker PID JOB.json RANK...`, PID
being the process that starts it; `--audit` before PID audits the step as well (audit.py).

The worker's own code builds the stage and trains one step of it, a steady one (with the optimizer's
moments), on fake tensors in a world of peers that send nothing (fake_backend.py); its messages are
recorded as in a run, its memory is counted by a MemoryTracker. Prints one JSON line a rank, a
RehearsedRank of records/rundir/rank_files.py.

Of m micro batches only m' are run. They are alike: each sends the same, which is checked, so a
step sends once-a-step + m x one micro batch. And the memory of a stage repeats once as many are in
flight as its schedule ever holds, so m' is the fewest that reach that number
(model/pipeline/schedule/orders.py), and two more; where chunks take turns, in full rounds of the stages.
Batches alone add up: their token ids, some KiB each, are counted of m' micro batches. Parameters
are not initialized, and the norm is taken in few blocks instead of thousands.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from mpctl.core.topology import Topology
from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.layout.topology import job_topology
from mpctl.model.pipeline.schedule.orders import peak_in_flight
from mpctl.records.rundir.rank_files import RehearsedRank, Traffic
from mpctl.spec.job import JobSpec
from mpctl.spec.load import parse
from mpctl.spec.schedules import SCHEDULES
from mpctl.train.rehearsal.audit import AuditedSpans, StepAuditor, job_speed
from mpctl.train.rehearsal.fake_backend import (
    DEVICES,
    PlannedRows,
    fake_tensors,
    fake_world,
    kernels_of,
    open_fake_batches,
)
from mpctl.train.rehearsal.host_sync import HostSyncCheck
from mpctl.train.runtime.activity import Activity, nobody_follows
from mpctl.train.runtime.build import build_trainer
from mpctl.train.runtime.environment import RuntimeEnvironment
from mpctl.train.runtime.memory import KINDS, MemoryTracker, storage_bytes
from mpctl.train.runtime.process import die_with_parent
from mpctl.train.runtime.profile import StepProfile
from mpctl.train.runtime.step_record import TrafficCounter
from mpctl.train.runtime.train import Trainer
from mpctl.train.runtime.zero.gradients import DEVICE_NORM_BLOCK
from mpctl.train.transport.timing import Collective

EXTRA_ROUNDS = 2  # beyond those in flight
NO_RUN = Path(os.devnull) / "no-run"  # cannot exist: nothing is found or written there
Message = tuple[str, str, int]  # axis, kind, bytes


def main(parent: int, path: Path, ranks: list[int], *, audits: bool = False) -> None:
    """Rehearse ranks of the job in a file, and print what each would send and hold; audits: and
    what each would launch and move."""
    die_with_parent(parent)
    job = parse(json.loads(path.read_text("utf-8")))
    topology = job_topology(job)
    for rank in ranks:
        print(json.dumps(rehearse_rank(job, topology, rank, audits=audits)), flush=True)


def rehearse_rank(job: JobSpec, topology: Topology, rank: int, *, audits: bool = False) -> RehearsedRank:
    """Count the messages and memory of one rank of the job and, with `audits`, its launches and
    bytes moved; `failure` is the error that would end its step."""
    began = time.perf_counter()
    short = shortened(job, topology.coords(rank)["pp"])
    rehearsal = Rehearsal(short, topology, rank, audits=audits)
    account: RehearsedRank = {
        "rank": rank,
        "coords": topology.whole_coords(rank),
        "failure": None,
        "micro_batches": job.num_microbatches,
        "micro_batches_run": short.num_microbatches,
        "seconds": 0.0,
    }
    try:
        rehearsal.run(job, account)
    except Exception as error:
        account["failure"] = {
            "error": f"{type(error).__name__}: {error}".strip().splitlines()[0][:500],
            "doing": rehearsal.doing.text,
            "traceback": traceback.format_exception(error)[-20:],
        }
    account["seconds"] = time.perf_counter() - began
    return account


def shortened(job: JobSpec, stage: int) -> JobSpec:
    """The job with as few micro batches as show all that `stage` does; without weights to read,
    ranks to share memory with, compilation and threads."""
    training, dp = job.training, job.sizes["dp"]
    samples = num_microbatches_run(job, stage) * training.micro_batch_size * dp
    training = training.model_copy(update={"global_batch_size": samples, "init_from": None})
    alone = {"shared_memory": False, "threads_per_rank": 1, "track_memory": False, "compile": False}
    launch = job.launch.model_copy(update=alone)
    return job.model_copy(update={"training": training, "launch": launch})


def num_microbatches_run(job: JobSpec, stage: int) -> int:
    """The fewest micro batches after which `stage` has as many in flight as in a full step, and
    EXTRA_ROUNDS more; all of them where there are not so many."""
    parallel, total = job.parallel, job.num_microbatches
    schedule = parallel.schedule if parallel.pp > 1 else "1f1b"
    sizes = {"stage": stage, "stages": parallel.pp, "chunks": parallel.vpp}
    round_ = parallel.pp if parallel.vpp > 1 else 1

    def in_flight(count: int) -> int:
        return peak_in_flight(schedule, microbatches=count, **sizes)

    most = in_flight(total)
    least = max(round_, SCHEDULES[schedule].microbatches_a_stage * parallel.pp)
    enough = next(n for n in range(least, total + 1, round_) if in_flight(n) == most)
    return min(total, enough + EXTRA_ROUNDS * round_)


def reduced_once(job: JobSpec) -> frozenset[str]:
    """The groups of replicas over which gradients are reduced once a step."""
    views = JobLayout.of(job).views.values()
    groups = {view.zero_group for view in views if view.zero < 2}
    return frozenset(groups | {view.copies_group for view in views if view.copies > 1})


@dataclass
class MicroBatchTraffic(TrafficCounter):
    """Collectives by the micro batch that sent them, None for those of the step: sent outside of
    micro batches, or gradients that a step's last micro batch starts to reduce (below ZeRO 2).
    once: the groups of such gradients."""

    activity: Activity = field(default_factory=Activity)
    once: frozenset[str] = frozenset()
    by_microbatch: dict[int | None, Counter[Message]] = field(default_factory=dict)

    def record(self, collective: Collective) -> None:
        """Count one collective, and the micro batch under way with it."""
        super().record(collective)
        current = self.activity.current
        is_once = current is None or collective.axis in self.once
        microbatch = None if current is None or is_once else current.action.microbatch
        counts = self.by_microbatch.setdefault(microbatch, Counter())
        counts[collective.axis, collective.kind, collective.bytes] += 1

    def clear(self) -> None:
        super().clear()
        self.by_microbatch.clear()

    def extrapolate(self, total: int, run: int) -> Traffic:
        """The messages of a step of `total` micro batches, of which the first `run` were run, in
        the form of `snapshot`."""
        by_microbatch = self.by_microbatch
        first, once = by_microbatch.get(0, Counter()), by_microbatch.get(None, Counter())
        for j in range(run):
            assert by_microbatch.get(j, Counter()) == first, f"micro batch {j} sends other than 0"
        step = TrafficCounter()
        for counts, times in ((once, 1), (first, total)):
            for (axis, kind, size), count in counts.items():
                step.counts[axis, kind] += count * times
                step.bytes[axis, kind] += count * size * times
        return step.snapshot()


@dataclass
class Rehearsal:
    """One rank of a shortened job. audits: count kernels too; doing: what the rank is doing;
    building_bytes: peak memory while the model was built."""

    job: JobSpec
    topology: Topology
    rank: int
    audits: bool = False
    building_bytes: int = 0

    def __post_init__(self) -> None:
        stage = self.topology.coords(self.rank)["pp"]
        self.doing = Activity.of(self.job, stage, nobody_follows)
        self.doing.phase = "building"

    def run(self, full: JobSpec, account: RehearsedRank) -> None:
        """Build the rank and train a step; add to the account what a step of the full job, with
        all of its micro batches, sends and holds."""
        kind = self.job.launch.device
        assert kind != "auto", "the launcher has filled it in"
        device, activity = DEVICES[kind], self.doing
        traffic = MicroBatchTraffic(activity=activity, once=reduced_once(full))
        auditor = StepAuditor(device, job_speed(full), activity) if self.audits else None
        with fake_world(self.rank, self.topology.world_size), fake_tensors():
            tracker = MemoryTracker(device, activity=activity)
            with tracker, HostSyncCheck(device) as check:
                trainer = self._build(check, traffic, tracker, auditor)
                audited = nullcontext() if auditor is None else auditor.watching(trainer)
                with check.watching(trainer.model), audited:
                    trainer.one_step()
            account["host_syncs"] = check.places()
            run = self.job.num_microbatches
            account["parameters"] = sum(p.numel() for p in trainer.model.parameters())
            account["step_traffic"] = traffic.extrapolate(full.num_microbatches, run)
            account["building_bytes"] = self.building_bytes
            _add_memory(account, trainer, tracker)
            if auditor is not None:
                account["audit"] = auditor.audit(full, run)

    def _build(
        self, check: HostSyncCheck, traffic: MicroBatchTraffic, tracker: MemoryTracker, auditor: StepAuditor | None
    ) -> Trainer:
        """The trainer as the second step finds it, and nothing but its memory counted."""
        device, layout = check.device, JobLayout.of(self.job)
        environment = RuntimeEnvironment(
            device=device,
            open_batches=open_fake_batches,
            peak_memory=lambda: tracker.peak,
            initialize=lambda parameter, name, seed: None,
            kernels=kernels_of(device, PlannedRows.of(layout, self.rank)),
            traffic=traffic,
            profile=StepProfile() if auditor is None else AuditedSpans(auditor.scopes),
            norm_block=DEVICE_NORM_BLOCK,
            runs_ahead=device.type != "cpu",
            read_figures=check.read,
            activity=self.doing,
        )
        trainer = build_trainer(NO_RUN, layout, self.rank, environment)
        self.building_bytes = tracker.peak
        trainer.optimizer.make_states()  # a steady step is measured
        trainer.fp8.load({name: [[1.0, 1.0, 1.0]] for name in trainer.fp8.names})
        for kind, tensors in trainer.state_tensors().items():
            tracker.name(kind, tensors)
        tracker.passing = trainer.passing_tensors
        tracker.restart()
        return trainer


def _add_memory(account: RehearsedRank, trainer: Trainer, tracker: MemoryTracker) -> None:
    states = trainer.state_tensors()
    account["state_bytes"] = {kind: storage_bytes(states[kind]) for kind in states}
    account["activation_bytes"] = tracker.peak_activations
    account["peak_bytes"] = tracker.peak
    account["at_peak"] = {kind: tracker.at_peak.get(kind, 0) for kind in KINDS}


if __name__ == "__main__":
    arguments = [word for word in sys.argv[1:] if word != "--audit"]
    main(int(arguments[0]), Path(arguments[1]), [int(rank) for rank in arguments[2:]], audits="--audit" in sys.argv)
