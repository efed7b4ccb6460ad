"""Report on torch and its devices on this host, as one line of JSON: `python -m
mpctl.train.runtime.probes.torch_report`.

It is a separate process, because importing torch or starting CUDA may crash or hang. Its keys are
those of run/doctor/documents.py's TorchFacts.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypedDict

from mpctl.train.runtime.process import die_with_parent

if __name__ == "__main__":  # before the slow imports below
    die_with_parent(int(os.environ.get("MPCTL_PARENT", os.getppid())))
BEGAN = time.perf_counter()

import torch  # noqa: E402 (the import is timed)
import torch.distributed as dist  # noqa: E402
from torch._C._distributed_c10d import FileStore  # noqa: E402

IMPORT_SECONDS = time.perf_counter() - BEGAN
PATIENCE = timedelta(seconds=30)


class TorchReport(TypedDict):
    """The printed report. `..._error`: why something did not work, None when it did."""

    version: str
    import_seconds: float
    cuda_built: str | None
    hip_built: str | None
    nccl: str | None
    has_gloo: bool
    has_nccl: bool
    gpus: int
    gpu_names: list[str]
    gloo_error: str | None
    nccl_error: str | None
    cuda_error: str | None


def report() -> TorchReport:
    """Versions, backends and devices; each backend is tried by an all-reduce of this one
    process."""
    cuda_error = _cuda_error()
    gpus = 0 if cuda_error else torch.cuda.device_count()
    has_gloo, has_nccl = _has("gloo"), _has("nccl")
    return {
        "version": str(torch.__version__),
        "import_seconds": IMPORT_SECONDS,
        "cuda_built": torch.version.cuda,
        "hip_built": torch.version.hip,
        "nccl": _nccl_version() if has_nccl else None,
        "has_gloo": has_gloo,
        "has_nccl": has_nccl,
        "gpus": gpus,
        "gpu_names": [torch.cuda.get_device_name(index) for index in range(gpus)],
        "gloo_error": _backend_error("gloo", "cpu") if has_gloo else None,
        "nccl_error": _backend_error("nccl", "cuda") if has_nccl and gpus else None,
        "cuda_error": cuda_error,
    }


def _has(backend: str) -> bool:
    return dist.is_available() and dist.is_backend_available(backend)


def _nccl_version() -> str | None:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (RuntimeError, AttributeError):
        return None


def _cuda_error() -> str | None:
    """Return the error that keeps CUDA (or ROCm, under the same name in torch) from starting; None
    if there is none or torch was built without it."""
    if torch.version.cuda is None and torch.version.hip is None:
        return None
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return None


def _backend_error(backend: str, device: str) -> str | None:
    """Sum a tensor over a world of one process; why that failed, or None."""
    with TemporaryDirectory() as folder:
        try:
            store = FileStore(str(Path(folder) / "store"), 1)
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=PATIENCE)
            values = torch.ones(4, device=device)
            dist.all_reduce(values)
            return None if float(values.sum()) == 4 else "an all-reduce of one rank was wrong"
        except (RuntimeError, ValueError) as error:
            return (str(error).splitlines() or [type(error).__name__])[0]
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


if __name__ == "__main__":
    print(json.dumps(report()))
    sys.stdout.flush()
