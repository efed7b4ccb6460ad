"""What ranks run on: torch on CPU cores or GPUs of NVIDIA and AMD; others are only planned."""

from __future__ import annotations

from mpctl.errors import InputError
from mpctl.rules.launched import device_not_launched
from mpctl.spec.job import JobSpec
from mpctl.spec.launch import LaunchedKind

Device = LaunchedKind


def named_device(job: JobSpec) -> Device | None:
    """The device that a job names, in launch.device or by its cluster's device; None where it
    leaves that open. Raises InputError for an accelerator of a kind that mpctl only plans."""
    if reason := device_not_launched(job):
        raise InputError.of("device-not-run", reason.where, reason.message, reason.hint)
    return job.launched_kind
