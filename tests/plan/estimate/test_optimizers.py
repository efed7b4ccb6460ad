"""Bytes of optimizer states and of updates, against sizes worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.estimate.memory import layout_memory
from mpctl.plan.estimate.optimizers import OptimizerStates, update_factor
from mpctl.plan.estimate.states import checkpoint_bytes, find_states
from mpctl.plan.estimate.time import find_step_time
from mpctl.spec.runtime import get_profile
from mpctl.spec.runtime_memory import RuntimeMemory
from mpctl.spec.training import TrainingSpec
from tests.jobs import job_of

BF16, TORCH = RuntimeMemory(), RuntimeMemory(parameter_dtype="fp32")
PURE = {"master_weights": False}


def states_of(memory: RuntimeMemory = BF16, **settings: Any) -> OptimizerStates:
    return OptimizerStates.of(TrainingSpec.model_validate({"dtype": "bf16", **settings}), memory)


# What bitsandbytes 0.50.2, torchao 0.18.0, torch and transformers keep was measured tensor by tensor.
@pytest.mark.parametrize(
    ("settings", "memory", "width"),
    [
        ({}, BF16, 4 + 8),
        ({"dtype": "fp32"}, BF16, 8),
        ({"dtype": "fp64"}, BF16, 16),
        ({"dtype": "fp16"}, BF16, 12),
        (PURE, BF16, 4),
        ({**PURE, "optimizer_dtype": "fp32"}, BF16, 8),
        ({"optimizer_dtype": "bf16"}, BF16, 4 + 4),
        ({"optimizer": "lion"}, BF16, 4 + 4),
        ({"optimizer": "sgd"}, BF16, 4),
        ({"optimizer": "sgd", "momentum": 0.9}, BF16, 8),
        ({"optimizer": "sgd", **PURE}, BF16, 0),
        ({"optimizer": "sgd", "momentum": 0.9, **PURE}, BF16, 2),
        ({}, TORCH, 8),
        (PURE, TORCH, 4),
        ({"optimizer": "lion"}, TORCH, 4),
        ({"optimizer": "adamw-8bit", **PURE}, BF16, 0),
        ({"optimizer": "adamw-8bit"}, BF16, 4),
    ],
)
def test_bytes_of_master_and_moments(settings: dict[str, Any], memory: RuntimeMemory, width: int) -> None:
    assert states_of(memory, **settings).width == width


@pytest.mark.parametrize(
    ("optimizer", "shape", "expected"),
    [
        ("adamw-8bit", (64, 64), 2 * 4096 + 2 * 16 * 4),  # 2.031 each
        ("adamw-8bit", (63, 65), 8 * 4095),  # below 4,096 elements
        ("paged-adamw-8bit", (64, 64), 8320),
        ("lion-8bit", (64, 64), 4096 + 16 * 4),  # 1.016 each
        ("lion-8bit", (4095,), 4 * 4095),
        ("adamw-4bit", (64, 64), 4096 + 2 * 32 * 4),  # 1.0625 each
        ("adamw-4bit", (61, 71), 4 * 4331),  # no multiple of 128: bf16 moments
        ("adafactor", (64, 32), 4 * 96),
        ("adafactor", (8, 64, 32), 4 * 8 * 96),  # eight experts
        ("adafactor", (64,), 4 * 64),
        ("adamw", (64, 64), 4 * 4096),
    ],
)
def test_bytes_of_the_moments_of_a_tensor(optimizer: str, shape: tuple[int, ...], expected: int) -> None:
    assert states_of(TORCH, optimizer=optimizer, **PURE).of_tensor(shape) == expected


def test_a_word_table_has_moments_of_32_bits_with_bitsandbytes_alone() -> None:
    for optimizer, each in (("adamw-8bit", 8), ("adamw-4bit", 1.0625)):
        states = states_of(TORCH, optimizer=optimizer, **PURE)
        assert states.of_tensor((64, 64), is_table=True) == each * 4096


MEGATRON = get_profile("megatron-core").memory


@pytest.mark.parametrize(
    ("settings", "width"),
    [
        ({}, 12),
        ({"optimizer_dtype": "fp32"}, 10),
        ({"optimizer_dtype": "bf16"}, 6),
        ({"optimizer_dtype": "fp8"}, 4),
        ({"optimizer_dtype": "bf16", "dtype": "fp8"}, 6),
        ({"optimizer_dtype": "bf16", "dtype": "mxfp8"}, 8),
        ({"offload_optimizer": True}, 12),
        ({"offload_optimizer": True, "optimizer_dtype": "fp32"}, 12),
    ],
)
def test_megatrons_precision_aware_states(settings: dict[str, Any], width: int) -> None:
    """Transformer Engine's FusedAdam: masters of bf16 parameters are remainders of 2 bytes, but in fp8 recipes other
    than delayed scaling, and where the optimizer is offloaded."""
    assert states_of(MEGATRON, **settings).width == width


@pytest.mark.parametrize("runtime", ["mpctl", "megatron-core"])
def test_muon_keeps_one_moment_of_matrices(runtime: str) -> None:
    """4 bytes of master and 4 of momentum, 8 of moments for the rest."""
    one = layout(**{"training.optimizer": "muon", "training.runtime": runtime})
    total = sum(w.numel for w in one.stage_parameters(0))
    assert find_states(one, 0).optimizer == total * 12 - MATRICES * 4
    assert checkpoint_bytes(layout(**{"training.optimizer": "muon", "training.runtime": "mpctl"})) == (
        total * 12 - MATRICES * 4
    )


def layout(**settings: Any) -> JobLayout:
    """GPT with a [512, 64] table, two layers of 64 and no positions, on ranks of dp."""
    shape = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 256, "vocab": 512, "seq_length": 32}
    fixed = {f"model.{key}": value for key, value in {**shape, "position": "rotary", "bias": False}.items()}
    gpus = {"launch.device": "cuda", "training.dtype": "bf16", "training.runtime": "fsdp2"}
    return JobLayout.of(job_of({**fixed, **gpus, **settings}))


MATRICES = 2 * (64 * 192 + 64 * 64 + 2 * 64 * 256)
NORMS = 2 * 2 * 2 * 64 + 2 * 64  # gains and biases


def test_states_of_a_model_with_optimizers_of_8_bits() -> None:
    """fsdp2's parameters are float32, so that there are no masters."""
    one = layout(**{"training.optimizer": "adamw-8bit"})
    total = sum(w.numel for w in one.stage_parameters(0))
    matrices, vectors = MATRICES * (2 + 8 / 256), (total - MATRICES - 512 * 64) * 8
    assert find_states(one, 0).optimizer == matrices + vectors + 512 * 64 * 8
    assert find_states(layout(), 0).optimizer == total * 8


