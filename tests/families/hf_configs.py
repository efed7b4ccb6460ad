"""Small configs of Hugging Face's classes, whose models tests count and run."""

from __future__ import annotations

from typing import Any

COMMON = {"vocab_size": 384, "num_hidden_layers": 6, "hidden_size": 32, "num_attention_heads": 4}
LLAMA = {
    **COMMON, "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 16,
}  # fmt: skip
HEADS = {"head_dim": 12}
BLOOM = {"vocab_size": 384, "n_layer": 4, "hidden_size": 32, "n_head": 4, "seq_length": 16}
FALCON = {**COMMON, "max_position_embeddings": 16}

# Name -> (model_type, keys of its config.json).
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LLAMA),
    "llama with biases of attention": ("llama", {**LLAMA, "attention_bias": True}),
    "llama with biases of the mlp": ("llama", {**LLAMA, "mlp_bias": True}),
    "mistral": ("mistral", {**LLAMA, "sliding_window": 5, "head_dim": 8}),
    "qwen2": ("qwen2", {**LLAMA, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {**LLAMA, **HEADS}),
    "gemma": ("gemma", {**LLAMA, **HEADS}),
    "gemma2": ("gemma2", {**LLAMA, **HEADS, "sliding_window": 5, "query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3_text", {**LLAMA, **HEADS, "sliding_window": 5}),
    "phi": ("phi", {**LLAMA, "num_key_value_heads": 4}),
    "phi with norms of heads": ("phi", {**LLAMA, "qk_layernorm": True}),
    "phi3": ("phi3", {**LLAMA, "sliding_window": 5, "pad_token_id": 0}),
    "falcon-7b": ("falcon", FALCON),
    "falcon-40b": ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon with two norms in a row": ("falcon", {**FALCON, "parallel_attn": False, "bias": True}),
    "olmo": ("olmo", LLAMA),
    "olmo2": ("olmo2", LLAMA),
    "bloom": ("bloom", BLOOM),
    "gpt_neox": ("gpt_neox", {**LLAMA, "intermediate_size": 64}),
    "gpt_neox in a row": ("gpt_neox", {**LLAMA, "use_parallel_residual": False}),
    "nemotron": ("nemotron", LLAMA),
    "gpt2": ("gpt2", {"vocab_size": 384, "n_layer": 2, "n_embd": 32, "n_head": 4,
                      "n_positions": 16}),
}  # fmt: skip
