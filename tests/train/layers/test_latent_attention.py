"""Latent attention against its formula head by head, transformers, its messages and its cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mpctl.core.tensor_grid import TensorGrid
from mpctl.train.kernels.backend import KernelBackend
from mpctl.train.kernels.counter_rng import CounterRNG
from mpctl.train.kernels.rotary import Rotary
from mpctl.train.layers.attention import KeyValueCache
from mpctl.train.layers.config import LayerConfig
from mpctl.train.layers.fp8 import CastsToFp8
from mpctl.train.layers.latent_attention import LatentAttentionConfig, ParallelLatentAttention
from mpctl.train.layers.linear import ParallelLinear
from mpctl.train.layers.mlp import MLPConfig
from mpctl.train.layers.parameters import DeferredWgrad, partial_kind
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.layers.transformer_layer import ParallelDecoderLayer, ParallelTransformerLayer
from mpctl.train.transport.group import Group
from mpctl.train.transport.timing import Collective
from tests.threads import run_ranks
from tests.train.layers.oracle import (
    axes,
    close,
    copies,
    dropped,
    fill,
    gradients,
    held,
    joined,
    logged,
    numbers,
    sum_gradients,
    whole,
)

B, S, H, A = 2, 16, 16, 4
QL, KL, N, R, V = 12, 10, 6, 4, 8  # latents, and columns of a head
SAMPLES = torch.tensor([12, 7])
# what each case asks of the layer; mask and bias are arguments of forward
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"dropout": 0.2},
    "recomputed": {"dropout": 0.2, "recompute": True},
    "no query latent": {"q_lora_rank": None, "dropout": 0.2},
    "window": {"window": 3, "scale": 0.3},
    "both ways": {"causal": False, "rotary": None, "norm": "layernorm"},
    "wide values": {"v_head_dim": 12},
    "mask and bias": {"causal": False, "mask": True, "bias": True},
}
LAYOUTS = (
    (1, 1, False),
    (2, 1, False),
    (2, 1, True),
    (1, 2, False),
    (2, 2, True),
    (4, 1, False),
    (4, 1, True),
    (2, 2, False),
)


def _config(**changes: Any) -> LatentAttentionConfig:
    sizes = {
        "kv_lora_rank": KL,
        "qk_nope_head_dim": N,
        "qk_rope_head_dim": R,
        "v_head_dim": V,
        "q_lora_rank": QL,
        "rotary": Rotary(R, 100.0),
    }
    return LatentAttentionConfig(H, A, **{**sizes, **changes})


def _made(context: ShardContext, **wanted: Any) -> ParallelLatentAttention:
    settings = {key: v for key, v in wanted.items() if key not in ("mask", "bias", "recompute")}
    made = _config(**settings).build(context, "x", recompute=wanted.get("recompute", False))
    fill(made)
    return made


def _mask() -> Tensor:
    mask = numbers(B, 1, S, S, seed=21) > -0.5
    mask[0, 0, 3] = False  # a query that sees nothing
    return mask


def _run(rank: int, _: int, layout: tuple[int, int, bool]) -> list[list[Any]]:
    """Of each case the output, the gradient of the input and those of the parameters."""
    (tp, cp), results = axes(rank, *layout[:2]), []
    context = ShardContext(tp, cp, layout[2], torch.float64)
    for wanted in CASES.values():
        module = _made(context, **wanted)
        x = held(numbers(B, S, H, seed=8), tp, cp, layout[2]).requires_grad_()
        heads = slice(module.local_heads.start, module.local_heads.stop)
        bias = numbers(1, A, S, S, seed=22)[:, heads]
        seen = {"mask": _mask(), "bias": bias}
        # [b, a, s, s] -> the rows that this rank holds: [b, a, s/c, s]
        seen = {name: held(x.transpose(1, 2), tp, cp).transpose(1, 2) for name, x in seen.items() if name in wanted}
        y = module(x, CounterRNG(5, 6, SAMPLES), **seen)
        y.backward(held(numbers(B, S, H, seed=9), tp, cp, layout[2]))
        sum_gradients(module, tp, cp)
        results.append([y.detach(), x.grad, gradients(module)])
    return results


def _rotate(x: Tensor) -> Tensor:
    theta = torch.tensor([100.0 ** (-2 * i / R) for i in range(R // 2)], dtype=torch.float64)
    turn = torch.exp(1j * torch.arange(S)[:, None] * theta)
    turned = torch.complex(x[..., : R // 2], x[..., R // 2 :]) * turn
    return torch.cat((turned.real, turned.imag), -1)


def _normed(w: dict[str, Tensor], name: str, x: Tensor, config: LatentAttentionConfig) -> Tensor:
    if config.norm == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    y = x / (x.square().mean(-1, keepdim=True) + config.eps).sqrt() * w[f"{name}.weight"]
    return y + w[f"{name}.bias"] if config.norm == "layernorm" else y


def _formula(wanted: dict[str, Any], w: dict[str, Tensor], x: Tensor) -> Tensor:
    settings = {k: v for k, v in wanted.items() if k not in ("mask", "bias", "recompute")}
    config = _config(**settings)
    turn = _rotate if config.rotary else lambda part: part
    if config.q_lora_rank is None:
        queries = x @ w["query.weight"].T
    else:
        latent = _normed(w, "query_latent_norm", x @ w["query_down.weight"].T, config)
        queries = latent @ w["query_up.weight"].T
    down = x @ w["key_value_down.weight"].T
    latent, shared = (_normed(w, "key_value_latent_norm", down[..., :KL], config), turn(down[..., KL:]))
    by_head = (latent @ w["key_value_up.weight"].T).unflatten(-1, (A, -1))
    i, j = torch.arange(S)[:, None], torch.arange(S)
    seen = (j <= i) & (j > i - (config.window or S)) if config.causal else torch.ones(S, S).bool()
    seen = seen & _mask()[:, 0] if "mask" in wanted else seen
    ones = torch.ones(B, A, S, S, dtype=torch.float64)
    factor = dropped(ones, CounterRNG(5, 6, SAMPLES), config.dropout, rng_site="x", heads=range(A))
    heads = []
    for head in range(A):
        query = queries[..., head * (N + R) : (head + 1) * (N + R)]
        key, value = by_head[:, :, head, :N], by_head[:, :, head, N:]
        scores = torch.einsum("bqd,bkd->bqk", query[..., :N], key)
        scores = scores + torch.einsum("bqd,bkd->bqk", turn(query[..., N:]), shared)
        scores = scores * (config.scale or (N + R) ** -0.5)
        scores = scores + numbers(1, A, S, S, seed=22)[:, head] if "bias" in wanted else scores
        shares = scores.exp() * seen
        shares = shares / shares.sum(-1, keepdim=True).clamp(min=1e-300) * factor[:, head]
        heads.append(shares @ value)
    return torch.cat(heads, -1) @ w["output.weight"].T


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_case_against_its_formula(layout: tuple[int, int, bool]) -> None:
    tp, cp, split = layout
    ranks = run_ranks(_run, tp * cp, layout) if tp * cp > 1 else [_run(0, 1, layout)]
    for number, wanted in enumerate(CASES.values()):
        w = copies(_made(ShardContext(dtype=torch.float64), **wanted))
        x = numbers(B, S, H, seed=8).requires_grad_()
        y = _formula(wanted, w, x)
        y.backward(numbers(B, S, H, seed=9))
        for place, expected in enumerate((y.detach(), x.grad)):
            assert expected is not None
            close(joined([rank[number][place] for rank in ranks], tp, cp, split), expected)
        assert ranks[0][number][2].keys() == w.keys()
        for name, leaf in w.items():
            assert leaf.grad is not None
            close(whole([rank[number][2][name] for rank in ranks]), leaf.grad)


def test_parameters_and_what_is_a_partial_sum() -> None:
    """Weights by heads are cut; under sequence parallelism what is not cut is a partial sum."""
    context = ShardContext(Group(1, 2), sequence_parallel=True)
    found = {name: (tuple(p.shape), partial_kind(p)) for name, p in _made(context).named_parameters()}
    assert found == {
        "query_down.weight": ((QL, H), "tp"),
        "query_latent_norm.weight": ((QL,), "tp"),
        "query_up.weight": ((A // 2 * (N + R), QL), ""),
        "key_value_down.weight": ((KL + R, H), "tp"),
        "key_value_latent_norm.weight": ((KL,), "tp"),
        "key_value_up.weight": ((A // 2 * (N + V), KL), ""),
        "output.weight": ((H, A // 2 * V), ""),
    }
    plain = _made(ShardContext(Group(1, 2)))
    assert not any(partial_kind(p) for p in plain.parameters())
    assert "heads 2..4 of 4, d=10 (4 shared), v=8" in repr(plain)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("q_lora_rank", [QL, None])
def test_the_attention_of_transformers(interleaved: bool, q_lora_rank: int | None) -> None:
    """Theirs pairs neighbours of the rotary columns where rope_interleave is set; ours the halves,
    which are the same columns in another order."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as hub

    eager: Any = {"attn_implementation": "eager"}
    shape = DeepseekV3Config(
        hidden_size=H,
        num_attention_heads=A,
        num_key_value_heads=A,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=KL,
        qk_nope_head_dim=N,
        qk_rope_head_dim=R,
        v_head_dim=V,
        rope_interleave=interleaved,
        attention_bias=False,
        max_position_embeddings=S,
        **eager,
    )
    theirs = hub.DeepseekV3Attention(shape, 0).double().eval()
    base = shape.rope_parameters["rope_theta"]
    ours = _config(q_lora_rank=q_lora_rank, rotary=Rotary(R, base)).build(ShardContext(dtype=torch.float64), "x")
    fill(ours)
    order = torch.tensor([0, 2, 1, 3]) if interleaved else torch.arange(R)
    back = order.argsort()  # where each of our columns lies in theirs
    w = copies(ours)
    queries = w["query_up.weight" if q_lora_rank else "query.weight"]
    rows = queries.unflatten(0, (A, -1))
    rows = torch.cat((rows[:, :N], rows[:, N:][:, back]), 1).flatten(0, 1)
    down = w["key_value_down.weight"]
    named = {
        "q_a_proj.weight": w.get("query_down.weight"),
        "q_a_layernorm.weight": w.get("query_latent_norm.weight"),
        "q_b_proj.weight" if q_lora_rank else "q_proj.weight": rows,
        "kv_a_proj_with_mqa.weight": torch.cat((down[:KL], down[KL:][back])),
        "kv_a_layernorm.weight": w["key_value_latent_norm.weight"],
        "kv_b_proj.weight": w["key_value_up.weight"],
        "o_proj.weight": w["output.weight"],
    }
    theirs.load_state_dict({name: value for name, value in named.items() if value is not None})
    x = numbers(B, S, H)
    turns = hub.DeepseekV3RotaryEmbedding(shape)(x, torch.arange(S)[None])
    seen = torch.full((S, S), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    with torch.no_grad():
        expected, _ = theirs(x, turns, seen)
        close(ours(x), expected, 1e-6)


def test_a_cache_of_latents_gives_the_forward_of_all_positions() -> None:
    module, x = _made(ShardContext(dtype=torch.float64)), numbers(B, S, H, seed=8)
    cache = KeyValueCache(S)
    with torch.no_grad():
        steps = [module(x[:, part], cache=cache) for part in (slice(0, 5), slice(5, 8))]
        steps += [module(x[:, i : i + 1], cache=cache) for i in range(8, S)]
        close(torch.cat(steps, 1), module(x))
    assert cache.length == S
    latents, keys = cache.append(torch.empty(B, 1, 0, KL), torch.empty(B, 1, 0, R))
    assert latents.shape == (B, 1, S, KL) and keys.shape == (B, 1, S, R)
    with pytest.raises(ValueError, match="17 positions for a cache of 16"):
        module(x[:, :1], cache=cache)


def _split_decode(rank: int, size: int) -> Tensor:
    tp, _ = axes(rank, size, 1)
    module, x = _made(ShardContext(tp, dtype=torch.float64)), numbers(B, S, H, seed=8)
    cache = KeyValueCache(S)
    with torch.no_grad():
        return torch.cat([module(x[:, i : i + 4], cache=cache) for i in range(0, S, 4)], 1)


def test_a_cache_on_ranks_that_split_the_heads() -> None:
    with torch.no_grad():
        expected = _made(ShardContext(dtype=torch.float64))(numbers(B, S, H, seed=8))
    for result in run_ranks(_split_decode, 2):
        close(result, expected)


def test_rotary_positions_may_be_given() -> None:
    module, x = _made(ShardContext(dtype=torch.float64)), numbers(B, S, H)
    close(module(x, positions=range(S)), module(x))
    close(module(x, positions=range(100, 100 + S)), module(x))  # only distances count
    rows = torch.arange(S).expand(B, S).clone()
    rows[1, 4:] += 3
    moved = module(x, positions=rows)
    close(moved[0], module(x)[0])
    assert (moved[1] - module(x)[1]).abs().max() > 1e-3


def _traffic(rank: int, _: int, layout: tuple[int, int, bool]) -> list[Any]:
    results = []
    for wanted in ({}, {"q_lora_rank": None}):
        log: list[Collective] = []
        tp, cp = axes(rank, *layout[:2], log)
        module = _made(ShardContext(tp, cp, layout[2], torch.float64), **wanted)
        y = module(held(numbers(B, S, H), tp, cp, layout[2]).requires_grad_())
        forward = len(log)
        y.sum().backward()
        results.append([logged(log[:forward]), logged(log[forward:])])
    return results


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != (1, 1, False)])
def test_the_messages_of_the_docstring(layout: tuple[int, int, bool]) -> None:
    t, c, split = layout
    for ranks in run_ranks(_traffic, t * c, layout):
        for (forward, backward), queries in zip(ranks, (QL, H), strict=True):
            rows, latents = B * S // c * 8, KL + R
            gather, scatter = ("all_gather", "tp"), ("reduce_scatter", "tp")
            result, up, key_value = rows * H, rows * queries, rows * latents
            by_position = B * S * latents * 8
            expected: list[tuple[str, str, int]] = []
            if t > 1 and split:
                expected = [(*gather, up), (*gather, key_value)]
            if c > 1:
                expected.append(("all_gather", "cp", by_position))
            if t > 1:
                expected.append((*scatter, result) if split else ("all_reduce", "tp", result))
            assert [message[:3] for message in forward] == expected
            expected = []
            if t > 1 and split:
                expected += [(*gather, result), (*scatter, key_value), (*gather, up), (*scatter, up)]
            elif t > 1:
                expected += [("all_reduce", "tp", key_value), ("all_reduce", "tp", up)]
            if c > 1:
                expected.append(("reduce_scatter", "cp", by_position))
            assert sorted(message[:3] for message in backward) == sorted(expected)


