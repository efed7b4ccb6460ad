"""cp_comm a2a in whole trainings: the losses of one process, the planned messages, the planned peak; and that
of latent attention and norms under all_gather.

In float64, so that equal means 1e-10, with dropout on.
"""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.model.layout.topology import job_topology
from mpctl.run.launch.summary import planned_traffic
from mpctl.train.rehearsal.worker import rehearse_rank
from tests.train.runtime.test_axes import SHAPES, same_copies, same_gradients, small_job
from tests.train.runtime.test_memory import CUDA, DROPPED, DRY, FULL, LATENT, SELECTIVE, SEQUENCE, job_of
from tests.train.runtime.tiny import column, tiny_plan, train

A2A: dict[str, Any] = {"parallel__cp_comm": "a2a"}
SLOW = pytest.mark.slow
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{shape: (shape, {}) for shape in SHAPES},
    "window": ("llama", {"model__attention_window": 5, "model__layers": 4}),
    "alibi": ("gpt", {"model__position": "alibi"}),
    "qk-norm": ("llama", {"model__qk_norm": True}),
}
SPLIT = {"parallel__sequence_parallel": True}
LAYOUTS: dict[str, tuple[int, int, int, dict[str, Any]]] = {  # tp, cp, dp, settings
    "cp2": (1, 2, 1, {}),
    "cp4": (1, 4, 1, {}),
    "cp2-selective": (1, 2, 1, {"training__recompute": "selective"}),
    "tp2-sp-cp2-full": (2, 2, 1, {**SPLIT, "training__recompute": "full"}),
    "cp2-dp2-zero3": (1, 2, 2, {"parallel__zero": 3}),
    "cp2-pp2": (1, 2, 1, {"parallel__pp": 2, "parallel__schedule": "zero-bubble", "cluster__nodes": 2}),
}
QUICK = {("llama", "cp2"), ("latent", "tp2-sp-cp2-full"), ("window", "cp2-pp2")}
CASES = [
    pytest.param(model, layout, marks=[SLOW] * ((model, layout) not in QUICK))
    for model, (shape, _) in MODELS.items()
    for layout, (tp, cp, *_) in LAYOUTS.items()
    if shape != "t5" and (tp * cp == 2 or shape != "llama")  # of 2 kv heads
]


@pytest.fixture(scope="module")
def one_process(data, tmp_path_factory):
    """Trainings of one process, by model."""
    done: dict[str, list[dict[str, Any]]] = {}

    def trained(model: str) -> list[dict[str, Any]]:
        if model not in done:
            shape, changes = MODELS[model]
            done[model] = train(small_job(data, 1, 1, 1, shape, changes), tmp_path_factory.mktemp("one"))
        return done[model]

    return trained


@pytest.mark.parametrize(("model", "layout"), CASES)
@pytest.mark.quick(3)
def test_the_loss_does_not_tell_that_heads_were_exchanged(data, one_process, tmp_path, model: str, layout: str) -> None:
    (shape, of_model), (tp, cp, dp, changes) = MODELS[model], LAYOUTS[layout]
    job = small_job(data, tp, cp, dp, shape, {**of_model, **A2A, **changes})
    ranks, alone = train(job, tmp_path), one_process(model)
    for name in ("loss", "grad_norm"):
        assert column(ranks, name) == pytest.approx(column(alone, name), rel=1e-10)
    same_copies(ranks)
    same_gradients(ranks, alone, vocab=job.model.vocab)
    estimate = tiny_plan(job).estimate
    for rank in ranks:
        stage = rank["coords"]["pp"]
        assert rank["traffic"] == planned_traffic(estimate.messages[stage])
    kinds = {(message.axis, message.kind) for message in estimate.messages[0]}
    assert ("cp", "all_to_all") in kinds
    assert ("cp", "all_gather") not in kinds


THIN: dict[str, Any] = {  # an MLP, a vocabulary and states so small that attention has the peak
    "model__ffn": 64,
    "model__vocab": 64,
    "model__layers": 2,
    "model__position": "rotary",
    "training__micro_batch_size": 16,
}
NORMS, GATHERED = {"model__qk_norm": True}, {"parallel__cp_comm": "all_gather"}
THIN_LATENT = {**LATENT, **THIN}
PEAKS: dict[str, tuple[str, dict[str, Any]]] = {
    "dry": ("gpt", DRY),
    "dropout": ("gpt", {}),
    "llama": ("llama", DRY),
    "llama-dropout": ("llama", {}),
    "selective": ("gpt", SELECTIVE),
    "full": ("llama", FULL),
    "sp": ("gpt", {**SEQUENCE, **DRY}),
    "window": ("gpt", {**DRY, "model__attention_window": 64}),
    "window-selective": ("llama", {**DRY, **SELECTIVE, "model__attention_window": 64}),
    "norms": ("llama", {**DRY, "model__qk_norm": True}),
    "glm": ("glm", DRY),
    "cuda": ("llama", CUDA),
    "cuda-dropout": ("gpt", DROPPED),
    "latent": ("latent", DRY),
    "latent-dropout": ("latent", {}),
    "latent-sp": ("latent", {**SEQUENCE, **DRY}),
    "latent-cuda": ("latent", CUDA),
    "thin-full": ("gpt", {**THIN, **FULL, **DRY}),
    "thin-norms": ("gpt", {**THIN, **NORMS, **DRY}),
    "thin-norms-full": ("gpt", {**THIN, **NORMS, **FULL, **CUDA}),
    "thin-width-cuda": ("gpt", {**THIN, **CUDA, "model__qk_norm": "width"}),
    "thin-few-keys-full": ("gpt", {**THIN, **FULL, **DRY, "model__kv_heads": 2}),
    "thin-latent": ("gpt", {**THIN_LATENT, **DRY}),
    "thin-latent-full": ("gpt", {**THIN_LATENT, **FULL, **CUDA}),
    "gathered-latent": ("gpt", {**THIN_LATENT, **GATHERED, **DRY}),
    "gathered-latent-full": ("gpt", {**THIN_LATENT, **GATHERED, **FULL, **DRY}),
}
QUICK_PEAKS = ("llama", "latent-sp", "thin-norms-full")


@pytest.mark.parametrize("case", [pytest.param(c, marks=[SLOW] * (c not in QUICK_PEAKS)) for c in PEAKS])
def test_a_peak_is_as_planned(case: str) -> None:
    shape, changes = PEAKS[case]
    latent = LATENT if shape == "latent" else {}
    job = job_of(shape, {"parallel__cp": 2, **A2A, **changes, **latent})
    estimate = tiny_plan(job).estimate
    (memory,) = estimate.memory
    account = rehearse_rank(job, job_topology(job), 0)
    assert account["failure"] is None, "".join(account["failure"]["traceback"])
    assert memory.tensor_bytes == pytest.approx(account["peak_bytes"], rel=0.05)
    assert memory.activation_bytes == pytest.approx(account["activation_bytes"], rel=0.02)
    assert account["step_traffic"] == planned_traffic(estimate.messages[0])
