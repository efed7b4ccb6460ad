"""Kernels run on the CUDA device, or interpreted on the CPU (tests/interpreted.py); without triton
these tests are skipped."""

from __future__ import annotations

import pytest
import torch

from tests.interpreted import HAS_TRITON, import_kernels

if not HAS_TRITON:
    collect_ignore_glob = ["test_*.py"]
import_kernels()


@pytest.fixture
def device() -> torch.device:
    """Where the kernels run: on the CUDA device, or interpreted on the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
