"""Small configs of Hugging Face's classes, whose models tests count and run."""

from __future__ import annotations

from typing import Any

COMMON = {"vocab_size": 384, "num_hidden_layers": 6, "hidden_size": 32, "num_attention_heads": 4}
LLAMA = {
    **COMMON, "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 16,
}  # fmt: skip
HEADS = {"head_dim": 12}
LLAMA3_SCALING = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8, "rope_theta": 10000.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8,
        "rope_theta": 10000.0}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
GPT2 = {"vocab_size": 384, "n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 16}
BERT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "vocab_size": 384, "max_position_embeddings": 16,
}  # fmt: skip
T5 = {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 64, "vocab_size": 384}
BLOOM = {"vocab_size": 384, "n_layer": 4, "hidden_size": 32, "n_head": 4, "seq_length": 16}
FALCON = {**COMMON, "max_position_embeddings": 16}

# Name -> (model_type, keys of its config.json).
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LLAMA),
    "llama with keys of every head": ("llama", {**LLAMA, "num_key_value_heads": 4}),
    "llama 3.1": ("llama", {**LLAMA, "rope_parameters": LLAMA3_SCALING}),
    "llama with yarn": ("llama", {**LLAMA, "rope_parameters": YARN}),
    "llama with yarn's mscale": ("llama", {**LLAMA, "rope_parameters": {
        **YARN, "factor": 40.0, "beta_fast": 2.0, "mscale": 1.0, "mscale_all_dim": 0.5,
        "truncate": False}}),
    "llama with linear scaling": ("llama", {**LLAMA, "rope_parameters": LINEAR}),
    "llama with biases of attention": ("llama", {**LLAMA, "attention_bias": True}),
    "llama with biases of the mlp": ("llama", {**LLAMA, "mlp_bias": True}),
    "mistral": ("mistral", {**LLAMA, "sliding_window": 5, "head_dim": 8}),
    "mistral without windows": ("mistral", {**LLAMA, "sliding_window": None}),
    "qwen2": ("qwen2", {**LLAMA, "tie_word_embeddings": True}),
    "qwen2 with windows": ("qwen2", {**LLAMA, **WINDOWS}),
    "qwen3": ("qwen3", {**LLAMA, **HEADS}),
    "qwen3 with windows": ("qwen3", {**LLAMA, **HEADS, **WINDOWS}),
    "gemma": ("gemma", {**LLAMA, **HEADS}),
    "gemma2": ("gemma2", {**LLAMA, **HEADS, "sliding_window": 5, "query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3_text", {**LLAMA, **HEADS, "sliding_window": 5}),
    "phi": ("phi", {**LLAMA, "num_key_value_heads": 4}),
    "phi with norms of heads": ("phi", {**LLAMA, "qk_layernorm": True}),
    "phi3": ("phi3", {**LLAMA, "sliding_window": 5, "pad_token_id": 0}),
    "phi3 with a part of heads turned": (
        "phi3", {**LLAMA, "partial_rotary_factor": 0.5, "pad_token_id": 0},
    ),
    "falcon-7b": ("falcon", FALCON),
    "falcon-40b": ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon with two norms in a row": ("falcon", {**FALCON, "parallel_attn": False, "bias": True}),
    "olmo": ("olmo", LLAMA),
    "olmo2": ("olmo2", LLAMA),
    "bloom": ("bloom", BLOOM),
    "gpt_neox": ("gpt_neox", {**LLAMA, "intermediate_size": 64}),
    "gpt_neox in a row": ("gpt_neox", {**LLAMA, "use_parallel_residual": False}),
    "nemotron": ("nemotron", LLAMA),
    "gpt2": ("gpt2", GPT2),
    "gpt2 with a head of its own": ("gpt2", {**GPT2, "tie_word_embeddings": False}),
}  # fmt: skip
# As CONFIGS, of classes with other heads than a decoder's.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", BERT),
    "t5": ("t5", T5),
    "t5 1.1": ("t5", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
}
# What no keys of ours say, so that it is refused.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "bert with relative positions": ("bert", {**BERT, "position_embedding_type": "relative_key"}),
    "bert as a decoder": ("bert", {**BERT, "is_decoder": True}),
    "bloom with the residual behind the norm": (
        "bloom", {**BLOOM, "apply_residual_connection_post_layernorm": True},
    ),
    "falcon-rw": ("falcon", {**FALCON, "alibi": True}),
    "glm of other shapes": ("glm", LLAMA),
    "gpt2 with silu": ("gpt2", {**GPT2, "activation_function": "silu"}),
    "gpt2 with scores scaled by layer": (
        "gpt2", {**GPT2, "scale_attn_by_inverse_layer_idx": True},
    ),
    "mt5": ("mt5", T5),
    "olmo with clipped keys": ("olmo", {**LLAMA, "clip_qkv": 8.0}),
    "qwen2 with windows in some layers": ("qwen2", {**LLAMA, **WINDOWS, "max_window_layers": 2}),
    "qwen3 with windows in some layers": ("qwen3", {**LLAMA, **WINDOWS, "max_window_layers": 2}),
    "roberta": ("roberta", BERT),
}  # fmt: skip
