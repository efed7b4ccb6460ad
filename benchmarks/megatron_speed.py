"""Our kernels against megatron-core's on CPU: `python -m benchmarks.megatron_speed [ROUNDS]`.

Two ranks, gloo, one thread each, float32; micro batch 4, sequence 256, hidden 512, ffn 2048,
vocabulary 50304. MLP, word table and cross entropy, forward and backward, each side in turn in the
same two processes. The figure is the median of rank 0, wall and CPU, and theirs over ours: above 1
ours is faster. Needs megatron-core 0.16.1 (tests/megatron.py says how).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from mpctl.layers.cross_entropy import vocab_parallel_cross_entropy
from mpctl.layers.embedding import VocabParallelEmbedding
from mpctl.layers.mlp import MLPConfig, ParallelMLP
from mpctl.layers.shard_context import ShardContext
from mpctl.transport.group import Group
from tests import megatron
from tests.ranks import run_ranks

BATCH, SEQ, HIDDEN, FFN, VOCAB = 4, 256, 512, 2048, 50304
Step = Callable[[], Tensor]


def contenders(rank: int, size: int) -> dict[str, dict[str, Step]]:
    """By kernel, then by side: a forward pass that gives something to sum."""
    megatron.set_up(size)
    group = Group(rank, size, torch.distributed.group.WORLD)
    place: dict[str, Any] = {"size": size, "dtype": torch.float32}
    x = torch.randn(BATCH, SEQ, HIDDEN, requires_grad=True)
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ))
    logits = torch.randn(BATCH, SEQ, VOCAB // size, requires_grad=True)
    modules: dict[str, dict[str, nn.Module]] = {
        "MLP": {
            "ours": _filled(ParallelMLP(MLPConfig(HIDDEN, FFN), ShardContext(tp=group))),
            "theirs": _filled(megatron.TheirMLP(HIDDEN, FFN, **place)),
        },
        "word table": {
            "ours": _filled(VocabParallelEmbedding(VOCAB, HIDDEN, group=group)),
            "theirs": _filled(megatron.their_table(VOCAB, HIDDEN, **place)),
        },
    }
    inputs = {"MLP": x, "word table": tokens}
    steps: dict[str, dict[str, Step]] = {
        kernel: {side: _call(module, inputs[kernel]) for side, module in sides.items()}
        for kernel, sides in modules.items()
    }
    first = rank * (VOCAB // size)
    steps["cross entropy"] = {
        # Both overwrite the logits, which no leaf allows: both get a copy.
        "ours": lambda: vocab_parallel_cross_entropy(
            logits * 1, tokens, group=group, first=first, overwrite=True
        ),
        "theirs": lambda: megatron.their_cross_entropy(logits * 1, tokens),
    }
    return steps


def _filled(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02)
    return module


def _call(module: nn.Module, given: Tensor) -> Step:
    return lambda: module(given)


def measure(rank: int, size: int, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    steps = contenders(rank, size)
    spent: dict[str, dict[str, list[list[float]]]] = {
        kernel: {side: [] for side in sides} for kernel, sides in steps.items()
    }
    for turn in range(rounds + 2):
        for kernel, sides in steps.items():
            for side, step in sides.items():
                torch.distributed.barrier()
                wall, cpu = time.perf_counter(), time.process_time()
                step().sum().backward()
                seconds = [time.perf_counter() - wall, time.process_time() - cpu]
                if turn > 1:
                    spent[kernel][side].append(seconds)
    return spent


def main() -> None:
    if not megatron.IS_HERE:
        sys.exit("megatron-core is not installed: pip install --no-deps megatron-core==0.16.1")
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    spent = run_ranks(measure, 2, rounds, timeout=580)[0]
    print(f"torch {torch.__version__}, medians of {rounds} alternating rounds, rank 0, ms")
    print(f"{'':14} {'ours: wall':>10} {'cpu':>7} {'theirs: wall':>13} {'cpu':>7}   theirs / ours")
    for kernel, sides in spent.items():
        ours, theirs = (
            [median(column) * 1e3 for column in zip(*sides[side], strict=True)]
            for side in ("ours", "theirs")
        )
        row = f"{ours[0]:10.1f} {ours[1]:7.1f} {theirs[0]:13.1f} {theirs[1]:7.1f}"
        print(f"{kernel:14} {row} {theirs[0] / ours[0]:8.2f} {theirs[1] / ours[1]:7.2f}")


if __name__ == "__main__":
    main()
