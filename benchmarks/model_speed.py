"""A small model, ours against plain torch and torch's own tensor parallelism:
`python -m benchmarks.model_speed [gpt|llama] [fp32|bf16] [ROUNDS]`.

Two ranks, one thread each: 8 layers, hidden 512, 8 heads, vocabulary 32000 with a head of
its own, sequence 256, micro batch 4; forward, loss and backward, no dropout. `gpt`: learned
positions, LayerNorm, gelu, biases; `llama`: rotary positions, RMSNorm, SwiGLU of 1408, no biases.

    plain     the model in plain torch, not split, on every rank
    dtensor   the same cut by torch's parallelize_module: table, blocks, head and loss_parallel
    ours tp=1, ours tp=2 over gloo, ours tp=2 through shared memory
    bare tp=2 (gpt alone): by hand for this one model, through the same memory (bare_tp.py)

all in float32. With bf16 instead the plain model in float32 and under torch's autocast, and ours
with float32 and with bfloat16 parameters, messages through shared memory: the computation of a run,
whose float32 masters belong to the optimizer.

Speed: in every round each contender takes one step, in turn, in the same two processes; medians of
rank 0, wall and CPU. Memory: each contender alone in fresh processes, the growth of a rank's
resident peak from before the model is built to after three steps, gradients kept as in training.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.bare_tp import BareModel
from benchmarks.turns import Spent, Step, growth, in_turns, print_against
from mpctl.spec.model import ModelSpec
from mpctl.spec.training import TrainingSpec
from mpctl.train.families.implementation import Batch, build_module
from mpctl.train.layers.parameters import initialise
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.transport.exchange import Exchange
from mpctl.train.transport.group import Group
from mpctl.train.transport.shared import open_segment
from tests.ranks import run_ranks

LAYERS, HIDDEN, HEADS, VOCAB, SEQ, BATCH = 8, 512, 8, 32000, 256, 4
SHAPES: dict[str, dict[str, Any]] = {
    "gpt": {"ffn": 4 * HIDDEN},
    "llama": {"ffn": 1408, "position": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False},
}


class PlainBlock(nn.Module):
    """One layer of torch's modules; heads: number of heads that this rank computes."""

    def __init__(self, shape: str, heads: int) -> None:
        super().__init__()
        self.heads, self.is_llama = heads, shape == "llama"
        ffn, bias = SHAPES[shape]["ffn"], not self.is_llama
        norm = nn.RMSNorm if self.is_llama else nn.LayerNorm
        self.norm1, self.norm2 = norm(HIDDEN), norm(HIDDEN)
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN, bias=bias) for _ in range(3))
        self.o = nn.Linear(HIDDEN, HIDDEN, bias=bias)
        self.up, self.down = nn.Linear(HIDDEN, ffn, bias=bias), nn.Linear(ffn, HIDDEN, bias=bias)
        self.gate = nn.Linear(HIDDEN, ffn, bias=False) if self.is_llama else None

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.is_llama:
            q, k = _turned(q, turn), _turned(k, turn)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        wide = F.gelu(self.up(h)) if self.gate is None else F.silu(self.gate(h)) * self.up(h)
        return x + self.down(wide)


def _turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * turn[0] + torch.cat((-second, first), -1) * turn[1]


