"""No step makes the host wait for its device but where it reports: every family and layout, on fake
CUDA tensors.

First what the check itself sees, by hand.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mpctl.model.layout.topology import job_topology
from mpctl.spec.load import load_job
from mpctl.train.families.gpt.module import GPT
from mpctl.train.rehearsal.fake_backend import fake_tensors
from mpctl.train.rehearsal.host_sync import HostSyncCheck
from mpctl.train.rehearsal.worker import rehearse_rank
from mpctl.train.runtime.memory import MemoryTracker
from tests.train.runtime.test_axes import SHAPES
from tests.train.runtime.test_pipeline import MODELS, layout
from tests.train.runtime.tiny import settings

META = torch.device("meta")
WAITS = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "tolist": lambda x: x.tolist(),
    "condition": lambda x: 1 if x.sum() > 0 else 0,
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "index on the host": lambda x: x[torch.arange(2)],
    "numbers": lambda x: torch.tensor([1.0, 2.0], device=META),
    "numbers like": lambda x: x.new_tensor([1.0]),
    "pageable": lambda x: x.copy_(torch.zeros(4), non_blocking=True),
    "blocking": lambda x: x.copy_(torch.zeros(4, pin_memory=True)),
    "numpy": lambda x: torch.from_numpy(np.zeros(4)).to(META),
    "to the host": lambda x: x.cpu(),
}
GOES_ON = {
    "kernels": lambda x: x.mul(2.0).add_(1.0).sum(),
    "a number as an argument": lambda x: torch.full((2,), 3.0, device=META),
    "index there": lambda x: x[torch.arange(2, device=META)],
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "pinned": lambda x: x.copy_(torch.zeros(4, pin_memory=True), non_blocking=True),
    "pinned later": lambda x: torch.zeros(4).pin_memory().to(META, non_blocking=True),
    "a view of pinned": lambda x: torch.zeros(8, pin_memory=True)[4:].to(META, non_blocking=True),
    "to the host, not waited for": lambda x: x.to("cpu", non_blocking=True),
    "on the host": lambda x: float(torch.zeros(4).sum()) + int(torch.ones(3).nonzero().sum()),
}


def watched(work: object, *args: object) -> HostSyncCheck:
    check = HostSyncCheck(META)
    with fake_tensors(), MemoryTracker(torch.device("cpu")), check:
        x = torch.zeros(4, device=META)
        with check.watching():
            try:
                work(x, *args)  # type: ignore[operator]
            except Exception as error:  # fake tensors have no sizes that depend on values
                if "Dynamic" not in type(error).__name__:
                    raise
    return check


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_is_found_with_its_line(name: str) -> None:
    found = [str(sync) for sync in watched(WAITS[name]).found]
    assert len(found) == 1 and found[0].startswith("rehearsal/test_host_sync.py:")


@pytest.mark.parametrize("name", GOES_ON)
def test_what_does_not_wait_is_not_found(name: str) -> None:
    assert not watched(GOES_ON[name]).found


class Waiting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.amax().item()


def test_the_module_is_named_and_what_is_outside_is_not_watched() -> None:
    model, check = nn.Sequential(nn.Identity(), Waiting()), HostSyncCheck(META)
    with fake_tensors(), MemoryTracker(META), check:
        x = torch.zeros(4, device=META)
        x.sum().item()
        with check.watching(model):
            model(x)
            model(x)
            assert check.read(x) == [1.0] * 4
    (sync,) = check.found
    assert sync.module == "1" and "reads a number" in sync.what
    assert check.places() == [f"{sync.source}: {sync.what} (in 1)"]


def test_a_report_is_read_once() -> None:
    check = HostSyncCheck(META)
    with fake_tensors(), MemoryTracker(META), check:
        for reads in (1, 2):
            with check.watching():
                check.read(torch.zeros(3, device=META))
            assert check.places() == ["the figures are read 2 times"] * (reads > 1)


# ---------------------------------------------------------------- training steps


CUDA = {"launch__device": "cuda", "training__dtype": "bf16"}
FULL, SELECTIVE = ({"training__recompute": kind} for kind in ("full", "selective"))
PARTS = {"training__partition_activations": True, "training__offload_activations": True}
SEQUENCE = {"parallel__sequence_parallel": True}
ROTARY = {"model__position": "rotary"}
TWO = layout(1, dp=2)
FAMILIES = {
    f"{family}-{name}": {**SHAPES[family], **how}
    for family in SHAPES
    for name, how in {
        "alone": {},
        "tp2-cp2-sp-full": {**layout(1, tp=2, cp=2), **SEQUENCE, **FULL},
        "cp2-dp2-selective": {**layout(1, cp=2, dp=2), **SELECTIVE},
        "no-dropout": {"training__dropout": 0.0, "training__attention_dropout": 0.0},
    }.items()
}
VARIANTS: dict[str, dict[str, Any]] = {
    "alibi": {"model__position": "alibi", "model__embedding_norm": True},
    "windows": {
        **ROTARY,
        "model__attention_window": 3,
        "model__full_attention_every": 2,
        "model__window_rotary_base": 100.0,
        "model__kv_heads": 2,
    },
    "parallel residual": {
        **ROTARY,
        "model__parallel_residual": True,
        "model__rotary_fraction": 0.5,
        "model__qk_norm": True,
    },
    "partition, offload": {**layout(1, tp=2), **FULL, **PARTS},
    "gelu, tp4": {**layout(1, tp=4), **SEQUENCE},
}
PIPELINES = {
    "1f1b": layout(2),
    "interleaved": layout(2, 2, "interleaved"),
    "gpipe": layout(2, schedule="gpipe"),
    "zero-bubble": layout(2, schedule="zero-bubble"),
    "tp": layout(2, tp=2),
    "cp": layout(2, cp=2),
}
STEPS: dict[str, dict[str, Any]] = {
    **{f"zero {stage}": {**TWO, "parallel__zero": stage} for stage in range(4)},
    "zero 3, full": {**TWO, "parallel__zero": 3, **FULL},
    "not overlapped": {**TWO, "parallel__overlap_gradients": False},
    "fp16": {"training__dtype": "fp16"},
    "fp32": {"training__dtype": "fp32"},
    "fp8": {"training__dtype": "fp8", "model__hidden": 64, "model__vocab": 384},
    "fp8, current scales": {
        "training__dtype": "fp8",
        "training__fp8_recipe": "tensorwise",
        "model__hidden": 64,
        "model__vocab": 384,
    },
    "fp64": {"training__dtype": "fp64"},
    "gradients in bf16": {"training__gradient_dtype": "bf16"},
    "no clipping": {"training__clip_norm": 0.0},
    "frozen": {"training__freeze": ["embedding.*", "layers.0.*"]},
    "skipping": {"training__on_nonfinite": "skip"},
    "fp16, skipping": {"training__dtype": "fp16", "training__on_nonfinite": "skip"},
    "rolling back": {"training__on_nonfinite": "rollback", "training__on_spike": "rollback"},
    "spikes skipped": {"training__on_spike": "skip"},
    "spikes stop": {"training__on_spike": "stop"},
}
GRIDS = {
    f"{family}-{mode}": {
        **SHAPES[family],
        **layout(1, tp=tp),
        "parallel__tensor_mode": mode,
        "training__micro_batch_size": 4,
        **changes,
    }
    for family in ("gpt", "llama")
    for mode, tp, changes in (("2d", 4, {}), ("2.5d", 8, FULL), ("3d", 8, SELECTIVE))
}
FOUR_LAYERS = {
    f"{model}-{name}": {**MODELS[model], **how} for model in ("gpt", "t5", "bert") for name, how in PIPELINES.items()
}


def waits(changes: dict[str, Any], *, stage: int = 0) -> list[str]:
    """Where the last rank of a stage makes its host wait in a step."""
    job = load_job(None, settings(**{**CUDA, **changes}))
    topology = job_topology(job)
    last = {axis: size - 1 for axis, size in topology.sizes.items()}
    account = rehearse_rank(job, topology, topology.rank(**{**last, "pp": stage}))
    assert account["failure"] is None, "".join(account["failure"]["traceback"])
    return account["host_syncs"]


QUICK = {  # the rest: make test-all
    "gpt-tp2-cp2-sp-full",
    "zero 3, full",
    "fp8",
    "fp16, skipping",
}


def marked(*cases: dict[str, Any]) -> list[Any]:
    """The names of the cases; those that are not QUICK are slow together."""
    slow = pytest.mark.slow
    names = [name for each in cases for name in each]
    return [pytest.param(name, marks=[slow] * (name not in QUICK)) for name in names]


@pytest.mark.parametrize("name", marked(FAMILIES, VARIANTS, STEPS, GRIDS))
def test_a_step_reads_its_figures_and_nothing_else(name: str) -> None:
    assert waits({**FAMILIES, **VARIANTS, **STEPS, **GRIDS}[name]) == []


@pytest.mark.parametrize("name", marked(FOUR_LAYERS))
def test_no_stage_waits_for_its_device(name: str) -> None:
    for stage in range(2):
        assert waits(FOUR_LAYERS[name], stage=stage) == []


def test_a_cpu_waits_for_nobody() -> None:
    """It reads the norm before the update, which costs nothing there."""
    assert waits({"launch__device": "cpu", "training__dtype": "fp32"}) == []


def test_a_family_that_reads_a_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family of another package may do so; a rehearsal tells its author."""

    def careless(self: GPT, *args: Any) -> Any:
        (loss,) = stage_forward(self, *args)
        return (loss * (1 if loss > 0 else 2),)

    stage_forward = GPT.stage_forward
    monkeypatch.setattr(GPT, "stage_forward", careless)
    (place,) = waits({})
    assert place.startswith("rehearsal/test_host_sync.py:") and place.endswith("(in GPT)")