def test_pure_bf16_training_takes_8_bytes_a_parameter() -> None:
    """Parameters, gradients and two moments of 2 bytes, where float32 takes 16."""
    total = find_states(layout(), 0).count
    pure, usual = (layout(**{"training.master_weights": value, "training.runtime": "other"}) for value in (False, None))
    assert bare(pure) == (2 * total, 2 * total, 4 * total)
    assert bare(usual) == (2 * total, 2 * total, 12 * total)  # an unknown trainer: gradients of 16 bits
    assert bare(layout(**{"training.master_weights": False})) == (2 * total, 2 * total, 4 * total)
    assert bare(layout()) == (4 * total, 4 * total, 8 * total)


def bare(found: JobLayout) -> tuple[int, int, int]:
    states = find_states(found, 0)
    return states.parameters, states.gradients, states.optimizer


def test_zero_cuts_tensors_before_an_optimizer_of_8_bits_sees_them() -> None:
    """[64, 64] over 2 ranks is a [32, 64], below 4,096 elements: 32 bits."""
    zero = {"training.optimizer": "adamw-8bit", "parallel.zero": 3, "parallel.dp": 2, "cluster.gpus_per_node": 2}
    two, one = (find_states(layout(**settings), 0).optimizer for settings in (zero, {**zero, "parallel.dp": 1}))
    outputs = 2 * 64 * 64
    assert two > one / 2
    assert two - (outputs * 8) / 2 == pytest.approx((one - outputs * (2 + 8 / 256)) / 2, rel=1e-3)


def test_checkpoints_have_a_value_and_the_moments() -> None:
    ours = {"training.runtime": "mpctl"}
    total = sum(w.numel for w in layout().stage_parameters(0))
    for settings, each in (
        ({}, 12),
        ({"training.optimizer_dtype": "bf16"}, 8),
        ({"training.master_weights": False}, 6),
        ({"training.optimizer": "sgd"}, 4),
        ({"training.optimizer": "lion"}, 8),
    ):
        assert checkpoint_bytes(layout(**ours, **settings)) == each * total


def test_an_update_moves_bytes_in_proportion() -> None:
    ours = get_profile("mpctl").memory

    def factor(**settings: Any) -> float:
        return update_factor(TrainingSpec.model_validate({"dtype": "bf16", **settings}), ours)

    assert factor() == factor(master_weights=True) == 1.0
    assert factor(optimizer="sgd") == 14 / 30
    assert factor(optimizer_dtype="bf16") == (4 + 2 * 8 + 2) / 30
    assert factor(optimizer="lion") == 22 / 30
    assert factor(master_weights=False, gradient_dtype="bf16") == pytest.approx(14 / 28)
    device = {"cluster.device": "a100-80gb"}
    usual, sgd = (find_step_time(layout(**device, **one)) for one in ({}, {"training.optimizer": "sgd"}))
    assert not isinstance(usual, str) and not isinstance(sgd, str)
    assert sgd.optimizer == pytest.approx(usual.optimizer * (4 + 8) / (4 + 24))


def test_a_search_keeps_the_memory_of_optimizers_apart() -> None:
    from mpctl.plan.estimate.activation_shapes import activation_shapes
    from mpctl.plan.estimate.memory import KnownMemory, LayoutMemory

    known = KnownMemory({}, {})
    for settings in ({}, {"training.optimizer": "sgd"}, {"training.master_weights": False}):
        one = layout(**settings)
        (expected,) = layout_memory(one)
        found = LayoutMemory(one, activation_shapes(one), known).of_stage(0)
        assert (found.optimizer_bytes, found.gradient_bytes) == (expected.optimizer_bytes, expected.gradient_bytes)