class _Counted(KernelBackend):
    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []

    def scaled_dot_product(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **more: Any) -> Tensor:
        self.calls.append((query.shape[-1], key.shape[-1], value.shape[-1]))
        return super().scaled_dot_product(query, key, value, *args, **more)


def test_the_fused_kernel_runs_where_there_is_no_attention_dropout() -> None:
    for wanted in CASES.values():
        backend = _Counted()
        module = _made(ShardContext(dtype=torch.float64, backend=backend), **wanted)
        sizes = (N + R, N + R, module.config.v_head_dim)
        module(numbers(B, S, H), CounterRNG(5, 6, SAMPLES))
        assert backend.calls == [sizes] * (wanted.get("dropout", 0.0) == 0), wanted


def test_every_weight_may_be_deferred_and_cast_to_fp8() -> None:
    """The linear layers are those of all matrices, the down products included."""
    module = _made(ShardContext(dtype=torch.float64))
    x = numbers(B, S, H, seed=8).requires_grad_()
    module(x).sum().backward()
    expected = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()
    deferred = DeferredWgrad()
    linear = {name: m for name, m in module.named_modules() if isinstance(m, ParallelLinear)}
    assert list(linear) == ["query_down", "query_up", "key_value_down", "key_value_up", "output"]
    for layer in linear.values():
        layer.defer_wgrad(deferred)
    module(x).sum().backward()
    assert all(layer.weight.grad is None for layer in linear.values())
    for gradient in deferred.take():
        gradient()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        close(parameter.grad, expected[name])
    in_fp8 = _made(ShardContext(dtype=torch.bfloat16, fp8=True))
    cast = [name for name, m in in_fp8.named_modules() if isinstance(m, CastsToFp8) and m.fp8_products()]
    assert cast == list(linear)


