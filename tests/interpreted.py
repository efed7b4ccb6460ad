"""Triton's interpreter, for the kernels of mpctl/train/kernels/triton: they run on CPU tensors.

triton asks for TRITON_INTERPRET where a function is decorated: a kernel of ours where its module is
imported, one of its own library (tl.max, tl.sum) where triton is. torch's compiler imports triton
too, so that this has to come first in a process of tests (tests/conftest.py). The variable is set
back, so that no process that a test starts has it. With a CUDA device kernels are compiled and run
there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules

import torch

HAS_TRITON = find_spec("triton") is not None
IS_INTERPRETED = HAS_TRITON and not torch.cuda.is_available()


@contextmanager
def _interpreter() -> Iterator[None]:
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        del os.environ["TRITON_INTERPRET"]
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


def import_triton() -> None:
    """Import triton with its interpreter in place of its compiler, without a CUDA device."""
    if IS_INTERPRETED:
        with _interpreter():
            import_module("triton.experimental.gluon")  # triton itself does so at its first launch


def import_kernels() -> None:
    """The same of the project's kernels."""
    if IS_INTERPRETED:
        import_triton()
        with _interpreter():
            jit = import_module("mpctl.train.kernels.triton.jit")
            for module in iter_modules(jit.__path__, "mpctl.train.kernels.triton.jit."):
                import_module(module.name)
