"""Small configs of Hugging Face's classes, whose models tests count and run."""

from __future__ import annotations

from typing import Any

COMMON = {"vocab_size": 384, "num_hidden_layers": 6, "hidden_size": 32, "num_attention_heads": 4}
LLAMA = {**COMMON, "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 16}
HEADS = {"head_dim": 12}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
    "rope_theta": 10000.0,
}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8, "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
GPT2 = {"vocab_size": 384, "n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 16}
BERT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 384,
    "max_position_embeddings": 16,
}
T5 = {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 64, "vocab_size": 384}
BLOOM = {"vocab_size": 384, "n_layer": 4, "hidden_size": 32, "n_head": 4, "seq_length": 16}
FALCON = {**COMMON, "max_position_embeddings": 16}

# Name -> (model_type, keys of its config.json).
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LLAMA),
    "llama with keys of every head": ("llama", {**LLAMA, "num_key_value_heads": 4}),
    "llama 3.1": ("llama", {**LLAMA, "rope_parameters": LLAMA3_SCALING}),
    "llama with yarn": ("llama", {**LLAMA, "rope_parameters": YARN}),
    "llama with yarn's mscale": (
        "llama",
        {
            **LLAMA,
            "rope_parameters": {
                **YARN,
                "factor": 40.0,
                "beta_fast": 2.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "truncate": False,
            },
        },
    ),
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
    "phi3 with a part of heads turned": ("phi3", {**LLAMA, "partial_rotary_factor": 0.5, "pad_token_id": 0}),
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
}
# As CONFIGS, of mixtures of experts.
ROUTED = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
QWEN2_MOE = {**LLAMA, **ROUTED, "shared_expert_intermediate_size": 28}
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
GROUPS = {"n_group": 4, "topk_group": 2}
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {**LLAMA, "num_local_experts": 4}),
    "mixtral with windows": ("mixtral", {**LLAMA, "num_local_experts": 4, "sliding_window": 5}),
    "qwen2-moe": ("qwen2_moe", QWEN2_MOE),
    "qwen2-moe with dense layers": ("qwen2_moe", {**QWEN2_MOE, "decoder_sparse_step": 2, "mlp_only_layers": [0, 1]}),
    "qwen3-moe": ("qwen3_moe", {**LLAMA, **ROUTED, **HEADS, "norm_topk_prob": True}),
    "olmoe": ("olmoe", {**LLAMA, "num_experts": 6, "num_experts_per_tok": 2}),
    "gpt-oss": ("gpt_oss", {**LLAMA, **HEADS, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 5}),
    "deepseek-v2": (
        "deepseek_v2",
        {**LATENT, **GROUPS, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5},
    ),
    "deepseek-v2-lite": ("deepseek_v2", {**LATENT, "q_lora_rank": None}),
    "deepseek-v3": ("deepseek_v3", {**LATENT, **GROUPS}),
    "deepseek-v3 with yarn": (
        "deepseek_v3",
        {**LATENT, **GROUPS, "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0}},
    ),
    "kimi-k2": (
        "kimi_k2",
        {
            **LATENT,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
}
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
    "bloom with the residual behind the norm": ("bloom", {**BLOOM, "apply_residual_connection_post_layernorm": True}),
    "falcon-rw": ("falcon", {**FALCON, "alibi": True}),
    "glm of other shapes": ("glm", LLAMA),
    "gpt2 with silu": ("gpt2", {**GPT2, "activation_function": "silu"}),
    "gpt2 with scores scaled by layer": ("gpt2", {**GPT2, "scale_attn_by_inverse_layer_idx": True}),
    "deepseek-v3 with another router": ("deepseek_v3", {**LATENT, **GROUPS, "scoring_func": "softmax"}),
    "llama with experts": ("llama", {**LLAMA, "num_local_experts": 8}),
    "mixtral with noise": ("mixtral", {**LLAMA, "router_jitter_noise": 0.1}),
    "qwen3-moe with a dense layer in between": ("qwen3_moe", {**LLAMA, **ROUTED, "mlp_only_layers": [1]}),
    "mt5": ("mt5", T5),
    "olmo with clipped keys": ("olmo", {**LLAMA, "clip_qkv": 8.0}),
    "qwen2 with windows in some layers": ("qwen2", {**LLAMA, **WINDOWS, "max_window_layers": 2}),
    "qwen3 with windows in some layers": ("qwen3", {**LLAMA, **WINDOWS, "max_window_layers": 2}),
    "roberta": ("roberta", BERT),
}
