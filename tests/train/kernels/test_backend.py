"""Kernels that a caller puts in place of torch's are the ones that a model calls."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from mpctl.spec.model import ModelSpec
from mpctl.spec.training import TrainingSpec
from mpctl.train.families.implementation import Batch, build_module
from mpctl.train.kernels.backend import KernelBackend
from mpctl.train.layers.parameters import initialise
from mpctl.train.layers.shard_context import ShardContext

LAYERS = 2


class _Recorded(KernelBackend):
    """torch's kernels, and how often each was called."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def attention(self, *args, **more) -> Tensor:
        self.calls["attention"] += 1
        return super().attention(*args, **more)

    def layer_norm(self, *args) -> Tensor:
        self.calls["layer_norm"] += 1
        return super().layer_norm(*args)

    def rms_norm(self, *args) -> Tensor:
        self.calls["rms_norm"] += 1
        return super().rms_norm(*args)


@pytest.mark.parametrize("norm, kernel", [("layernorm", "layer_norm"), ("rmsnorm", "rms_norm")])
def test_a_model_calls_the_kernels_that_it_was_built_with(norm: str, kernel: str) -> None:
    model = ModelSpec(layers=LAYERS, hidden=16, heads=2, vocab=30, seq_length=8, norm=norm)  # type: ignore[call-arg]
    backend, losses = _Recorded(), []
    for kernels in ({}, {"backend": backend}):
        module = build_module(model, TrainingSpec(), ShardContext(dtype=torch.float64, **kernels))
        initialise(module, 7)
        tokens = torch.arange(8).expand(2, 8)
        batch = Batch(torch.arange(2), {"tokens": tokens, "targets": tokens})
        losses.append(module.loss(batch, None))
    assert backend.calls == {"attention": LAYERS, kernel: 2 * LAYERS + 1}
    assert torch.equal(*losses)