def test_a_layer_has_the_attention_of_its_configuration() -> None:
    config = LayerConfig(_config(), MLPConfig(H, 4 * H), norm="rmsnorm", recompute="full")
    layer = ParallelTransformerLayer(config, ShardContext(dtype=torch.float64), "layers.0")
    assert isinstance(layer.attention, ParallelLatentAttention)
    fill(layer)
    x = numbers(B, S, H).requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None and all(p.grad is not None for p in layer.parameters())
    with pytest.raises(ValueError, match=r"LatentAttentionConfig: .* cross-attention"):
        ParallelDecoderLayer(config, ShardContext(), "layers.0")


def test_what_it_refuses() -> None:
    refused: dict[str, Any] = {
        "kv_lora_rank 0 is below 1": {"kv_lora_rank": 0},
        "q_lora_rank 0 is below 1": {"q_lora_rank": 0},
        r"rotary positions of 8 features for qk_rope_head_dim 4": {"rotary": Rotary(8)},
        "attention dropout 1.5 is not in": {"dropout": 1.5},
        "window 3: it is 1 or more, of causal": {"window": 3, "causal": False},
    }
    for message, changes in refused.items():
        with pytest.raises(ValueError, match=message):
            _config(**changes)
    grid = ShardContext(Group(0, 4), grid=TensorGrid.of("2d", 4))
    with pytest.raises(ValueError, match=r"tensor_mode 2d: .*use tensor_mode 1d"):
        _config().build(grid, "x")
    with pytest.raises(ValueError, match="4 is not divisible by 3"):
        _config().build(ShardContext(Group(0, 3)), "x")
