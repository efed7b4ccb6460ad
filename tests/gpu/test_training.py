"""Trainings of one rank: every family and data type, offload, compile, checkpoints.

Losses are held against float32 on a CPU: the first step's within the rounding of the data type, and
bit for bit between two runs that must be the same on one device.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.training import losses, small_job, trainer_of
from tests.train.runtime.test_axes import SHAPES

CPU = torch.device("cpu")
FIRST = {"fp64": 2e-5, "fp32": 2e-5, "tf32": 5e-3, "bf16": 4e-2, "fp16": 5e-3}
"""How far the first loss, some 5.7, may lie from that of float32 on a CPU: rounding of parameters
and activations to 53, 24, 11, 8 and 11 bits."""

QUICK = ("gpt", "t5")


@pytest.fixture(scope="module")
def expected(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Losses of float32 on a CPU, by the name of a shape."""
    known: dict[str, list[Any]] = {}

    def of(shape: str) -> list[Any]:
        if shape not in known:
            job = small_job(CPU, data, training__dtype="fp32", **SHAPES[shape])
            known[shape] = losses(job, tmp_path_factory.mktemp("expected"))
        return known[shape]

    return of


@pytest.mark.parametrize(
    "shape", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in SHAPES]
)
@pytest.mark.quick(1)
def test_every_family_in_bf16(shape: str, device: torch.device, data: Path, tmp_path: Path, expected: Any) -> None:
    job = small_job(device, data, training__dtype="bf16", **SHAPES[shape])
    found = losses(job, tmp_path / "run")
    if device.type == "cuda" or shape == "gpt":  # a CPU's kernels are the same for all
        assert found == losses(job, tmp_path / "again")
    assert found[0] == pytest.approx(expected(shape)[0], abs=FIRST["bf16"])
    assert found[-1] == pytest.approx(expected(shape)[-1], abs=3 * FIRST["bf16"])


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "tf32", "fp16"])
def test_every_data_type(dtype: str, device: torch.device, data: Path, tmp_path: Path, expected: Any) -> None:
    """fp16 skips its first steps until the loss scale fits; those that it does not skip count."""
    job = small_job(device, data, training__dtype=dtype)
    found = [loss for loss in losses(job, tmp_path) if loss is not None]
    assert found[0] == pytest.approx(expected("gpt")[0], abs=FIRST[dtype])


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_draws_the_same_masks(recompute: str, device: torch.device, data: Path, tmp_path: Path) -> None:
    plain, again = (
        losses(small_job(device, data, training__recompute=how), tmp_path / how) for how in ("none", recompute)
    )
    assert again == pytest.approx(plain, abs=1e-6)


def test_offloaded_inputs_come_back(device: torch.device, data: Path, tmp_path: Path) -> None:
    plain, offloaded = (
        losses(
            small_job(device, data, training__recompute="full", training__offload_activations=offload),
            tmp_path / str(offload),
        )
        for offload in (False, True)
    )
    assert offloaded == plain


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_resumed_run_goes_on_bit_for_bit(dtype: str, device: torch.device, data: Path, tmp_path: Path) -> None:
    saving = {"training__dtype": dtype, "checkpoint__interval": 2}
    whole = losses(small_job(device, data, **saving), tmp_path / "whole")
    checkpoint = tmp_path / "whole/checkpoints/step-2"
    shutil.copytree(checkpoint, tmp_path / "rest/checkpoints/step-2")
    assert losses(small_job(device, data, **saving), tmp_path / "rest") == whole[2:]


def test_a_checkpoint_moves_between_devices(device: torch.device, data: Path, tmp_path: Path) -> None:
    """Written here, read on a CPU: the same values, the same position in the data."""
    first = trainer_of(small_job(device, data, checkpoint__interval=4), tmp_path / "run")
    list(first.run())
    there = trainer_of(small_job(CPU, data, training__steps=5), tmp_path / "run")
    assert there.step == first.step == 4
    for (name, here), moved in zip(first.model.named_parameters(), there.model.parameters(), strict=True):
        assert torch.equal(here.cpu(), moved), name


@pytest.mark.slow
@pytest.mark.timeout(900)  # minutes of a C++ compiler on a CPU
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs a compiler")
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_layers_compute_the_same(recompute: str, device: torch.device, data: Path, tmp_path: Path) -> None:
    plain, compiled = (
        losses(
            small_job(device, data, training__recompute=recompute, launch__compile=compiles, model__layers=1),
            tmp_path / str(compiles),
        )
        for compiles in (False, True)
    )
    assert compiled == pytest.approx(plain, abs=1e-4)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_fp8_products(recipe: str, device: torch.device, data: Path, tmp_path: Path, expected: Any) -> None:
    """Operands of 4 bits (e4m3) and gradients of 3: the first loss within their rounding."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("this device has no fp8 products")
    job = small_job(device, data, training__dtype="fp8", training__fp8_recipe=recipe)
    found = losses(job, tmp_path / "run")
    assert found == losses(job, tmp_path / "again")
    assert found[0] == pytest.approx(expected("gpt")[0], abs=3 * FIRST["bf16"])
    assert found[-1] < found[0]
