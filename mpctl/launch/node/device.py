"""What ranks run on: torch on CPU cores or NVIDIA GPUs; other accelerators are only planned."""

from __future__ import annotations

from typing import Literal, cast, get_args

from mpctl.errors import InputError
from mpctl.spec.job import JobSpec

Device = Literal["cpu", "cuda"]
NEVER_TRIED = {
    "rocm": "torch's ROCm builds answer to cuda, so --device cuda may start there, but this was "
    "never tried, and hosts' GPUs are counted by nvidia-smi",
}
"""What is known of kinds on which a launch may work."""


def named_device(job: JobSpec) -> Device | None:
    """The device that a job names, in launch.device or by its cluster's device; None where it
    leaves that open. Raises InputError for an accelerator of a kind that mpctl only plans."""
    kind = job.device_kind
    if kind in (None, *get_args(Device)):
        return cast("Device | None", kind)
    name = job.cluster.device.name if job.cluster.device else kind
    hint = "`mpctl plan` and `search` accept it; --device cpu runs the same ranks on CPU cores"
    more = f"; {NEVER_TRIED[kind]}" if kind in NEVER_TRIED else ""
    message = f"ranks run on {' and '.join(get_args(Device))}, and {name} is of kind {kind}"
    raise InputError.of("device-not-run", "cluster.device.kind", message, hint + more)
