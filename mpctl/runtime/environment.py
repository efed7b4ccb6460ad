"""What a rank's training needs of the machine that it runs on, as one value.

`RuntimeEnvironment.of_machine` is the real one: a device, prepared data on disk, the allocator's
own account of memory. A rehearsal (mpctl/rehearsal) hands over another, with fake tensors in place
of the device and the data, and so runs the same trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from mpctl.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.layers.parameters import initialise_parameter
from mpctl.rundir.breadcrumb import Breadcrumb
from mpctl.rundir.collective_log import CollectiveLog
from mpctl.rundir.origin import Origin
from mpctl.runtime.activity import Activity
from mpctl.runtime.batches import Batches
from mpctl.runtime.device import DeviceMemory, require_fp8, select_device
from mpctl.runtime.mesh import AxisPosition
from mpctl.runtime.profile import StepProfile
from mpctl.runtime.step_record import ReadFigures, TrafficCounter
from mpctl.runtime.zero.gradients import DEVICE_NORM_BLOCK, NORM_BLOCK
from mpctl.spec.job import JobSpec
from mpctl.transport.group import Group
from mpctl.transport.streams import MakeStream, side_stream
from mpctl.transport.timing import SecondsByAxis, StreamSecondsByAxis


class OpenBatches(Protocol):
    """Opens the data of a job for one rank."""

    def __call__(
        self, job: JobSpec, *, dp: AxisPosition, cp: Group, device: torch.device
    ) -> Batches: ...


@dataclass(frozen=True)
class RuntimeEnvironment:
    """The machine as a trainer sees it; each field can be replaced by itself.

    device: where parameters and activations lie. peak_memory: the most bytes in use so far;
    reserved_memory: those that the allocator has taken from a GPU for it, None on a CPU.
    stop_requested: whether the run is to end after the step under way; asked once a step.
    initialize: fills a parameter, given its global name and the seed. kernels: what computes
    attention, norms and what is elementwise. traffic: counts what is sent; communication: the
    seconds that it costs; profile: records what is done when.
    log: where this rank writes how far it is in the collectives of its groups, None for nowhere.
    norm_block: elements of a gradient whose squares are summed at a time. make_stream: makes a
    stream beside the current one of a device (transport/streams.py, side_stream). runs_ahead:
    whether the device works on while the host goes on, so that reading a number of it is to be
    avoided. read_figures: reads the figures of a step. origin: what to resume, None for nothing.
    activity: what the rank is doing.
    """

    device: torch.device
    open_batches: OpenBatches
    peak_memory: Callable[[], int]
    reserved_memory: Callable[[], int | None] = lambda: None
    stop_requested: Callable[[], bool] = lambda: False
    initialize: Callable[[nn.Parameter, str, int], None] = initialise_parameter
    kernels: KernelBackend = TORCH_BACKEND
    traffic: TrafficCounter = field(default_factory=TrafficCounter)
    communication: SecondsByAxis = field(default_factory=SecondsByAxis)
    profile: StepProfile = field(default_factory=StepProfile)
    log: CollectiveLog | None = None
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
        """The environment of process `local_rank` of this host. breadcrumb: where this rank is
        asked to stop and logs its collectives, None for nowhere. Data lies in `data.path`, by
        default RUN/data."""
        device = select_device(job.launch.device, local_rank)
        require_fp8(job, device)
        memory = DeviceMemory(device)
        return cls(
            device=device,
            open_batches=partial(Batches.open, data=Path(job.data.path or run_dir / "data")),
            peak_memory=memory.peak,
            reserved_memory=memory.peak_reserved,
            stop_requested=lambda: breadcrumb is not None and breadcrumb.stop_requested,
            kernels=machine_kernels(device),
            communication=StreamSecondsByAxis() if device.type == "cuda" else SecondsByAxis(),
            log=None if breadcrumb is None else breadcrumb.collectives,
            norm_block=NORM_BLOCK if device.type == "cpu" else DEVICE_NORM_BLOCK,
            runs_ahead=device.type != "cpu",
            origin=origin or Origin(),
            activity=activity or Activity(),
        )

    def begin(self, phase: str) -> None:
        """The rank goes on to a phase of training: what is sent, and the seconds that it costs, are
        counted from 0 again."""
        self.activity.phase = phase
        self.traffic.clear()
        self.communication.clear()


def machine_kernels(device: torch.device) -> KernelBackend:
    """The fastest kernels that run on a device: on CUDA those written in Triton, and where they
    cannot be had torch's alone, with a line in the log that says why."""
    if device.type != "cuda":
        return TORCH_BACKEND
    # Here, since it registers operations with torch: 20 ms of each rank's start on a CPU.
    from mpctl.kernels.triton.backend import fused_kernels

    try:
        return fused_kernels(device)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        print(f"kernels: torch's own, dropout takes 15 for one ({reason})", flush=True)
        return TORCH_BACKEND
