"""A model in plain torch, in a separate process: `python -m benchmarks.gpu.peer JSON` prints one
line of JSON, seconds a step and bytes.

Two ways to train in bf16, both with fused AdamW, clipping and torch.compile of the whole model:

    autocast  float32 parameters under torch.autocast
    masters   bf16 parameters; the optimizer updates float32 copies, which are then copied back,
              as in mpctl

Peaks of memory are of the steps after the first WARM, so that compiling is not in them.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu.shapes import Shape


@dataclass(frozen=True)
class PeerRun:
    """precision: autocast or masters; recompute: whether layers are computed again in backward."""

    shape: Shape
    device: str
    precision: str
    steps: int
    warm: int
    dropout: float = 0.0
    recompute: bool = False
    compiles: bool = True


class Block(nn.Module):
    """A pre-norm layer. cos, sin: [s, d/2] of rotary positions, None for GPT."""

    def __init__(self, run: PeerRun) -> None:
        super().__init__()
        s, self.run = run.shape, run
        norm = nn.RMSNorm if s.family == "llama" else nn.LayerNorm
        bias, width, kv = s.family == "gpt", s.heads * s.head_dim, s.kv_heads * s.head_dim
        self.norm1, self.norm2 = norm(s.hidden), norm(s.hidden)
        self.qkv = nn.Linear(s.hidden, width + 2 * kv, bias)
        self.o = nn.Linear(width, s.hidden, bias)
        self.up = nn.Linear(s.hidden, s.ffn * (1 if bias else 2), bias)
        self.down = nn.Linear(s.ffn, s.hidden, bias)

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor] | None) -> Tensor:
        p = self.run.dropout
        x = x + F.dropout(self.attend(self.norm1(x), table), p)
        up = self.up(self.norm2(x))
        if self.run.shape.family == "gpt":
            return x + F.dropout(self.down(F.gelu(up)), p)
        gate, value = up.chunk(2, -1)
        return x + F.dropout(self.down(F.silu(gate) * value), p)

    def attend(self, x: Tensor, table: tuple[Tensor, Tensor] | None) -> Tensor:
        s = self.run.shape
        width, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        parts = self.qkv(x).split([width, kv, kv], -1)
        q, k, v = (part.unflatten(-1, (-1, s.head_dim)).transpose(1, 2) for part in parts)
        if table is not None:
            q, k = turned(q, *table), turned(k, *table)
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.run.dropout, enable_gqa=s.kv_heads < s.heads
        )
        return self.o(out.transpose(1, 2).flatten(2))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [b, a, s, d] turned by rotary positions."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Plain(nn.Module):
    """Embedding, layers, norm, head; GPT's head is the table."""

    def __init__(self, run: PeerRun) -> None:
        super().__init__()
        s, self.run = run.shape, run
        self.word = nn.Embedding(s.vocab, s.hidden)
        self.place = nn.Embedding(s.seq, s.hidden) if s.family == "gpt" else None
        self.blocks = nn.ModuleList(Block(run) for _ in range(s.layers))
        self.norm = (nn.RMSNorm if s.family == "llama" else nn.LayerNorm)(s.hidden)
        angles = torch.arange(s.seq)[:, None] / 10000.0 ** (torch.arange(0, s.head_dim, 2) / s.head_dim)
        self.register_buffer("angles", angles.float(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x, table = self.word(tokens), None
        if self.place is not None:
            x = F.dropout(x + self.place.weight[: tokens.shape[1]], self.run.dropout)
        else:
            table = self.angles.float().cos(), self.angles.float().sin()
        for block in self.blocks:
            x = checkpoint(block, x, table, use_reentrant=False) if self.run.recompute else block(x, table)
        logits = F.linear(self.norm(x), self.word.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Masters:
    """AdamW on float32 copies of 16-bit parameters."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.copies = [p.detach().float().requires_grad_() for p in parameters]
        self.adam = torch.optim.AdamW(self.copies, lr=1e-4, fused=True)

    def step(self) -> None:
        for copy, parameter in zip(self.copies, self.parameters, strict=True):
            copy.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        nn.utils.clip_grad_norm_(self.copies, 1.0)
        self.adam.step()
        with torch.no_grad():
            torch._foreach_copy_([p.data for p in self.parameters], self.copies)


class Autocast:
    """AdamW on the float32 parameters themselves."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.adam = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)


def train(run: PeerRun) -> dict[str, float]:
    """Median seconds of a step, most bytes of tensors and of the allocator."""
    device, has_masters = torch.device(run.device), run.precision == "masters"
    with device:
        model = Plain(run)
        tokens = torch.randint(0, run.shape.vocab, (run.shape.batch, run.shape.seq + 1))
    model = model.bfloat16() if has_masters else model
    optimizer = (Masters if has_masters else Autocast)(list(model.parameters()))
    loss_of = torch.compile(model) if run.compiles else model
    seconds = []
    for step in range(run.steps):
        if step == run.warm and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        began = time.perf_counter()
        with nullcontext() if has_masters else torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        float(loss.detach())  # as a training loop logs it: the host waits
        seconds.append(time.perf_counter() - began)
    return {"seconds": median(seconds[run.warm :]), **peaks(device)}


def peaks(device: torch.device) -> dict[str, float]:
    """Most bytes of tensors and of the allocator; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    return {"bytes": torch.cuda.max_memory_allocated(device), "reserved": torch.cuda.max_memory_reserved(device)}


if __name__ == "__main__":
    raw = json.loads(sys.argv[1])
    print(json.dumps(train(PeerRun(**{**raw, "shape": Shape(**raw["shape"])}))))
