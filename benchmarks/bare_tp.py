"""Tensor parallelism over two ranks, written by hand for one model: the minimal peer of
benchmarks/model_speed.py.

GPT's blocks in plain torch with half of each matrix, a product for q, k and v together, and two
all-reduces a block and direction (arXiv 1909.08053, section 3) through the memory that our ranks
share; the vocabulary is split in the table, the head and the loss. Nothing is recorded and there
are no options: no dropout, sequence parallelism, recomputation or overlapped messages.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpctl.train.transport.exchange import Exchange

TP = 2


def summed(x: Tensor, exchange: Exchange, op: Any = "sum") -> Tensor:
    work = exchange.all_reduce(x, op, "tp")
    if work is not None:
        work.wait()
    return x


class Enter(torch.autograd.Function):
    """Identity forward, sum backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return summed(grad.contiguous(), ctx.exchange), None


class Leave(torch.autograd.Function):
    """Sum forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.mark_dirty(x)
        return summed(x, exchange)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class SplitLoss(torch.autograd.Function):
    """Mean cross entropy of logits [n, v/t]; targets [n] are columns of this rank or outside."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, exchange: Exchange) -> Tensor:
        peak = summed(logits.amax(1), exchange, "max")
        logits = logits.sub_(peak[:, None])
        outside = (targets < 0) | (targets >= logits.shape[1])
        column = targets.masked_fill(outside, 0)[:, None]
        target = logits.gather(1, column)[:, 0].masked_fill_(outside, 0.0)
        exponentials = logits.exp_()
        total = summed(exponentials.sum(1), exchange)
        target = summed(target, exchange)
        ctx.save_for_backward(exponentials.div_(total[:, None]), column, outside)
        return (total.log() - target).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        shares, column, outside = ctx.saved_tensors
        shares.scatter_add_(1, column, (outside.to(shares.dtype) - 1)[:, None])
        return shares.mul_(grad / len(shares)), None, None


class BareBlock(nn.Module):
    def __init__(self, hidden: int, heads: int, exchange: Exchange) -> None:
        super().__init__()
        self.heads, self.exchange = heads // TP, exchange
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.up = nn.Linear(hidden, 3 * hidden // TP), nn.Linear(hidden, 4 * hidden // TP)
        self.o = nn.Linear(hidden // TP, hidden, bias=False)
        self.down = nn.Linear(4 * hidden // TP, hidden, bias=False)
        self.o_bias, self.down_bias = (nn.Parameter(torch.zeros(hidden)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(Enter.apply(self.norm1(x), self.exchange)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = self.o(attended.transpose(1, 2).flatten(2))
        x = x + Leave.apply(out, self.exchange).add_(self.o_bias)
        wide = F.gelu(self.up(Enter.apply(self.norm2(x), self.exchange)))
        return x + Leave.apply(self.down(wide), self.exchange).add_(self.down_bias)


class BareModel(nn.Module):
    """Tokens and targets [b, s] -> the mean loss. rank: which half of every split tensor."""

    def __init__(
        self, *, layers: int, hidden: int, heads: int, vocab: int, seq: int, rank: int, exchange: Exchange
    ) -> None:
        super().__init__()
        self.words, self.exchange = vocab // TP, exchange
        self.first = rank * self.words
        self.word, self.place = nn.Embedding(self.words, hidden), nn.Embedding(seq, hidden)
        self.blocks = nn.ModuleList(BareBlock(hidden, heads, exchange) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, self.words, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        local = tokens - self.first
        outside = (local < 0) | (local >= self.words)
        vectors = self.word(local.masked_fill(outside, 0)).masked_fill(outside[..., None], 0.0)
        x = Leave.apply(vectors, self.exchange) + self.place(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(Enter.apply(self.norm(x), self.exchange)).flatten(0, 1)
        return SplitLoss.apply(logits, targets.flatten() - self.first, self.exchange)
