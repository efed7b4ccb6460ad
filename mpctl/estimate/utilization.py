"""MFU and HFU of a step that ran: which share of its device's data sheet a rank has used.

MFU counts the FLOP that the model needs (Chowdhery et al., arXiv 2204.02311, appendix B), HFU those
that are computed, with what recomputation repeats. Both are of a rank on the average, over the
dense peak of its device at the job's data type. Plans, benches and runs use the same count
(flops.py); they differ in the seconds alone.

By hand, 300 TFLOP of the model and 400 of the hardware in a step of 0.5 s, on a device of 1000
TFLOP/s: MFU 0.6, HFU 0.8.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ValidationError

from mpctl.errors import InputError
from mpctl.estimate.flops import model_and_hardware_flops
from mpctl.layout.job_layout import JobLayout
from mpctl.spec.cluster import DeviceSpec
from mpctl.spec.job import JobSpec
from mpctl.spec.launch import LAUNCHED_AS
from mpctl.spec.presets import find_preset, preset_names


@dataclass(frozen=True)
class Utilization:
    """FLOP of a rank in one step, those of the model and those that are computed. peak: FLOP/s of
    its device, None where it is not known."""

    model_flops: float
    hardware_flops: float
    peak: float | None

    def mfu(self, seconds: float) -> float | None:
        """Model FLOP utilization of a step that took so many seconds; None without a peak."""
        return self.model_flops / seconds / self.peak if self.peak else None

    def hfu(self, seconds: float) -> float | None:
        """Hardware FLOP utilization of a step that took so many seconds; None without a peak."""
        return self.hardware_flops / seconds / self.peak if self.peak else None


def run_utilization(layout: JobLayout, reported: str | None = None) -> Utilization:
    """What the steps of a launched job are held against. reported: the name of the GPU that a rank
    runs on, as its driver tells it; None on a CPU."""
    return Utilization(*model_and_hardware_flops(layout), device_peak(layout.job, reported))


def device_peak(job: JobSpec, reported: str | None = None) -> float | None:
    """FLOP/s of the device of a launched job at its data type: the cluster's, where ranks run on
    that kind of device, else that of the preset with this name. None where neither is known, and
    for ranks of several threads, as a CPU's peak is one core's."""
    device, kind = job.cluster.device, job.launch.device
    if device is None or LAUNCHED_AS.get(device.kind) != kind:
        device = find_device(reported) if reported else None
    if device is None or (device.is_cpu and job.launch.threads_per_rank != 1):
        return None
    return device.peak_flops.get(job.training.chosen_dtype)


def find_device(reported: str) -> DeviceSpec | None:
    """The device preset whose driver reports this name; None without one."""
    for name in preset_names("devices"):
        table = find_preset("devices", name)
        if table and reported in table.get("reported_as", ()):
            try:
                return DeviceSpec.model_validate(table)
            except (ValidationError, InputError):  # one of the user's own, which is not whole
                return None
    return None
