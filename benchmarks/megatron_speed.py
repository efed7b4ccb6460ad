"""Our kernels against megatron-core's on CPU: `python -m benchmarks.megatron_speed [ROUNDS]`.

Two ranks, gloo, one thread each, float32; micro batch 4, sequence 256, hidden 512, ffn 2048,
vocabulary 50304. MLP, word table and cross entropy, forward and backward, each side in turn in the
same two processes. The figure is the median of rank 0, wall and CPU, and theirs over ours: above 1
ours is faster. Needs megatron-core 0.16.1 (tests/megatron.py says how).
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.turns import Spent, Step, in_turns, medians
from mpctl.train.layers.cross_entropy import vocab_parallel_cross_entropy
from mpctl.train.layers.embedding import VocabParallelEmbedding
from mpctl.train.layers.mlp import MLPConfig, ParallelMLP
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.transport.group import Group
from tests import megatron
from tests.ranks import run_ranks

BATCH, SEQ, HIDDEN, FFN, VOCAB = 4, 256, 512, 2048, 50304


def contenders(rank: int, size: int) -> dict[str, Step]:
    """By kernel and side: a forward pass whose result can be summed."""
    megatron.set_up(size)
    group = Group(rank, size, torch.distributed.group.WORLD)
    place: dict[str, Any] = {"size": size, "dtype": torch.float32}
    x = torch.randn(BATCH, SEQ, HIDDEN, requires_grad=True)
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ))
    logits = torch.randn(BATCH, SEQ, VOCAB // size, requires_grad=True)
    first = rank * (VOCAB // size)
    mlp = ParallelMLP(MLPConfig(HIDDEN, FFN), ShardContext(tp=group))
    return {
        "MLP, ours": partial(_filled(mlp), x),
        "MLP, theirs": partial(_filled(megatron.TheirMLP(HIDDEN, FFN, **place)), x),
        "word table, ours": partial(_filled(VocabParallelEmbedding(VOCAB, HIDDEN, group=group)), tokens),
        "word table, theirs": partial(_filled(megatron.their_table(VOCAB, HIDDEN, **place)), tokens),
        # Both overwrite the logits, which no leaf allows: both get a copy.
        "cross entropy, ours": lambda: vocab_parallel_cross_entropy(
            logits * 1, tokens, group=group, first=first, overwrite=True
        ),
        "cross entropy, theirs": lambda: megatron.their_cross_entropy(logits * 1, tokens),
    }


def _filled(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02)
    return module


def measure(rank: int, size: int, rounds: int) -> Spent:
    torch.manual_seed(0)
    made = contenders(rank, size)
    return in_turns({name: partial(one_step, step) for name, step in made.items()}, rounds)


def one_step(step: Step) -> None:
    step().sum().backward()


def main() -> None:
    if not megatron.IS_HERE:
        sys.exit("megatron-core is not installed: pip install --no-deps megatron-core==0.16.1")
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    spent = run_ranks(measure, 2, rounds, timeout=580)[0]
    print(f"torch {torch.__version__}, medians of {rounds} alternating rounds, rank 0, ms")
    columns = ("ours: wall", "cpu", "theirs: wall", "cpu")
    print(f"{'':14}", *(f"{title:>12}" for title in columns), "  theirs / ours")
    for kernel in ("MLP", "word table", "cross entropy"):
        ours, theirs = (medians(spent[f"{kernel}, {side}"]) for side in ("ours", "theirs"))
        row = " ".join(f"{1e3 * seconds:12.1f}" for seconds in (*ours, *theirs))
        print(f"{kernel:14} {row} {theirs[0] / ours[0]:8.2f} {theirs[1] / ours[1]:7.2f}")


if __name__ == "__main__":
    main()
