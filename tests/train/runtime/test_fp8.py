"""Training in fp8: close to bf16, the same at every layout, resumed exactly, sent as planned."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mpctl.core.errors import InputError
from mpctl.model.layout.job_layout import JobLayout
from mpctl.records.checkpoint.manifest import read_manifest
from mpctl.run.launch.summary import planned_traffic
from mpctl.train.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.train.kernels.fp8 import Fp8Cast
from mpctl.train.runtime.build import build_chunks, build_trainer, fp8_products, fp8_scales, held_weights
from mpctl.train.runtime.device import check_capability, require_fp8
from mpctl.train.runtime.environment import RuntimeEnvironment
from mpctl.train.runtime.evaluation import restored_scales
from tests.train.runtime.tiny import column, make_trainer, tiny_job, tiny_plan, train

FP8 = {
    "training__dtype": "fp8",
    "training__steps": 3,
    "training__eval_samples": 0,
    "training__global_batch_size": 8,
    "training__micro_batch_size": 1,
    "checkpoint__interval": 0,
    "checkpoint__at_end": False,
}


def small(data: Path, tp: int = 1, dp: int = 1, **changes: Any) -> Any:
    return tiny_job(data, tp, dp, **{**FP8, **changes})


def losses(job: Any, folder: Path) -> list[float]:
    return [record["loss"] for record in make_trainer(job, folder).run()]


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_fp8_tracks_bf16(data: Path, tmp_path: Path, recipe: str) -> None:
    """Three bits of mantissa: the same descent, not the same numbers."""
    wide = losses(small(data, training__dtype="bf16"), tmp_path / "bf16")
    ours = losses(small(data, training__fp8_recipe=recipe), tmp_path / "fp8")
    assert ours == pytest.approx(wide, rel=3e-3)
    assert ours != pytest.approx(wide, rel=1e-6)


LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "micro batches of 4": {"training__micro_batch_size": 4},
    "tp": {"tp": 2},
    "sp": {"tp": 2, "parallel__sequence_parallel": True},
    "cp": {"parallel__cp": 2, "cluster__gpus_per_node": 2},
    "pp": {"parallel__pp": 2, "cluster__gpus_per_node": 2},
    "zero-bubble": {"parallel__pp": 2, "cluster__gpus_per_node": 2, "parallel__schedule": "zero-bubble"},
    "zero 3": {"dp": 2, "parallel__zero": 3},
    "recompute": {"training__recompute": "full"},
}


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """The losses of one rank, by recipe."""
    return {
        recipe: losses(small(data, training__fp8_recipe=recipe), tmp_path_factory.mktemp(recipe))
        for recipe in ("delayed", "tensorwise")
    }


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in ("sp", "pp"))) for n in LAYOUTS])
@pytest.mark.quick(1)
def test_the_loss_does_not_depend_on_the_layout(
    data: Path, tmp_path: Path, alone: dict[str, list[float]], name: str
) -> None:
    """But for the order of 16-bit sums, as under bf16; and what is sent is what was planned."""
    layout = dict(LAYOUTS[name])
    job = small(data, layout.pop("tp", 1), layout.pop("dp", 1), **layout)
    ranks = train(job, tmp_path) if job.world_size > 1 else None
    found = losses(job, tmp_path) if ranks is None else column(ranks)
    assert found == pytest.approx(alone["delayed"], rel=1e-3)
    if ranks:
        messages = tiny_plan(job).estimate.messages
        for rank in ranks:
            assert rank["traffic"] == planned_traffic(messages[rank["coords"]["pp"]])


@pytest.mark.slow
def test_current_scaling_does_not_depend_on_it_either(
    data: Path, tmp_path: Path, alone: dict[str, list[float]]
) -> None:
    ranks = train(small(data, 2, training__fp8_recipe="tensorwise"), tmp_path)
    assert column(ranks) == pytest.approx(alone["tensorwise"], rel=1e-3)


def test_replicas_and_micro_batches_learn_the_same_scales(data: Path, tmp_path: Path) -> None:
    """The largest element of a step is that of all its samples, whoever computed them."""
    tables = []
    for number, micro in enumerate((1, 8)):
        job = small(data, training__micro_batch_size=micro, training__steps=1)
        trainer = make_trainer(job, tmp_path / str(number))
        list(trainer.run())
        assert trainer.fp8.steps == 1
        tables.append(trainer.fp8.history[-1])
    torch.testing.assert_close(*tables, rtol=0.01, atol=0)
    assert bool((tables[0] > 0).all())


def test_a_linear_layer_that_casts_nothing_is_refused(data: Path, tmp_path: Path) -> None:
    """Neither a table of scales nor the weights' casts leave a layer of this rank out."""
    wide = make_trainer(small(data, training__dtype="bf16"), tmp_path)
    layout, missing = JobLayout.of(small(data)), "8 of 8 linear layers of this rank cast no"
    with pytest.raises(ValueError, match=missing):
        fp8_scales(layout, [wide.model], wide.mesh.device)
    with pytest.raises(ValueError, match=missing):
        held_weights(layout, [wide.model])


@dataclass
class CountingCasts(KernelBackend):
    """torch's kernels; the number of casts that make one layout, and both, of W's shape in e4m3."""

    shape: tuple[int, ...] = ()
    once: int = 0
    both: int = 0

    def fp8_cast(self, matrix: Tensor, *rest: Any, **how: Any) -> Fp8Cast:
        if tuple(matrix.shape) == self.shape and rest[1] == torch.float8_e4m3fn:
            self.both += how.get("into") is not None
            self.once += how.get("into") is None
        return super().fp8_cast(matrix, *rest, **how)


