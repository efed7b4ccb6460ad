"""Our kernels against megatron-core's that run without a GPU; skipped without the package."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpctl.train.layers.cross_entropy import vocab_parallel_cross_entropy
from mpctl.train.layers.embedding import VocabParallelEmbedding
from mpctl.train.layers.parameters import initialise
from mpctl.train.transport.group import Group
from tests import megatron
from tests.ranks import grouped, run_ranks
from tests.train.layers.build import make_mlp

HIDDEN, FFN, VOCAB, SHAPE = 16, 64, 96, (2, 8)
pytestmark = pytest.mark.skipif(not megatron.IS_HERE, reason="needs megatron-core 0.16.1")


def _compared(ours: nn.Module, theirs: nn.Module, *inputs: Tensor) -> list[float]:
    """Largest differences of outputs, input gradients and parameters' gradients."""
    pairs = list(zip(ours.parameters(), theirs.parameters(), strict=True))
    with torch.no_grad():
        for own, other in pairs:
            other.copy_(own)
    results = []
    for module in (ours, theirs):
        given = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
        out = module(*given)
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        results.append([out.detach(), *(x.grad for x in given if x.requires_grad)])
    gradients = [(own.grad, other.grad) for own, other in pairs]
    both = [*zip(*results, strict=True), *gradients]
    return [float((own - other).abs().max()) for own, other in both]


def _rank(rank: int, size: int) -> dict[str, Any]:
    megatron.set_up(size)
    group = grouped(rank, size)
    place: dict[str, Any] = {"size": size, "dtype": torch.float64}
    mlp = make_mlp(HIDDEN, FFN, tp=group, dtype=torch.float64)
    table = VocabParallelEmbedding(VOCAB, HIDDEN, group=group, dtype=torch.float64)
    initialise(mlp, 3)
    initialise(table, 4)
    with torch.no_grad():
        mlp.up.bias.add_(0.1)
        mlp.down.bias.add_(0.2)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(*SHAPE, HIDDEN, generator=draw, dtype=torch.float64)
    tokens = torch.randint(0, VOCAB, SHAPE, generator=draw)
    return {
        "mlp": _compared(mlp, megatron.TheirMLP(HIDDEN, FFN, **place), x),
        "table": _compared(table, megatron.their_table(VOCAB, HIDDEN, **place), tokens),
        "loss": _losses(group, tokens, draw),
    }


def _losses(group: Group, tokens: Tensor, draw: torch.Generator) -> list[float]:
    whole = torch.randn(*SHAPE, VOCAB, generator=draw, dtype=torch.float32)
    width = VOCAB // group.size
    own, other = (whole[..., group.rank * width : (group.rank + 1) * width].clone().requires_grad_() for _ in range(2))
    ours = vocab_parallel_cross_entropy(own, tokens, group=group, first=group.rank * width)
    theirs = megatron.their_cross_entropy(other * 1, tokens)
    for loss in (ours, theirs):
        (loss * torch.arange(1.0, loss.numel() + 1).view_as(loss)).sum().backward()
    assert own.grad is not None and other.grad is not None
    return [float((ours - theirs).abs().max()), float((own.grad - other.grad).abs().max())]


@pytest.mark.parametrize("tp", [1, 2])
def test_mlp_table_and_loss_are_megatrons(tp: int) -> None:
    for found in run_ranks(_rank, tp):
        assert max(found["mlp"]) < 1e-12
        assert max(found["table"]) < 1e-12
        assert max(found["loss"]) < 1e-5  # theirs is float32; gradients reach 16
