"""Our tensor-parallel layers against torch's own: `python -m benchmarks.layer_speed [ROUNDS]`.

Two ranks, gloo, one thread each: 8 GPT blocks, hidden 512, 8 heads, sequence 256, micro batch 4,
forward and backward, no dropout (the peers have none that two ranks could agree on). In every round
each contender takes one step, in turn (A B C .., A B C ..), in the same two processes:

    plain     the same blocks in plain torch, whole, on every rank at once
    dtensor   those blocks cut by torch's parallelize_module (ColwiseParallel, RowwiseParallel)
    ours tp=1, ours tp=2
    shared memory    ours tp=2, the messages through memory that both ranks have mapped

The figure is the median of a step's seconds on rank 0, wall and CPU, and the ratio to `plain`.
"""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpctl.layers.config import AttentionConfig, LayerConfig
from mpctl.layers.mlp import MLPConfig
from mpctl.layers.parameters import initialise
from mpctl.layers.shard_context import ShardContext
from mpctl.layers.transformer_layer import ParallelTransformerLayer
from mpctl.transport.group import Group
from mpctl.transport.shared import Exchange, open_segment
from tests.ranks import run_ranks

LAYERS, HIDDEN, HEADS, SEQ, BATCH = 8, 512, 8, 256, 4


class PlainBlock(nn.Module):
    """GPT-2's block on torch's own modules; `heads` is what this rank computes."""

    def __init__(self, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.o = nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        split = (f(h).unflatten(-1, (self.heads, -1)) for f in (self.q, self.k, self.v))
        parts = (part.transpose(1, 2) for part in split)
        attended = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def dtensor_blocks(size: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (size,))
    columns = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel())
    plan = {**columns, "o": RowwiseParallel(), "down": RowwiseParallel()}
    blocks = [parallelize_module(PlainBlock(HEADS // size), mesh, plan) for _ in range(LAYERS)]
    return nn.Sequential(*blocks)


def our_blocks(group: Group) -> nn.Module:
    config = LayerConfig(AttentionConfig(HIDDEN, HEADS), MLPConfig(HIDDEN, 4 * HIDDEN))
    made = (
        ParallelTransformerLayer(config, ShardContext(tp=group), f"layers.{n}")
        for n in range(LAYERS)
    )
    blocks = nn.Sequential(*made)
    initialise(blocks, 1)
    return blocks


def one_step(blocks: nn.Module, x: Tensor) -> tuple[float, float]:
    """Wall and CPU seconds of one forward and backward."""
    wall, cpu = time.perf_counter(), time.process_time()
    blocks(x).sum().backward()
    spent = time.perf_counter() - wall, time.process_time() - cpu
    for parameter in blocks.parameters():
        parameter.grad = None
    return spent


def measure(rank: int, size: int, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(BATCH, SEQ, HIDDEN, requires_grad=True)
    shared = Exchange(open_segment(rank, range(size), None), timeout=60)
    contenders = {
        "plain": nn.Sequential(*(PlainBlock() for _ in range(LAYERS))),
        "dtensor tp=2": dtensor_blocks(size),
        "ours tp=1": our_blocks(Group()),
        "ours tp=2": our_blocks(Group(rank, size, torch.distributed.group.WORLD)),
        "shared memory": our_blocks(Group(rank, size, shared=shared)),
    }
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for turn in range(rounds + 2):
        for name, blocks in contenders.items():
            torch.distributed.barrier()
            seconds = one_step(blocks, x)
            if turn > 1:
                spent[name].append(seconds)
    return {name: list(map(list, figures)) for name, figures in spent.items()}


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    spent = run_ranks(measure, 2, rounds, timeout=580)[0]
    plain = [median(figures) for figures in zip(*spent["plain"], strict=True)]
    print(f"torch {torch.__version__}, medians of {rounds} alternating rounds, rank 0")
    print(f"{'':14} {'wall ms':>8} {'cpu ms':>8} {'plain / wall':>13} {'plain / cpu':>12}")
    for name, figures in spent.items():
        wall, cpu = (median(column) for column in zip(*figures, strict=True))
        ratios = f"{plain[0] / wall:13.2f} {plain[1] / cpu:12.2f}"
        print(f"{name:14} {wall * 1e3:8.1f} {cpu * 1e3:8.1f} {ratios}")


if __name__ == "__main__":
    main()
