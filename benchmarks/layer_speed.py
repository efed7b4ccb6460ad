"""Our tensor-parallel layers against torch's own: `python -m benchmarks.layer_speed [ROUNDS]`.

Two ranks, gloo, one thread each: 8 GPT blocks, hidden 512, 8 heads, sequence 256, micro batch 4,
forward and backward, no dropout (the peers have none that two ranks could agree on). In every round
each contender takes one step, in turn (A B C .., A B C ..), in the same two processes:

    plain     the same blocks in plain torch, not split, on every rank
    dtensor   those blocks cut by torch's parallelize_module (ColwiseParallel, RowwiseParallel)
    ours tp=1, ours tp=2
    shared memory    ours tp=2, the messages through memory that both ranks have mapped

The figure is the median of a step's seconds on rank 0, wall and CPU, and the ratio to `plain`.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.model_speed import BATCH, HEADS, HIDDEN, LAYERS, SEQ, PlainModel, parallelized
from benchmarks.turns import Spent, in_turns, print_against
from mpctl.train.layers.attention import AttentionConfig
from mpctl.train.layers.config import LayerConfig
from mpctl.train.layers.mlp import MLPConfig
from mpctl.train.layers.parameters import initialise
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.layers.transformer_layer import ParallelTransformerLayer
from mpctl.train.transport.exchange import Exchange
from mpctl.train.transport.group import Group
from mpctl.train.transport.shared import open_segment
from tests.ranks import run_ranks


def plain_blocks(heads: int = HEADS) -> PlainModel:
    return PlainModel("gpt", heads, has_table=False, has_head=False)


def our_blocks(group: Group) -> nn.Module:
    config = LayerConfig(AttentionConfig(HIDDEN, HEADS), MLPConfig(HIDDEN, 4 * HIDDEN))
    made = (ParallelTransformerLayer(config, ShardContext(tp=group), f"layers.{n}") for n in range(LAYERS))
    blocks = nn.Sequential(*made)
    initialise(blocks, 1)
    return blocks


def measure(rank: int, size: int, rounds: int) -> Spent:
    torch.manual_seed(0)
    x = torch.randn(BATCH, SEQ, HIDDEN, requires_grad=True)
    shared = Exchange(open_segment(rank, range(size), None), timeout=60)
    models = {
        "plain": plain_blocks(),
        "dtensor tp=2": parallelized(plain_blocks(HEADS // size), size),
        "ours tp=1": our_blocks(Group()),
        "ours tp=2": our_blocks(Group(rank, size, torch.distributed.group.WORLD)),
        "shared memory": our_blocks(Group(rank, size, shared=shared)),
    }
    steps = {name: partial(one_step, blocks, x) for name, blocks in models.items()}
    return in_turns(steps, rounds, models=models)


def one_step(blocks: nn.Module, x: Tensor) -> None:
    blocks(x).sum().backward()


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    spent = run_ranks(measure, 2, rounds, timeout=580)[0]
    print(f"torch {torch.__version__}, medians of {rounds} alternating rounds, rank 0")
    print_against(spent, "plain")


if __name__ == "__main__":
    main()
