"""What T5 starts from: the law of its released code, at any split, and a loss near uniform."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mpctl.core.shard import Shard
from mpctl.spec.load import load_job
from mpctl.train.families.t5.module import t5_layer_config
from mpctl.train.layers.attention import AttentionConfig
from mpctl.train.layers.mlp import MLPConfig
from mpctl.train.layers.parameters import Init, fill_random

SHAPE: dict[str, Any] = {
    "model.family": "t5",
    "model.layers": 2,
    "model.hidden": 64,
    "model.heads": 4,
    "model.ffn": 256,
    "model.vocab": 500,
    "model.seq_length": 32,
}


def test_matrices_start_as_transformers_start() -> None:
    job = load_job(None, SHAPE)
    assert job.model is not None
    config = t5_layer_config(job.model, job.training, causal=False)
    assert isinstance(config.mlp, MLPConfig) and isinstance(config.attention, AttentionConfig)
    torch.manual_seed(1)
    sizes = {"vocab_size": 500, "d_model": 64, "d_kv": 16, "d_ff": 256, "num_heads": 4}
    import transformers

    shape = transformers.T5Config(num_layers=8, **sizes)
    theirs = transformers.T5ForConditionalGeneration(shape)
    block = theirs.encoder.block
    attention = [layer.layer[0].SelfAttention for layer in block]
    mlp = [layer.layer[1].DenseReluDense for layer in block]
    stds = {
        "query": (config.attention.query_init.std, [a.q.weight for a in attention]),
        "key": (config.attention.init.std, [a.k.weight for a in attention]),
        "output": (config.attention.output_init.std, [a.o.weight for a in attention]),
        "up": (config.mlp.init.std, [m.wi.weight for m in mlp]),
        "down": (config.mlp.output_init.std, [m.wo.weight for m in mlp]),
    }
    for name, (std, weights) in stds.items():
        found = torch.cat([weight.detach().flatten() for weight in weights]).std().item()
        assert std == pytest.approx(found, rel=0.03), name
    assert config.attention.qkv_init.first == (64, config.attention.query_std)


def test_the_first_rows_have_their_own_std_however_the_rows_are_cut() -> None:
    init = Init("normal", 1.0, first=(6, 0.25))
    whole, plain = torch.empty(10, 8), torch.empty(10, 8)
    fill_random(whole, Shard((10, 8)), 7, init)
    fill_random(plain, Shard((10, 8)), 7, Init("normal", 1.0))
    assert torch.equal(whole[6:], plain[6:])
    assert torch.equal(whole[:6], plain[:6] * 0.25)


def test_init_std_scales_the_law() -> None:
    job = load_job(None, {**SHAPE, "training.init_std": 0.04})
    assert job.model is not None
    config = t5_layer_config(job.model, job.training, causal=True)
    assert isinstance(config.mlp, MLPConfig)
    assert config.mlp.init.std == pytest.approx(2 / math.sqrt(64))
