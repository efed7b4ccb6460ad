"""Tiny Hugging Face models with random weights, saved by transformers, and their outputs.

Weights are wider than an initialisation's and biases and norms are no constants, so that a
transposition, a swap or a forgotten bias shows.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mpctl.core.errors import InputError, Issue
from mpctl.train.weights.hub import open_hub

VOCAB, SEQ, TARGET_SEQ = 300, 32, 12
SPECIAL_VOCAB = 310  # with room for the special tokens of an objective
GPT2 = {
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 4,
    "vocab_size": VOCAB,
    "n_positions": SEQ,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LLAMA = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": SEQ,
    "rope_theta": 500.0,
}
LLAMA31 = {
    **LLAMA,
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": True,
    "head_dim": 16,
    "rope_theta": 500.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
# Without a padding token: its row of the word table would get no gradient from where it is read.
BERT = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "vocab_size": SPECIAL_VOCAB,
    "max_position_embeddings": SEQ,
    "pad_token_id": None,
}
T5 = {
    "num_layers": 2,
    "num_decoder_layers": 3,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_heads": 4,
    "vocab_size": SPECIAL_VOCAB,
    "decoder_start_token_id": 0,
}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2-sharded": {**GPT2, "activation_function": "relu", "n_inner": 64},
    "llama": LLAMA,
    "llama31-sharded": {**LLAMA31, "hidden_act": "gelu_pytorch_tanh"},
    "mistral": {**LLAMA, "sliding_window": 5},
    "qwen2": {**LLAMA, "tie_word_embeddings": True},
    "qwen3-sharded": {**LLAMA, "head_dim": 16},
    "bert": BERT,
    "bert-sharded": {**BERT, "hidden_act": "gelu_new", "type_vocab_size": 3},
    "t5": T5,
    "t51-sharded": {
        **T5,
        "num_decoder_layers": 1,
        "d_kv": 16,
        "feed_forward_proj": "gated-gelu",
        "relative_attention_num_buckets": 12,
        "relative_attention_max_distance": 20,
        "tie_word_embeddings": False,
    },
}

ROUTED = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
LATENT = {
    **LLAMA,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
}
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {**LLAMA, "num_local_experts": 4},
    "qwen2_moe": {
        **LLAMA,
        **ROUTED,
        "shared_expert_intermediate_size": 28,
        "mlp_only_layers": [0],
        "num_hidden_layers": 3,
    },
    "qwen3_moe-sharded": {**LLAMA, **ROUTED, "head_dim": 16, "norm_topk_prob": True, "decoder_sparse_step": 2},
    "olmoe": {**LLAMA, "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "deepseek_v2": {
        **LATENT,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
    },
    "deepseek_v2-sharded": {**LATENT, "q_lora_rank": None, "num_hidden_layers": 3},
    "deepseek_v3-sharded": {**LATENT, "n_group": 4, "topk_group": 2, "num_mtp_layers": 0},
    "deepseek_v3 with yarn": {
        **LATENT,
        "n_group": 1,
        "topk_group": 1,
        "num_mtp_layers": 0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 4.0,
            "mscale": 0.707,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16,
        },
    },
}
EVERY = {**KINDS, **EXPERTS}


def make(kind: str) -> Any:
    """A model of transformers, float32, in evaluation mode."""
    import transformers as hf

    torch.manual_seed(sum(map(ord, kind)))
    keys = EVERY[kind]
    if kind.startswith("gpt2"):
        model: Any = hf.GPT2LMHeadModel(hf.GPT2Config(**keys))
    elif kind.startswith("llama"):
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**keys))
    elif kind.startswith(("mistral", "qwen")) or kind in EXPERTS:
        name = kind.removesuffix("-sharded").removesuffix(" with yarn")
        model = hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(name, **keys))
    elif kind.startswith("bert"):
        model = hf.BertForPreTraining(hf.BertConfig(**keys))
    else:
        model = hf.T5ForConditionalGeneration(hf.T5Config(**keys))
        if not model.config.scale_decoder_outputs:
            _untie(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer), alpha=0.05)
    return model.eval()


def _untie(model: Any) -> None:
    """transformers 5 ties the tables of every new T5; files of 1.1 hold two."""
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight))
    model.config.tie_word_embeddings = False


def tokens() -> tuple[Tensor, Tensor]:
    """Inputs [2, s] and targets [2, s]."""
    drawn = torch.randint(0, VOCAB, (2, SEQ + 1), generator=torch.Generator().manual_seed(5))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def fields(kind: str) -> dict[str, Tensor]:
    """A batch of two samples as the family's objective makes it."""
    inputs, targets = tokens()
    if kind.startswith("bert"):
        types = (torch.arange(SEQ) >= torch.tensor([[9], [20]])).long()
        types[0, -1] = KINDS[kind].get("type_vocab_size", 2) - 1
        weights = torch.zeros(2, SEQ, dtype=torch.float64)
        weights[0, [1, 7, 30]], weights[1, [2, 3]] = 1 / 3, 1 / 2
        return {"tokens": inputs, "types": types, "targets": targets, "weights": weights, "next": torch.tensor([1, 0])}
    if kind.startswith("t5"):
        written = targets[:, :TARGET_SEQ]
        weights = (torch.arange(TARGET_SEQ) < torch.tensor([[12], [9]])).double()
        return {
            "tokens": inputs,
            "decoder_tokens": inputs.flip(1)[:, :TARGET_SEQ],
            "targets": written,
            "weights": weights / weights.sum(1, keepdim=True),
        }
    return {"tokens": inputs, "targets": targets}


