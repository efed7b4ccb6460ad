"""Plain torch oracles and helpers: the unsharded layer written again from its full weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpctl.core.shard import Shard
from mpctl.train.kernels.counter_rng import CounterRNG, drop
from mpctl.train.layers.context_parallel import context_positions
from mpctl.train.layers.parameters import assemble, partial_kind, shard_of, take
from mpctl.train.transport.group import Group
from mpctl.train.transport.timing import Collective
from tests.threads import group_of

EXACT = 1e-10


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Float64 test data, the same on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


NO_PEERS: Any = object()  # a process group where a test replaces torch's collectives


def grouped(rank: int, size: int, log: list[Collective] | None = None, name: str = "tp") -> Group:
    """Of all ranks of a run (tests/threads.py)."""
    return group_of(rank, range(size), name, log)


def axes(rank: int, tp: int, cp: int, log: list[Collective] | None = None) -> tuple[Group, Group]:
    """The groups of a rank of tp x cp: rank = tp + tp_size cp."""
    row = range(rank // tp * tp, (rank // tp + 1) * tp)
    return (group_of(rank, row, "tp", log), group_of(rank, range(rank % tp, tp * cp, tp), "cp", log))


def context_split(whole: Tensor, cp: Group, *, dim: int = 1) -> Tensor:
    """This rank's part along `dim` of a whole sequence: tokens or targets [b, s] -> [b, s/c]."""
    positions = context_positions(whole.shape[dim], cp.size, cp.rank)
    return whole.index_select(dim, positions)


def held(x: Tensor, tp: Group, cp: Group, split: bool = False) -> Tensor:
    """The rows of x [b, s, ..] that a rank holds; split: under sequence parallelism."""
    part = context_split(x, cp)
    return (part.chunk(tp.size, 1)[tp.rank] if split else part).clone()


def joined(pieces: list[Tensor], tp: int, cp: int, split: bool = False) -> Tensor:
    """x [b, s, ..] from what `held` gave to each rank; rows held twice must agree."""
    length = sum(piece.shape[1] for piece in pieces) // (1 if split else tp)
    full = torch.full((pieces[0].shape[0], length, *pieces[0].shape[2:]), torch.nan).to(pieces[0])
    places = torch.arange(length)[None]
    for rank, piece in enumerate(pieces):
        own = held(places, Group(rank % tp, tp), Group(rank // tp, cp), split)[0]
        if not full[:, own].isnan().any():
            close(piece, full[:, own])
        full[:, own] = piece
    return full


def sum_gradients(module: nn.Module, tp: Group, cp: Group) -> None:
    """What the optimizer does before it steps: partial ones over tp, all of them over cp."""
    for parameter in module.parameters():
        if partial_kind(parameter):
            parameter.grad = tp.all_reduce(parameter.grad)
        parameter.grad = cp.all_reduce(parameter.grad)


def logged(log: list[Collective]) -> list[tuple[str, str, int, str]]:
    return [(c.kind, c.axis, c.bytes, c.dtype) for c in log]


def fill(module: nn.Module, seed: int = 3) -> None:
    """Every parameter, biases and norms too, from full random tensors cut by its shard."""
    for number, (_, parameter) in enumerate(sorted(module.named_parameters())):
        shard = shard_of(parameter)
        with torch.no_grad():
            parameter.copy_(take(shard, numbers(*shard.shape, seed=seed + number) * 0.3))


Part = tuple[Tensor, Shard]
"""A tensor, and which part of the whole one it is."""


def gradients(module: nn.Module) -> dict[str, Part]:
    """Gradients of the parameters, by name."""
    result = {}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        result[name] = (parameter.grad, shard_of(parameter))
    return result


def whole(pieces: list[Part]) -> Tensor:
    """One gradient assembled from the ranks; parts that several ranks hold must agree."""
    held: dict[str, Tensor] = {}
    for tensor, shard in pieces:
        close(tensor, held.setdefault(str(shard), tensor))
    return assemble([shard for _, shard in pieces], [tensor for tensor, _ in pieces])


def dropped(x: Tensor, rng: CounterRNG, p: float, **place: Any) -> Tensor:
    """x with dropout of probability p; place: as CounterRNG.mask's."""
    return drop(x, rng.mask(x.shape, p, **place)) if rng.active(p) else x


def close(actual: Tensor, expected: Tensor, bound: float = EXACT) -> None:
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all()
    difference = (actual - expected).abs().max().item()
    assert difference <= bound, f"max abs difference {difference:.3e} > {bound}"


def heads_of(x: Tensor, d: int) -> Tensor:
    b, s, n = x.shape
    return x.reshape(b, s, n // d, d).permute(0, 2, 1, 3)


def attention(w: dict[str, Tensor], x: Tensor, d: int, causal: bool, mask: Tensor | None = None) -> Tensor:
    """Textbook attention with full weights; mask multiplies the probabilities."""
    columns = w["output.weight"].shape[1]
    rest = (w["qkv.weight"].shape[0] - columns) // 2
    fused = x @ w["qkv.weight"].T + w["qkv.bias"]
    q = heads_of(fused[..., :columns], d)
    k = heads_of(fused[..., columns : columns + rest], d)
    v = heads_of(fused[..., columns + rest :], d)
    index = torch.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k[:, index]) / d**0.5
    if causal:
        s = x.shape[1]
        scores = scores + torch.full((s, s), -torch.inf, dtype=x.dtype).triu(1)
    exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
    probabilities = exponentials / exponentials.sum(-1, keepdim=True)
    if mask is not None:
        probabilities = probabilities * mask
    context = torch.einsum("bhqk,bhkd->bqhd", probabilities, v[:, index])
    return context.flatten(2) @ w["output.weight"].T + w["output.bias"]


def mlp(w: dict[str, Tensor], x: Tensor, approximate: str = "none") -> Tensor:
    inner = F.gelu(x @ w["up.weight"].T + w["up.bias"], approximate=approximate)
    return inner @ w["down.weight"].T + w["down.bias"]


def norm(w: Tensor, b: Tensor, x: Tensor, eps: float = 1e-5) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w + b


def saved_bytes(work: Callable[[], Tensor], *, but: Iterable[Tensor] = ()) -> int:
    """What autograd keeps for the backward of `work`, without the storages of `but`."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = work()  # alive until the sum is taken, so that no address is used twice
    for tensor in but:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    kept = sum(storages.values())
    del result
    return kept


def below(w: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{name}."): t for key, t in w.items() if key.startswith(f"{name}.")}


def copies(module: nn.Module) -> dict[str, Tensor]:
    """A tp=1 module's weights as fresh leaves for the oracle."""
    return {n: p.detach().clone().requires_grad_() for n, p in module.named_parameters()}
