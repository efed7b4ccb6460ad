"""Probes of Python, mpctl and torch on this host; torch itself is imported by another process."""

from __future__ import annotations

import getpass
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import ValidationError

import mpctl
from mpctl.doctor.documents import Software, TorchFacts
from mpctl.launch.node.processes import child_environment

TORCH_PROBE = "mpctl.runtime.probes.torch_report"
CHANGES_RUNS = (
    "NCCL_", "GLOO_", "TORCH_", "OMP_", "MKL_", "KMP_", "CUDA_", "NVIDIA_VISIBLE", "MASTER_",
    "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LD_PRELOAD", "UCX_", "FI_", "SLURM_NNODES",
    "SLURM_JOB_NODELIST", "PET_", "LC_ALL", "LANG", "PYTORCH_",
)  # fmt: skip
"""Beginnings of the environment variables that are reported: none of them carries a password."""


def probe_software() -> Software:
    """What is installed on this host, without importing torch."""
    return Software(
        python=platform.python_version(),
        executable=sys.executable,
        mpctl=mpctl.__version__,
        mpctl_folder=str(Path(mpctl.__file__).resolve().parent),
        torch=_installed("torch"),
        triton=_installed("triton"),
        system=f"{platform.system()} {platform.release()}",
        architecture=platform.machine(),
        user=_user(),
        home=str(Path("~").expanduser()),
        encoding=sys.getfilesystemencoding(),
        environment=relevant_variables(os.environ),
    )


def relevant_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that change how torch, NCCL or Python run, sorted by name."""
    return {
        name: value for name, value in sorted(environment.items()) if name.startswith(CHANGES_RUNS)
    }


def probe_torch(seconds: float) -> TorchFacts:
    """What torch reports in a process of its own. Raises RuntimeError with the reason where it
    cannot be imported, crashes or takes longer than `seconds`."""
    command = [sys.executable, "-m", TORCH_PROBE]
    try:
        done = subprocess.run(
            command,
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"torch gave no answer within {seconds:g} s") from None
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        raise RuntimeError(f"torch could not be used: {_last_words(done)}")
    try:
        return TorchFacts.model_validate_json(lines[-1])
    except ValidationError as error:
        raise RuntimeError(f"unreadable answer of {TORCH_PROBE}: {error}") from None


def _last_words(done: subprocess.CompletedProcess[str]) -> str:
    """The last line that a failed process wrote, or the signal that ended it."""
    if done.returncode < 0:
        return f"the process was ended by signal {-done.returncode}"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {done.returncode}"


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without an entry in passwd, as containers have
        return str(os.getuid())
