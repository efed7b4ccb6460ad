"""The machine that a rank trains on, as one value.

`RuntimeEnvironment.of_machine` is the real one: a device, prepared data on disk, the allocator's
memory statistics. A rehearsal (mpctl/train/rehearsal) runs the same trainer in another environment, with
fake tensors in place of the device and the data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from mpctl.records.rundir.breadcrumb import Breadcrumb
from mpctl.records.rundir.collective_log import CollectiveLog
from mpctl.records.rundir.origin import Origin
from mpctl.records.rundir.step_log import StepLog
from mpctl.spec.job import JobSpec
from mpctl.train.kernels.backend import KernelBackend
from mpctl.train.layers.parameters import initialise_parameter
from mpctl.train.runtime.activity import Activity
from mpctl.train.runtime.batches import Batches
from mpctl.train.runtime.device import DeviceMemory, require_fp8, select_device
from mpctl.train.runtime.kernel_choice import machine_kernels
from mpctl.train.runtime.mesh import AxisPosition
from mpctl.train.runtime.process_group import everyone
from mpctl.train.runtime.profile import StepProfile
from mpctl.train.runtime.step_record import ReadFigures, TrafficCounter
from mpctl.train.runtime.zero.gradients import DEVICE_NORM_BLOCK, NORM_BLOCK
from mpctl.train.transport.group import Group
from mpctl.train.transport.streams import MakeStream, side_stream
from mpctl.train.transport.timing import SecondsByAxis, StreamSecondsByAxis


class OpenBatches(Protocol):
    """Opens the data of a job for one rank."""

    def __call__(self, job: JobSpec, *, dp: AxisPosition, cp: Group, device: torch.device) -> Batches: ...


@dataclass(frozen=True)
class RuntimeEnvironment:
    """The machine as a trainer sees it; each field can be replaced separately.

    device: where parameters and activations are. peak_memory: peak bytes in use so far;
    reserved_memory: bytes that the allocator has reserved on a GPU, None on a CPU. stop_requested:
    whether the run is to end after the step under way; asked once a step. initialize: fills a
    parameter, given its global name and the seed. kernels: compute attention, norms and elementwise
    operations. traffic: counts messages; communication: sums the seconds spent in them; profile:
    records when each piece of work runs. log: where this rank records its progress in the
    collectives of its groups, steps: what its steps took; None for no log. norm_block: elements of
    a gradient whose squares are summed at a time. make_stream: makes a side stream of a device
    (train/transport/streams.py, side_stream). runs_ahead: whether the device runs asynchronously to the
    host, so that reading a
    number from it should be avoided. read_figures: reads the figures of a step. origin: what to
    resume, None for nothing. activity: what the rank is doing.
    """

    device: torch.device
    open_batches: OpenBatches
    peak_memory: Callable[[], int]
    kernels: KernelBackend
    reserved_memory: Callable[[], int | None] = lambda: None
    stop_requested: Callable[[], bool] = lambda: False
    initialize: Callable[[nn.Parameter, str, int], None] = initialise_parameter
    traffic: TrafficCounter = field(default_factory=TrafficCounter)
    communication: SecondsByAxis = field(default_factory=SecondsByAxis)
    profile: StepProfile = field(default_factory=StepProfile)
    log: CollectiveLog | None = None
    steps: StepLog | None = None
    norm_block: int = NORM_BLOCK
    make_stream: MakeStream = side_stream
    runs_ahead: bool = False
    read_figures: ReadFigures = Tensor.tolist
    origin: Origin | None = None
    activity: Activity = field(default_factory=Activity)

    @classmethod
    def of_machine(
        cls,
        job: JobSpec,
        run_dir: Path,
        *,
        local_rank: int,
        breadcrumb: Breadcrumb | None = None,
        origin: Origin | None = None,
        activity: Activity | None = None,
    ) -> RuntimeEnvironment:
        """The environment of process `local_rank` of this host. Every rank calls it, after
        `init_process_group` where there are several. breadcrumb: where this rank reads stop
        requests and logs its collectives, None for neither. Data is in `data.path`, by default
        RUN/data. Raises KernelsDiffer if the ranks would compute with different kernels."""
        device = select_device(job.launch.device, local_rank)
        require_fp8(job, device)
        memory = DeviceMemory(device)
        return cls(
            device=device,
            open_batches=partial(Batches.open, data=Path(job.data.path or run_dir / "data")),
            peak_memory=memory.peak,
            reserved_memory=memory.peak_reserved,
            stop_requested=lambda: breadcrumb is not None and breadcrumb.stop_requested,
            kernels=machine_kernels(device, everyone()),
            communication=StreamSecondsByAxis() if device.type == "cuda" else SecondsByAxis(),
            log=None if breadcrumb is None else breadcrumb.collectives,
            steps=None if breadcrumb is None else breadcrumb.steps,
            norm_block=NORM_BLOCK if device.type == "cpu" else DEVICE_NORM_BLOCK,
            runs_ahead=device.type != "cpu",
            origin=origin or Origin(),
            activity=activity or Activity(),
        )

    def begin(self, phase: str) -> None:
        """Begin a phase of training: messages, and the seconds spent in them, are counted from 0
        again."""
        self.activity.phase = phase
        self.traffic.clear()
        self.communication.clear()
