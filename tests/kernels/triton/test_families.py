"""Whole models by the fused kernels: every family has the losses and gradients of torch's path.

Dropout, attention dropout, masks, learned biases, cross-attention, windows and slopes meet the
kernels as training hands them over, in float32 in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mpctl.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.kernels.triton.backend import TritonKernels
from mpctl.layout.topology import job_topology
from mpctl.runtime.build import build_trainer
from mpctl.runtime.environment import RuntimeEnvironment
from mpctl.spec.job import JobSpec
from tests.kernels.triton.bits import operations
from tests.runtime.test_axes import SHAPES
from tests.runtime.tiny import make_data, tiny_job

SHORT: dict[str, Any] = {
    "training__steps": 2, "training__global_batch_size": 2, "training__eval_samples": 0,
    "checkpoint__interval": 0, "checkpoint__at_end": False, "model__layers": 1,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    **SHAPES,
    "alibi": {"model__position": "alibi", "training__recompute": "selective"},
    "window": {**SHAPES["llama"], "model__attention_window": 5, "training__recompute": "full"},
}
OURS = {"mpctl::attention", "mpctl::attention_backward", "mpctl::dropout"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("families"))


def losses(job: JobSpec, folder: Path, kernels: KernelBackend) -> list[float]:
    """The losses of two steps, of which the second has met the first one's gradients."""
    environment = replace(RuntimeEnvironment.of_machine(job, folder, local_rank=0), kernels=kernels)
    trainer = build_trainer(folder, job, job_topology(job), 0, environment)
    return [float(record["loss"]) for record in trainer.run()]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow) for case in CASES],
)
def test_losses_are_those_of_torch(
    case: str, data: Path, tmp_path: Path, device: torch.device
) -> None:
    job = tiny_job(data, **{**CASES[case], **SHORT, "launch__device": device.type})
    found: list[list[float]] = []
    run = partial(losses, job, tmp_path / "ours", TritonKernels())
    names = set(operations(lambda: found.append(run())))
    assert names >= {*OURS, *(["mpctl::attention_bias_gradient"] if case == "t5" else [])}
    assert len(found[0]) == 2
    theirs = losses(job, tmp_path / "torch", TORCH_BACKEND)
    assert found[0] == pytest.approx(theirs, rel=1e-5)
