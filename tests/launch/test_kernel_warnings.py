"""An installation whose kernels hold what the plan does not count says so before the start."""

from __future__ import annotations

from mpctl.launch.preflight import kernel_warnings
from tests.jobs import job_of


def test_attention_dropout_without_triton_holds_scores() -> None:
    dropped, plain = (job_of({"training.attention_dropout": p}) for p in (0.1, 0.0))
    (warning,) = kernel_warnings(dropped, has_triton=False)
    assert "scores are held" in warning and "pip install triton" in warning
    assert not list(kernel_warnings(dropped, has_triton=True))
    assert not list(kernel_warnings(plain, has_triton=False))
