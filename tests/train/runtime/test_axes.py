"""Axes, modes and families: replicas, tensor, context and sequence parallelism, recomputation.

All in float64, so that equal means 1e-10; and each sends what its plan says, byte by byte.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mpctl.run.launch.summary import planned_traffic
from tests.train.runtime.tiny import column, make_trainer, tiny_job, tiny_plan, train, whole_weights

SHAPES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {
        "model__norm": "rmsnorm",
        "model__position": "rotary",
        "model__activation": "swiglu",
        "model__bias": False,
        "model__tied_embeddings": False,
        "model__kv_heads": 2,
        "model__ffn": 96,
    },
    "latent": {
        "model__attention_kind": "mla",
        "model__q_lora_rank": 12,
        "model__kv_lora_rank": 10,
        "model__qk_nope_head_dim": 6,
        "model__qk_rope_head_dim": 4,
        "model__v_head_dim": 8,
        "model__position": "rotary",
        "model__norm": "rmsnorm",
        "model__bias": False,
        "model__activation": "swiglu",
        "model__ffn": 64,
    },
    "bert": {"model__family": "bert", "model__vocab": 310},
    "bert-pre": {
        "model__family": "bert",
        "model__vocab": 310,
        "model__norm_order": "pre",
        "model__tied_embeddings": False,
    },
    "t5": {
        "model__family": "t5",
        "model__vocab": 310,
        "model__position": "relative",
        "model__decoder_layers": 1,
        "model__decoder_seq_length": 16,
        "model__norm": "rmsnorm",
        "model__bias": False,
        "model__relative_buckets": 8,
        "model__relative_max_distance": 16,
    },
    "glm": {"model__family": "glm", "model__vocab": 310},
}
FULL, PARTS = {"training__recompute": "full"}, {"training__partition_activations": True}
MODES: dict[str, tuple[int, int, int, dict[str, Any]]] = {  # tp, cp, dp, settings
    "cp2": (1, 2, 1, {}),
    "cp2-dp2": (1, 2, 2, {}),
    "tp2-cp2": (2, 2, 1, {}),
    "tp2-sp": (2, 1, 1, {"parallel__sequence_parallel": True}),
    "tp2-sp-cp2-full": (2, 2, 1, {"parallel__sequence_parallel": True, **FULL}),
    "tp4-sp": (4, 1, 1, {"parallel__sequence_parallel": True}),
    "tp2-sp-halves": (2, 1, 1, {"parallel__sequence_parallel": True, "parallel__tp_comm_overlap": True}),
    "tp2-full": (2, 1, 1, FULL),
    "tp2-full-parts": (2, 1, 1, {**FULL, **PARTS, "training__offload_activations": True}),
    "tp2-full-no-dropout": (2, 1, 1, {**FULL, "training__dropout": 0.0}),
    "tp2-selective": (2, 1, 1, {"training__recompute": "selective"}),
    "order": (2, 2, 1, {"parallel__order": "cp-tp-dp-pp"}),
}
STEPS = 4
# The rest: make test-all.
# Of GPT alone: no dimension of a model is cut otherwise.
GPT_MODES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "tp2-dp2": (2, 1, 2, {}),
    "dp2": (1, 1, 2, {}),
    "tp4": (4, 1, 1, {}),
    "one-micro-batch": (1, 1, 1, {"training__micro_batch_size": 8}),
}
QUICK = {
    ("gpt", "tp2-dp2"),
    ("gpt", "one-micro-batch"),
    ("gpt", "cp2"),
    ("gpt", "tp2-full-parts"),
    ("llama", "tp2-sp-cp2-full"),
    ("latent", "tp2-sp"),
}
CASES = [
    pytest.param(shape, mode, marks=[pytest.mark.slow] * ((shape, mode) not in QUICK))
    for shape in SHAPES
    for mode in (*MODES, *(GPT_MODES if shape == "gpt" else ()))
]


@pytest.fixture(scope="module")
def one_process(data, tmp_path_factory):
    """Trainings of one process, by shape and dropout."""
    done: dict[tuple[str, float], list[dict[str, Any]]] = {}

    def trained(shape: str, dropout: float) -> list[dict[str, Any]]:
        if (shape, dropout) not in done:
            job = small_job(data, 1, 1, 1, shape, {"training__dropout": dropout})
            done[shape, dropout] = train(job, tmp_path_factory.mktemp("one"))
        return done[shape, dropout]

    return trained


def small_job(data, tp: int, cp: int, dp: int, shape: str, changes: dict[str, Any]):
    return tiny_job(
        data,
        tp,
        dp,
        parallel__cp=cp,
        cluster__gpus_per_node=tp * cp * dp,
        training__dtype="fp64",
        training__steps=STEPS,
        checkpoint__at_end=False,
        checkpoint__interval=0,
        **{**SHAPES[shape], **changes},
    )


def same_gradients(ranks, alone, *, vocab: int) -> None:
    """Of the last step, every parameter's: within 1e-10 of its largest."""
    found, expected = (whole_weights(r, what="gradients", vocab=vocab) for r in (ranks, alone))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        error = (found[name] - gradient).abs().max() / gradient.abs().max()
        assert error < 1e-10, (name, float(error))


def same_copies(ranks: list[dict[str, Any]]) -> None:
    """What several ranks hold of a parameter, they hold to the bit."""
    first: dict[str, torch.Tensor] = {}
    for rank in ranks:
        for name, (*_, blocks, value) in rank["weights"].items():
            kept = first.setdefault(f"{name} {blocks}", value)
            assert torch.equal(kept, value), (name, rank["coords"])


@pytest.mark.parametrize(("shape", "mode"), CASES)
@pytest.mark.quick(4)
def test_the_loss_does_not_tell_and_the_plan_is_what_runs(data, one_process, tmp_path, shape: str, mode: str) -> None:
    tp, cp, dp, changes = {**MODES, **GPT_MODES}[mode]
    job = small_job(data, tp, cp, dp, shape, changes)
    ranks = train(job, tmp_path)
    alone = one_process(shape, changes.get("training__dropout", 0.1))
    for name in ("loss", "grad_norm"):
        assert column(ranks, name) == pytest.approx(column(alone, name), rel=1e-10)
    last = [found[0]["records"][-1]["validation_loss"] for found in (ranks, alone)]
    assert last[0] == pytest.approx(last[1], rel=1e-10)
    assert all(column([rank]) == column(ranks) for rank in ranks)
    same_copies(ranks)
    same_gradients(ranks, alone, vocab=job.model.vocab)
    estimate = tiny_plan(job).estimate
    for rank in ranks:
        assert rank["count"] == estimate.memory[0].parameters
        assert rank["traffic"] == planned_traffic(estimate.messages[0])


def test_dropout_is_on(data, one_process, tmp_path) -> None:
    dry = {"training__dropout": 0.0, "training__attention_dropout": 0.0}
    record, _ = make_trainer(small_job(data, 1, 1, 1, "gpt", dry), tmp_path).one_step()
    assert record["loss"] != pytest.approx(column(one_process("gpt", 0.1))[0], rel=1e-5)
