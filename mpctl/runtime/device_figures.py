"""What a rank's records and report say of its device: FLOP utilization, memory of the allocator.

By hand, a step of 2 s in which the model needs 500 TFLOP of a rank on a device of 500 TFLOP/s: MFU
0.5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mpctl.estimate.utilization import Utilization, run_utilization
from mpctl.rundir.rank_files import RankReport, StepRecord
from mpctl.runtime.device import device_name
from mpctl.runtime.train import Trainer


@dataclass(frozen=True)
class DeviceFigures:
    """name: the GPU's as torch reports it, None on a CPU; reserved_memory: reads the most bytes
    that the allocator has taken from it."""

    name: str | None
    utilization: Utilization
    reserved_memory: Callable[[], int | None]

    @classmethod
    def of(cls, trainer: Trainer) -> DeviceFigures:
        """The figures of the device that a trainer runs on."""
        name = device_name(trainer.mesh.device)
        used = run_utilization(trainer.partition.layout, name)
        return cls(name, used, trainer.environment.reserved_memory)

    def add(self, record: StepRecord) -> None:
        """Add to a step's record what is known of it."""
        seconds, used = record["step_seconds"], self.utilization
        mfu, hfu = used.mfu(seconds), used.hfu(seconds)
        if mfu is not None and hfu is not None:
            record["mfu"], record["hfu"] = mfu, hfu
        if (reserved := self.reserved_memory()) is not None:
            record["reserved_memory_bytes"] = reserved

    def report(self, report: RankReport) -> None:
        """Add to a rank's report."""
        report["device"], report["reserved_memory_bytes"] = self.name, self.reserved_memory()