class PlainModel(nn.Module):
    """The model, or without its table or head a part of it."""

    def __init__(
        self, shape: str, heads: int = HEADS, *, layers: int = LAYERS, has_table: bool = True, has_head: bool = True
    ) -> None:
        super().__init__()
        is_llama = shape == "llama"
        self.word = nn.Embedding(VOCAB, HIDDEN) if has_table else None
        self.place = nn.Embedding(SEQ, HIDDEN) if has_table and not is_llama else None
        self.blocks = nn.ModuleList(PlainBlock(shape, heads) for _ in range(layers))
        self.norm = (nn.RMSNorm if is_llama else nn.LayerNorm)(HIDDEN) if has_head else None
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False) if has_head else None
        angles = torch.arange(SEQ)[:, None] / 10000 ** (torch.arange(32) / 32)
        wide = torch.cat((angles, angles), -1)
        self.turn = (wide.cos(), wide.sin())

    def forward(self, x: Tensor) -> Tensor:
        if self.word is not None:
            x = self.word(x)
        if self.place is not None:
            x = x + self.place(torch.arange(SEQ))
        for block in self.blocks:
            x = block(x, self.turn)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def parallelized(model: PlainModel, size: int) -> nn.Module:
    """The model, whose blocks compute HEADS / size heads, cut by torch over `size` ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (size,))
    columns = dict.fromkeys(("q", "k", "v", "up", "gate"), ColwiseParallel())
    block_plan = {**columns, "o": RowwiseParallel(), "down": RowwiseParallel()}
    ends = {
        "word": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for module, plan in [*((block, block_plan) for block in model.blocks), (model, ends)]:
        present = {name: how for name, how in plan.items() if getattr(module, name) is not None}
        parallelize_module(module, mesh, present)
    return model


def torch_step(model: nn.Module, tokens: Tensor, targets: Tensor, *, is_cut: bool, casts: bool = False) -> Step:
    from torch.distributed.tensor.parallel import loss_parallel

    def step() -> Tensor:
        with loss_parallel() if is_cut else nullcontext():
            with torch.autocast("cpu", torch.bfloat16, enabled=casts):
                logits = model(tokens)
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
        return loss

    return step


def settings(shape: str) -> dict[str, Any]:
    """The model of a shape, as a job names it."""
    return {
        "layers": LAYERS,
        "hidden": HIDDEN,
        "heads": HEADS,
        "vocab": VOCAB,
        "seq_length": SEQ,
        "tied_embeddings": False,
        **SHAPES[shape],
    }


def our_step(shape: str, group: Group, tokens: Tensor, targets: Tensor, dtype: torch.dtype) -> tuple[nn.Module, Step]:
    model = ModelSpec(**settings(shape))
    module = build_module(model, TrainingSpec(), ShardContext(group, dtype=dtype))
    initialise(module, 1)
    batch = Batch(torch.arange(BATCH), {"tokens": tokens, "targets": targets})

    def step() -> Tensor:
        loss = module.loss(batch, None) / BATCH
        loss.backward()
        return loss

    return module, step


CONTENDERS = {
    "fp32": ("plain", "dtensor tp=2", "ours tp=1", "ours tp=2, gloo", "ours tp=2, memory", "bare tp=2"),
    "bf16": ("plain", "plain, autocast", "ours tp=1, fp32", "ours tp=1, bf16", "ours tp=2, fp32", "ours tp=2, bf16"),
}


def build(name: str, shape: str, rank: int, size: int) -> tuple[nn.Module, Step]:
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(0, VOCAB, (BATCH, SEQ), generator=draw) for _ in range(2))
    if name.startswith("plain"):
        model: nn.Module = PlainModel(shape)
        casts = name.endswith("autocast")
        return model, torch_step(model, tokens, targets, is_cut=False, casts=casts)
    if name.startswith("dtensor"):
        model = parallelized(PlainModel(shape, HEADS // size), size)
        return model, torch_step(model, tokens, targets, is_cut=True)
    if name.startswith("bare"):
        return bare_step(tokens, targets, rank, size)
    group = Group() if "tp=1" in name else Group(rank, size, torch.distributed.group.WORLD)
    if group.size > 1 and not name.endswith("gloo"):
        segment = open_segment(rank, range(size), None)
        group = Group(rank, size, shared=Exchange(segment, timeout=60))
    dtype = torch.bfloat16 if name.endswith("bf16") else torch.float32
    return our_step(shape, group, tokens, targets, dtype)


def bare_step(tokens: Tensor, targets: Tensor, rank: int, size: int) -> tuple[nn.Module, Step]:
    exchange = Exchange(open_segment(rank, range(size), None), timeout=60)
    model = BareModel(layers=LAYERS, hidden=HIDDEN, heads=HEADS, vocab=VOCAB, seq=SEQ, rank=rank, exchange=exchange)

    def step() -> Tensor:
        loss = model(tokens, targets)
        loss.backward()
        return loss

    return model, step


def speed(rank: int, size: int, shape: str, names: Sequence[str], rounds: int) -> Spent:
    built = {name: build(name, shape, rank, size) for name in names}
    models, steps = ({name: pair[at] for name, pair in built.items()} for at in (0, 1))
    return in_turns(steps, rounds, models=models)


def memory(rank: int, size: int, shape: str, name: str) -> int:
    """Bytes by which this rank's resident peak grew."""
    return growth(lambda: build(name, shape, rank, size)[1])


def main() -> None:
    shape = sys.argv[1] if len(sys.argv) > 1 else "gpt"
    dtype = sys.argv[2] if len(sys.argv) > 2 else "fp32"
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 9
    names = [n for n in CONTENDERS[dtype] if shape == "gpt" or not n.startswith("bare")]
    spent = run_ranks(speed, 2, shape, names, rounds, timeout=900)[0]
    peaks = {name: max(run_ranks(memory, 2, shape, name, timeout=120)) for name in names}
    print(f"{shape}, torch {torch.__version__}, medians of {rounds} alternating rounds, rank 0")
    print_against(spent, "plain", peaks)


if __name__ == "__main__":
    main()