def trained(job: Any, folder: Path, shape: tuple[int, ...], *, holds: bool = True) -> tuple[Any, CountingCasts]:
    """A trainer after the job's steps, and its casts of matrices of this shape. holds: as built,
    else with a cast for each product."""
    kernels = CountingCasts(shape)
    environment = RuntimeEnvironment.of_machine(job, folder, local_rank=0)
    trainer = build_trainer(folder, JobLayout.of(job), 0, replace(environment, kernels=kernels))
    if not holds:
        for product in fp8_products(trainer.partition.layout, [trainer.model]).values():
            product.operands.held = None
    list(trainer.run())
    return trainer, kernels


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.quick(2)
def test_a_weight_is_cast_once_a_step(data: Path, tmp_path: Path, recipe: str, recompute: str) -> None:
    """With the bits of a cast for each product: an optimizer that did not end the casts, or a scale
    of another step, would change losses and scales. 8 micro batches, 2 layers, 3 steps; qkv's W is
    [96, 32], which no input is."""
    job = small(data, training__fp8_recipe=recipe, training__recompute=recompute)
    held, casts = trained(job, tmp_path / "held", (96, 32))
    assert (casts.both, casts.once) == (2 * 3, 0)
    plain, casts = trained(job, tmp_path / "plain", (96, 32), holds=False)
    assert casts.both == 0 and casts.once == 2 * 3 * 8 * (3 if recompute == "full" else 2)
    for name, parameter in held.model.named_parameters():
        assert torch.equal(parameter, dict(plain.model.named_parameters())[name]), name
    assert torch.equal(held.fp8.history, plain.fp8.history)


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({}, True),
        ({"training__micro_batch_size": 8}, False),  # used once
        ({"dp": 2, "parallel__zero": 2}, True),
        ({"dp": 2, "parallel__zero": 3}, False),  # gathered for each micro batch
        ({"training__dtype": "bf16"}, False),
        ({"training__runtime": "megatron-core"}, False),
    ],
)
def test_casts_are_kept_where_several_micro_batches_use_them(data: Path, changes: dict[str, Any], holds: bool) -> None:
    assert JobLayout.of(small(data, dp=changes.pop("dp", 1), **changes)).holds_fp8_weights == holds


def test_a_resumed_run_goes_on_bit_for_bit(data: Path, tmp_path: Path) -> None:
    """The history of the largest elements is part of a checkpoint."""
    saving = {"checkpoint__interval": 2, "training__fp8_amax_history_len": 2}
    whole = losses(small(data, **saving), tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / "step-2"
    histories = read_manifest(folder).fp8
    assert len(histories) == 8 and {len(steps) for steps in histories.values()} == {2}
    assert "layers.1.mlp.down" in histories
    assert losses(small(data, **saving), tmp_path / "run") == whole[2:]


def test_an_evaluation_takes_the_scales_of_the_training(data: Path, tmp_path: Path) -> None:
    job = small(data, training__steps=2, checkpoint__interval=2)
    trainer = make_trainer(job, tmp_path)
    list(trainer.run())
    (tmp_path / "job.json").write_text(job.model_dump_json())
    chunks = build_chunks(trainer.partition, trainer.mesh, TORCH_BACKEND)
    folder = tmp_path / "checkpoints" / "step-2"
    scales = restored_scales(trainer.partition.layout, chunks, trainer.mesh.device, folder)
    assert torch.equal(scales.scales, trainer.fp8.scales) and scales.steps == 2


def test_a_gpu_without_fp8_is_refused_with_a_way_out(data: Path) -> None:
    check_capability("NVIDIA L40S", (8, 9))
    check_capability("NVIDIA H100", (9, 0))
    with pytest.raises(InputError, match=r"8\.9 or more, NVIDIA A100 has 8\.0") as refused:
        check_capability("NVIDIA A100", (8, 0))
    assert refused.value.issues[0].hint == "use --dtype bf16"
    with pytest.raises(InputError, match="NVIDIA GPU"):
        check_capability("AMD MI300X", (9, 4), is_amd=True)
    require_fp8(small(data), torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
def test_compiled_pieces_train_the_same(data: Path, tmp_path: Path) -> None:
    """But for roundings to 16 bit that compiled code leaves out."""
    plain = losses(small(data), tmp_path / "plain")
    compiled = losses(small(data, launch__compile=True), tmp_path / "compiled")
    assert compiled == pytest.approx(plain, rel=1e-3)


def test_a_skipped_step_leaves_the_scales_finite(data: Path, tmp_path: Path) -> None:
    job = small(data, training__on_nonfinite="skip", training__steps=2)
    trainer = make_trainer(job, tmp_path)
    parameter = next(p for p in trainer.model.parameters() if p.dim() > 1)
    value = parameter.detach().clone()
    with torch.no_grad():
        parameter.fill_(torch.nan)
    record, _ = trainer.one_step()
    assert record.get("skipped")
    assert bool(trainer.fp8.history.isfinite().all())
    with torch.no_grad():
        parameter.copy_(value)
    record, _ = trainer.one_step()
    assert not record.get("skipped")
