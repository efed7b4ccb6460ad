"""What fp8 asks of a job, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.rules.launched import why_not_launched
from mpctl.rules.validate import with_tried_hints
from mpctl.spec.load import load_job

FP8: dict[str, Any] = {"model": "gpt2", "cluster": "dgx-h100", "cluster.nodes": 1,
                       "training.dtype": "fp8", "parallel.tp": 8,
                       "model.heads": 16, "model.hidden": 1024}  # fmt: skip


def reasons(**changes: Any) -> list[tuple[str, str]]:
    job = load_job(None, {**FP8, **{key.replace("__", "."): v for key, v in changes.items()}})
    return [(check.where, check.message) for check in why_not_launched(job)]


def test_fp8_is_launched_on_a_device_that_has_it() -> None:
    assert reasons() == []
    assert reasons(training__fp8_recipe="tensorwise", parallel__sequence_parallel=True) == []


@pytest.mark.parametrize(
    ("changes", "where", "words"),
    [
        ({"cluster": "dgx-a100"}, "cluster.device", "A100"),
        ({"parallel__tp": 4, "parallel__tensor_mode": "2d"}, "parallel.tensor_mode", "2d"),
        ({"model__hidden": 1032, "model__head_dim": 64}, "model.hidden", "1032 hidden"),
        ({"model__ffn": 3008}, "parallel.tp", r"376 columns of the MLP a rank (3008 over 8)"),
        ({"model__seq_length": 1000}, "training.micro_batch_size", "1000 tokens"),
        ({"training__dtype": "bf16", "training__gradient_dtype": "fp8"},
         "training.gradient_dtype", "fp8 is planned"),
        ({"model": "t5-base", "model.decoder_seq_length": 128}, "model.family", "t5"),
    ],
)  # fmt: skip
def test_what_is_refused(changes: dict[str, Any], where: str, words: str) -> None:
    found = reasons(**changes)
    assert any(at == where and words in message for at, message in found), found


def test_a_cpu_computes_it_to_try_a_job_out() -> None:
    """With 16-bit products of the same values; no time is estimated for it."""
    job = load_job(None, {**FP8, "launch.device": "cpu"})
    assert why_not_launched(job) == []


def test_every_reason_has_a_way_out() -> None:
    job = load_job(None, {**FP8, "cluster": "dgx-a100", "model.hidden": 1032,
                          "model.head_dim": 64})  # fmt: skip
    checks = why_not_launched(job)
    assert checks and all(check.hint.endswith("or --dtype bf16") for check in checks)
    assert with_tried_hints(job, checks) == checks
