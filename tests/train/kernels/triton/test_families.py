"""Families computed by the Triton kernels, and fp8 casts, bit for bit."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mpctl.model.layout.job_layout import JobLayout
from mpctl.spec.job import JobSpec
from mpctl.train.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.train.kernels.fp8 import E4M3, E5M2, LARGEST, Fp8Cast
from mpctl.train.kernels.triton.backend import TritonKernels
from mpctl.train.runtime.build import build_trainer
from mpctl.train.runtime.environment import RuntimeEnvironment
from tests.train.kernels.triton.bits import operations
from tests.train.runtime.test_axes import SHAPES
from tests.train.runtime.tiny import make_data, tiny_job

SHORT: dict[str, Any] = {
    "training__steps": 2,
    "training__global_batch_size": 2,
    "training__eval_samples": 0,
    "checkpoint__interval": 0,
    "checkpoint__at_end": False,
    "model__layers": 1,
}
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
    trainer = build_trainer(folder, JobLayout.of(job), 0, environment)
    return [float(record["loss"]) for record in trainer.run()]


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow) for case in CASES])
def test_losses_are_those_of_torch(case: str, data: Path, tmp_path: Path, device: torch.device) -> None:
    job = tiny_job(data, **{**CASES[case], **SHORT, "launch__device": device.type})
    found: list[list[float]] = []
    run = partial(losses, job, tmp_path / "ours", TritonKernels())
    names = set(operations(lambda: found.append(run())))
    assert names >= {*OURS, *(["mpctl::attention_bias_gradient"] if case == "t5" else [])}
    assert len(found[0]) == 2
    theirs = losses(job, tmp_path / "torch", TORCH_BACKEND)
    assert found[0] == pytest.approx(theirs, rel=1e-5)


def same(a: Fp8Cast, b: Fp8Cast) -> bool:
    """Whether both casts have the same layouts, shapes and bytes."""
    pairs = list(zip(a, b, strict=True))
    if any((x is None) != (y is None) for x, y in pairs):
        return False
    return all(
        x.shape == y.shape and x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        for x, y in pairs
        if x is not None and y is not None
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("to", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(1, 1), (70, 130), (64, 128)])
def test_bits_are_the_references(
    dtype: torch.dtype, to: torch.dtype, shape: tuple[int, int], device: torch.device
) -> None:
    """Numbers over 40 binades: subnormal, normal and saturated ones, ties among them."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.exp2(torch.randint(-24, 16, shape, generator=generator).float())
    steps = torch.randint(-64, 64, shape, generator=generator) / 32  # many are ties
    x = (steps * sizes).to(device, dtype)
    scale = torch.tensor(2.0, device=device)
    for rows, columns in ((True, True), (True, False), (False, True)):
        ours, theirs = (
            kernels.fp8_cast(x, scale, to, rows=rows, columns=columns) for kernels in (TritonKernels(), TORCH_BACKEND)
        )
        assert same(ours, theirs)


@pytest.mark.parametrize("to", [E4M3, E5M2])
def test_every_number_of_the_format_and_what_lies_halfway_to_the_next(to: torch.dtype, device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(to).float()
    numbers = codes[codes.isfinite()].sort().values
    x = torch.cat((numbers, (numbers[1:] + numbers[:-1]) / 2))[None].to(device)
    one = torch.tensor(1.0, device=device)
    ours, theirs = (k.fp8_cast(x, one, to) for k in (TritonKernels(), TORCH_BACKEND))
    assert same(ours, theirs)
    assert ours.by_rows is not None
    assert torch.equal(ours.by_rows[0, : len(numbers)].float().cpu(), numbers)


def test_the_largest_element_is_raised_and_a_nan_is_infinite(device: torch.device) -> None:
    seen, one = torch.tensor([5.0, 5.0], device=device), torch.tensor(1.0, device=device)
    x = torch.linspace(-7, 3, 200, device=device).view(2, 100)
    TritonKernels().fp8_cast(x, one, E4M3, amax=seen[0])
    assert seen.tolist() == [7.0, 5.0]
    TritonKernels().fp8_cast(x / 10, one, E4M3, amax=seen[0])
    assert seen.tolist() == [7.0, 5.0]
    x[1, 5] = math.nan
    cast = TritonKernels().fp8_cast(x, one, E4M3, amax=seen[1]).by_rows
    assert seen.tolist() == [7.0, math.inf]
    assert cast is not None and cast.float().isnan().nonzero().tolist() == [[1, 5]]


def test_what_is_not_contiguous_or_too_large(device: torch.device) -> None:
    x = torch.randn(40, 30, generator=torch.Generator().manual_seed(2)).to(device).t() * 1e6
    one = torch.tensor(1.0, device=device)
    ours, theirs = (k.fp8_cast(x, one, E5M2, columns=True) for k in (TritonKernels(), TORCH_BACKEND))
    assert same(ours, theirs)
    assert ours.by_rows is not None
    assert ours.by_rows.float().abs().max().item() == LARGEST[E5M2]


def test_memory_that_is_given_is_filled(device: torch.device) -> None:
    """Both layouts and the largest element; memory held other values before."""
    x = torch.randn(40, 30, generator=torch.Generator().manual_seed(3)).to(device)
    one, results = torch.tensor(8.0, device=device), []
    for kernels in (TritonKernels(), TORCH_BACKEND):
        into = Fp8Cast(*(torch.ones(shape, device=device).to(E4M3) for shape in ((40, 30), (30, 40))))
        amax = torch.zeros((), device=device)
        found = kernels.fp8_cast(x, one, E4M3, columns=True, amax=amax, into=into)
        assert found is into and amax == x.abs().max()
        results.append(found)
    plain = TORCH_BACKEND.fp8_cast(x, one, E4M3, columns=True)
    assert same(results[0], plain) and same(results[1], plain)
