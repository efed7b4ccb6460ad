"""Triton's interpreter for the kernels of mpctl/kernels/triton: they run on CPU tensors.

triton asks for TRITON_INTERPRET where a kernel is decorated, and its own library where it is
imported. Both happen here, and the variable is then set back, so that no other test of this process
and no process that it starts has it. On a machine with a CUDA device the kernels are compiled and
run there. Without triton these tests are skipped.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules

import pytest
import torch


def import_interpreted() -> None:
    """Import triton and the project's kernels with the interpreter in place of the compiler."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import_module("triton.experimental.gluon")  # triton itself does so at its first launch
        jit = import_module("mpctl.kernels.triton.jit")
        for module in iter_modules(jit.__path__, "mpctl.kernels.triton.jit."):
            import_module(module.name)
    finally:
        del os.environ["TRITON_INTERPRET"]
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


if find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
elif not torch.cuda.is_available():
    import_interpreted()


@pytest.fixture
def device() -> torch.device:
    """Where the kernels run: on the CUDA device, or interpreted on the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
