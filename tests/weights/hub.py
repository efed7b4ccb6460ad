"""Tiny Hugging Face models with random weights, saved by transformers itself, and what they say.

Weights are ten times wider than an initialisation's and biases and norms are no constants, so that
a transposition, a swap or a forgotten bias shows.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCAB, SEQ = 300, 32
GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": VOCAB, "n_positions": SEQ,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
LLAMA = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB,
         "max_position_embeddings": SEQ, "rope_theta": 500.0}  # fmt: skip
LLAMA31 = {**LLAMA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
           "head_dim": 16, "rope_theta": 500.0,
           "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                            "high_freq_factor": 4.0,
                            "original_max_position_embeddings": 16}}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2-sharded": {**GPT2, "activation_function": "relu", "n_inner": 64},
    "llama": LLAMA,
    "llama31-sharded": LLAMA31,
}


def make(kind: str) -> Any:
    """A model of transformers, float32, in evaluation mode."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(sum(map(ord, kind)))
    keys = KINDS[kind]
    if kind.startswith("gpt2"):
        model: Any = GPT2LMHeadModel(GPT2Config(**keys))
    else:
        model = LlamaForCausalLM(LlamaConfig(**keys))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def tokens() -> tuple[Tensor, Tensor]:
    """Inputs [2, s] and targets [2, s]."""
    drawn = torch.randint(0, VOCAB, (2, SEQ + 1), generator=torch.Generator().manual_seed(5))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


@dataclass(frozen=True)
class Truth:
    """A saved model with its logits, and the gradients of its summed loss by its own names."""

    folder: Path
    logits: Tensor
    gradients: dict[str, Tensor]


def truth(kind: str, folder: Path) -> Truth:
    model = make(kind)
    shards = {"max_shard_size": "30KB"} if kind.endswith("sharded") else {}
    model.save_pretrained(folder, **shards)
    inputs, targets = tokens()
    logits = model(inputs).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return Truth(folder, logits.detach(), gradients)


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()
