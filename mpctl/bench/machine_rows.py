"""Rows of a measured machine beside what is planned on its own preset.

While kernels and collectives are measured, the only plan of them is that of the preset from which
the fit begins. Once the machine's own is there, estimates and shares of the peak are those of it:
what is left between them and the measurements is what the preset cannot say.

By hand, a product at 150 GFLOP/s was 81 % of the 185 of the preset that the fit began from, and is
91 % of the 165 that this machine reaches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mpctl.bench.collective_rows import CollectiveRow
from mpctl.bench.collectives import MeasuredCollectives
from mpctl.bench.kernels import KernelRow
from mpctl.bench.machine_plan import MachineWork
from mpctl.bench.machine_preset import MachinePreset
from mpctl.spec.cluster import DeviceSpec


def kernels_on(
    preset: MachinePreset, work: MachineWork, rows: Sequence[KernelRow]
) -> list[KernelRow]:
    """The rows with the estimates of this preset, and their shares of its device's peaks."""
    cases = work.kernel_cases(preset.settings())
    planned = {
        f"{kernel.name} x{ranks}": kernel.predicted_seconds
        for kernel in cases.kernels
        for ranks in cases.ranks
    }
    return [_kernel(row, planned.get(row["name"]), preset.device) for row in rows]


def _kernel(row: KernelRow, predicted: float | None, device: DeviceSpec) -> KernelRow:
    share = row["share_of_peak"]
    peaks: dict[Any, float] = {**device.peak_flops}
    if row["flops"]:
        share = row["flops_per_second"] / peaks[row["dtype"]] if row["dtype"] in peaks else None
    elif device.memory_bandwidth:
        share = row["bytes_per_second"] / device.memory_bandwidth
    return {**row, "predicted_seconds": predicted, "share_of_peak": share}


def collectives_on(
    preset: MachinePreset, work: MachineWork, measured: MeasuredCollectives
) -> list[CollectiveRow]:
    """The rows of these collectives with the estimates of this preset."""
    cases = work.collectives(None, preset.settings())
    assert cases is not None, "they were measured"
    same = replace(measured.cases, plan=cases.plan, topology=cases.topology)
    return replace(measured, cases=same).rows