def answer(model: Any, kind: str) -> list[Tensor]:
    """Logits [2, s, v] and, of a BERT, those of the next sentence [2, 2]."""
    asked = fields(kind)
    if kind.startswith("bert"):
        said = model(asked["tokens"], token_type_ids=asked["types"])
        return [said.prediction_logits, said.seq_relationship_logits]
    if kind.startswith("t5"):
        said = model(asked["tokens"], decoder_input_ids=asked["decoder_tokens"])
        return [said.logits]
    return [model(asked["tokens"]).logits]


def summed_loss(logits: list[Tensor], asked: dict[str, Tensor]) -> Tensor:
    """The sum of both samples' losses, the mean of each by its weights."""
    words, *following = logits
    losses = torch.nn.functional.cross_entropy(words.mT, asked["targets"], reduction="none")
    weights = asked.get("weights", torch.tensor(1 / SEQ))
    total = (losses * weights).sum()
    for follows in following:
        total = total + torch.nn.functional.cross_entropy(follows, asked["next"], reduction="sum")
    return total


@dataclass(frozen=True)
class Truth:
    """A saved model with its answer, and the gradients of its summed loss by its own names."""

    folder: Path
    answer: list[Tensor]
    gradients: dict[str, Tensor]

    @property
    def logits(self) -> Tensor:
        return self.answer[0]


def truth(kind: str, folder: Path) -> Truth:
    model = make(kind)
    shards = {"max_shard_size": "30KB"} if kind.endswith("sharded") else {}
    model.save_pretrained(folder, **shards)
    said = answer(model, kind)
    summed_loss(said, fields(kind)).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return Truth(folder, [logits.detach() for logits in said], gradients)


def load(folder: Path) -> Any:
    """By the class that the directory names."""
    import transformers as hf

    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(hf, name).from_pretrained(folder, dtype=torch.float32).eval()


def issues_of(folder: Path) -> list[Issue]:
    """Everything that keeps a directory from being opened."""
    with pytest.raises(InputError) as caught:
        open_hub(folder)
    return list(caught.value.issues)


def configure(folder: Path, **keys: Any) -> None:
    """Change keys of its config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))
