"""Which adapters `mpctl launch` runs; all are planned."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.plan.rules.launched import why_not_launched
from mpctl.spec.load import load_job

LLAMA = {
    "model.activation": "swiglu",
    "model.norm": "rmsnorm",
    "model.position": "rotary",
    "model.bias": False,
    "model.tied_embeddings": False,
}
EXPERTS = {**LLAMA, "model.experts": 4, "model.experts_per_token": 2, "model.expert_ffn": 64}
SIZES = {"model.layers": 2, "model.hidden": 64, "model.heads": 4, "model.vocab": 1000, "model.seq_length": 64}


def refused(model: dict[str, Any], adapter: dict[str, Any], **changes: Any) -> list[str]:
    job = load_job(None, {**SIZES, **model, "cluster.device": "cpu", "training.adapter": adapter, **changes})
    return [check.where.removeprefix("training.adapter.") for check in why_not_launched(job)]


@pytest.mark.parametrize(
    ("model", "adapter", "where"),
    [
        (LLAMA, {"dropout": 0.1, "targets": ["all-linear", "lm_head"]}, []),
        (LLAMA, {"base_precision": "fp32", "dtype": "fp32"}, []),
        (LLAMA, {"kind": "dora", "dropout": 0.1}, []),
        (LLAMA, {"kind": "dora", "base_precision": "nf4"}, ["base_precision"]),
        (LLAMA, {"kind": "qlora"}, []),
        (LLAMA, {"kind": "qlora", "base_precision": "int8"}, ["base_precision"]),
        (LLAMA, {"dtype": "bf16"}, ["dtype"]),
        ({}, {"targets": "lm_head"}, ["targets"]),
        ({}, {"targets": "attention"}, []),
        (EXPERTS, {"targets": "all-linear"}, []),
        (EXPERTS, {"targets": "all-linear", "dropout": 0.1}, ["dropout"]),
        (EXPERTS, {"targets": "attention", "dropout": 0.1}, []),
    ],
)
def test_what_is_planned_alone_is_named(model: dict[str, Any], adapter: dict[str, Any], where: list[str]) -> None:
    assert refused(model, adapter, **{"training.dtype": "fp32"}) == where


def test_dropout_of_dora_over_tp_is_planned_alone() -> None:
    dora, changes = {"kind": "dora"}, {"training.dtype": "fp32", "parallel.tp": 2, "cluster.gpus_per_node": 2}
    assert refused(LLAMA, {**dora, "dropout": 0.1}, **changes) == ["dropout"]
    assert refused(LLAMA, dora, **changes) == []


def test_compiled_layers_are_planned_alone() -> None:
    compiled = refused(LLAMA, {}, **{"training.dtype": "fp32", "launch.compile": True})
    assert compiled == ["launch.compile"]
