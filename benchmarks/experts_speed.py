"""A layer with experts against plain torch: `python -m benchmarks.experts_speed [ROUNDS]`.

One rank, one thread: SwiGLU experts in float32 and bfloat16, 1024 tokens of 512 features, forward
and backward. In every round each contender takes one step, in turn, in the same process:

    loop      each expert's tokens are picked, multiplied by its own parameters and added by
              index_add, no auxiliary loss
    grouped   the same with stacked parameters and F.grouped_mm over sorted rows
    ours      ParallelExperts, with the balance loss by sequence, counts and near ties

The figure is the median of a step's seconds, wall and CPU, and the ratio to `loop`.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.turns import Spent, in_turns, print_against
from mpctl.train.layers.experts import ExpertsConfig, RouterConfig
from mpctl.train.layers.parameters import initialise
from mpctl.train.layers.routing_log import RoutingLog
from mpctl.train.layers.shard_context import ShardContext
from tests.ranks import run_ranks

BATCH, SEQ, HIDDEN, NAME = 4, 256, 512, "layers.0.mlp"
SHAPES = {"8 experts of 1408, 2 a token": (8, 2, 1408), "64 of 256, 8 a token": (64, 8, 256)}
DTYPES = (torch.float32, torch.bfloat16)


class PlainExperts(nn.Module):
    """Experts in torch's operations, without a loop if `grouped`."""

    def __init__(self, experts: int, k: int, ffn: int, dtype: torch.dtype, *, grouped: bool) -> None:
        super().__init__()
        self.k, self.grouped = k, grouped
        self.router = nn.Parameter(torch.randn(experts, HIDDEN, dtype=dtype) * 0.02)
        up = torch.randn(experts, 2 * ffn, HIDDEN, dtype=dtype) * 0.02
        down = torch.randn(experts, HIDDEN, ffn, dtype=dtype) * 0.02
        self.up = nn.Parameter(up) if grouped else nn.ParameterList(up.unbind())
        self.down = nn.Parameter(down) if grouped else nn.ParameterList(down.unbind())

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        scores = F.linear(rows, self.router).float().softmax(-1)
        weights, chosen = scores.topk(self.k, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        combine = self._grouped if self.grouped else self._looped
        return combine(rows, weights, chosen).view_as(x)

    def _looped(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        result = torch.zeros_like(rows)
        for expert in range(len(self.router)):
            token, place = torch.where(chosen == expert)
            gate, up = F.linear(rows[token], self.up[expert]).chunk(2, -1)
            own = F.linear(F.silu(gate) * up, self.down[expert])
            result = result.index_add(0, token, own * weights[token, place, None])
        return result

    def _grouped(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.router))
        offsets = counts.cumsum(0).to(torch.int32)
        fused = F.grouped_mm(rows[order // self.k], self.up.transpose(1, 2), offs=offsets)
        gate, up = fused.chunk(2, -1)
        own = F.grouped_mm(F.silu(gate) * up, self.down.transpose(1, 2), offs=offsets)
        own = own * weights.flatten()[order, None]
        return torch.zeros_like(rows).index_add(0, order // self.k, own)


def our_experts(experts: int, k: int, ffn: int, dtype: torch.dtype) -> nn.Module:
    log = RoutingLog([NAME], experts)
    log.begin(1 / BATCH)
    router = RouterConfig(experts, k, aux_coefficient=0.01)
    module = ExpertsConfig(HIDDEN, ffn, router).build(ShardContext(dtype=dtype, routing=log), NAME)
    initialise(module, 1)
    return module


def measure(rank: int, size: int, rounds: int) -> list[Spent]:
    torch.manual_seed(0)
    results = []
    for experts, k, ffn in SHAPES.values():
        for dtype in DTYPES:
            x = torch.randn(BATCH, SEQ, HIDDEN, dtype=dtype, requires_grad=True)
            grad = torch.randn_like(x)
            models = {
                "loop": PlainExperts(experts, k, ffn, dtype, grouped=False),
                "grouped": PlainExperts(experts, k, ffn, dtype, grouped=True),
                "ours": our_experts(experts, k, ffn, dtype),
            }
            steps = {name: partial(one_step, model, x, grad) for name, model in models.items()}
            results.append(in_turns(steps, rounds, models=models))
    return results


def one_step(module: nn.Module, x: Tensor, grad: Tensor) -> None:
    module(x).backward(grad)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    (results,) = run_ranks(measure, 1, rounds, timeout=580)
    print(f"torch {torch.__version__}, medians of {rounds} alternating rounds")
    names = [f"{shape}, {str(dtype)[6:]}" for shape in SHAPES for dtype in DTYPES]
    for name, spent in zip(names, results, strict=True):
        print(f"\n{name}")
        print_against(spent, "loop")


if __name__ == "__main__":
    main()
