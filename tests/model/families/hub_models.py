"""Models of Hugging Face's hub that have a preset: their config.json and what they weigh.

A row for each preset: the parameters as published, a tied table counted once, and of config.json
the keys that say the shape.
"""

from __future__ import annotations

from typing import Any

Row = tuple[int, dict[str, Any]]


def _row(count: int, kind: str, keys: dict[str, Any], **more: Any) -> Row:
    return count, {"model_type": kind, **keys, **more}


def _shape(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int, length: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": length,
    }


def _gpt2(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_ctx": 1024,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
    }


def _llama3(
    hidden: int, layers: int, heads: int, ffn: int, *, factor: float | None = None, tied: bool = False
) -> dict[str, Any]:
    """factor: of the scaling of rotary positions since Llama 3.1."""
    keys = _shape(hidden, layers, heads, 8, ffn, 128256, 8192 if factor is None else 131072)
    keys |= {"rope_theta": 500000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": tied}
    if factor is not None:
        keys["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    return keys


def _qwen2(*shape: int, eps: float, tied: bool = False) -> dict[str, Any]:
    return {
        **_shape(*shape),
        "rope_theta": 1e6,
        "rms_norm_eps": eps,
        "tie_word_embeddings": tied,
        "use_sliding_window": False,
    }


def _qwen3(hidden: int, layers: int, heads: int, ffn: int, *, tied: bool = False) -> dict[str, Any]:
    return {
        **_shape(hidden, layers, heads, 8, ffn, 151936, 40960),
        "head_dim": 128,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        "use_sliding_window": False,
        "attention_bias": False,
    }


def _mistral(*shape: int, base: float, window: int | None = None, **more: Any) -> dict[str, Any]:
    return {
        **_shape(*shape),
        "rope_theta": base,
        "rms_norm_eps": 1e-5,
        "sliding_window": window,
        "tie_word_embeddings": False,
        **more,
    }


def _neox(hidden: int, layers: int, heads: int, vocab: int, act: str = "gelu") -> dict[str, Any]:
    keys = _shape(hidden, layers, heads, heads, 4 * hidden, vocab, 2048)
    del keys["num_key_value_heads"]
    return {
        **keys,
        "hidden_act": act,
        "rotary_pct": 0.25,
        "rotary_emb_base": 10000,
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": True,
    }


LLAMA2 = {"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False}
FALCON3 = {"head_dim": 256, "rms_norm_eps": 1e-6, "rope_theta": 1000042.0, "tie_word_embeddings": False}
GEMMA = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "head_dim": 256}
GEMMA2 = {
    **GEMMA,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 256,
}
GEMMA3 = {
    **GEMMA,
    "rope_theta": 1e6,
    "rope_local_base_freq": 10000.0,
    "sliding_window": 512,
    "query_pre_attn_scalar": 256,
}
PHI3 = {"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": False}
OLMO = {"rope_theta": 10000.0, "clip_qkv": None}
OLMO2 = {"rms_norm_eps": 1e-6, "rope_theta": 500000, "tie_word_embeddings": False}
QWEN3_MOE = {
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "attention_bias": False,
}
MIXTRAL = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "tie_word_embeddings": False,
}


def _deepseek(
    *shape: int,
    width: int,
    experts: int,
    chosen: int,
    scale: float,
    mscale: float,
    base: float,
    factor: float = 40.0,
    shared: int = 1,
    dense: int = 1,
    queries: int | None = 1536,
    groups: tuple[int, int] = (1, 1),
    beta_fast: float = 32.0,
) -> dict[str, Any]:
    return {
        **_shape(*shape),
        "moe_intermediate_size": width,
        "n_routed_experts": experts,
        "num_experts_per_tok": chosen,
        "n_shared_experts": shared,
        "first_k_dense_replace": dense,
        "moe_layer_freq": 1,
        "n_group": groups[0],
        "topk_group": groups[1],
        "routed_scaling_factor": scale,
        "q_lora_rank": queries,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_theta": base,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "rope_scaling": {
            "type": "yarn",
            "factor": factor,
            "beta_fast": beta_fast,
            "beta_slow": 1.0,
            "mscale": mscale,
            "mscale_all_dim": mscale,
            "original_max_position_embeddings": 4096,
        },
    }


GPT_OSS = {
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "rope_theta": 150000,
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
}
V2 = {"scoring_func": "softmax", "norm_topk_prob": False}
V3 = {"scoring_func": "sigmoid", "norm_topk_prob": True, "topk_method": "noaux_tc"}
# The factors of its 48 pairs of columns change no shape.
PHI4_MINI = {
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0] * 48},
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
}

MODELS: dict[str, Row] = {
    "bloom-176b": _row(
        176_247_271_424,
        "bloom",
        {
            "n_embed": 14336,
            "hidden_size": 14336,
            "n_layer": 70,
            "n_head": 112,
            "vocab_size": 250880,
            "seq_length": 2048,
            "layer_norm_epsilon": 1e-5,
        },
    ),
    "deepseek-v2": _row(
        235_741_434_880,
        "deepseek_v2",
        _deepseek(
            5120,
            60,
            128,
            128,
            12288,
            102400,
            163840,
            width=1536,
            experts=160,
            chosen=6,
            shared=2,
            groups=(8, 3),
            scale=16.0,
            mscale=0.707,
            base=10000.0,
        ),
        topk_method="group_limited_greedy",
        **V2,
    ),
    "deepseek-v2-lite": _row(
        15_706_484_224,
        "deepseek_v2",
        _deepseek(
            2048,
            27,
            16,
            16,
            10944,
            102400,
            163840,
            width=1408,
            experts=64,
            chosen=6,
            shared=2,
            queries=None,
            scale=1.0,
            mscale=0.707,
            base=10000.0,
        ),
        topk_method="greedy",
        **V2,
    ),
    "deepseek-v3": _row(
        671_026_404_352,
        "deepseek_v3",
        _deepseek(
            7168,
            61,
            128,
            128,
            18432,
            129280,
            163840,
            width=2048,
            experts=256,
            chosen=8,
            dense=3,
            groups=(8, 4),
            scale=2.5,
            mscale=1.0,
            base=10000.0,
        ),
        num_nextn_predict_layers=1,
        **V3,
    ),
    "falcon-7b": _row(
        6_921_720_704,
        "falcon",
        {
            "hidden_size": 4544,
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "multi_query": True,
            "parallel_attn": True,
            "bias": False,
            "alibi": False,
            "new_decoder_architecture": False,
            "vocab_size": 65024,
            "layer_norm_epsilon": 1e-5,
        },
    ),
    "falcon-40b": _row(
        41_303_293_952,
        "falcon",
        {
            "hidden_size": 8192,
            "num_hidden_layers": 60,
            "num_attention_heads": 128,
            "num_kv_heads": 8,
            "new_decoder_architecture": True,
            "bias": False,
            "alibi": False,
            "vocab_size": 65024,
            "layer_norm_epsilon": 1e-5,
        },
    ),
    "falcon3-7b": _row(7_455_550_464, "llama", _shape(3072, 28, 12, 4, 23040, 131072, 32768), **FALCON3),
    "falcon3-10b": _row(10_305_653_760, "llama", _shape(3072, 40, 12, 4, 23040, 131072, 32768), **FALCON3),
    "gemma-2b": _row(2_506_172_416, "gemma", _shape(2048, 18, 8, 1, 16384, 256000, 8192), **GEMMA),
    "gemma-7b": _row(8_537_680_896, "gemma", _shape(3072, 28, 16, 16, 24576, 256000, 8192), **GEMMA),
    "gemma-2-2b": _row(2_614_341_888, "gemma2", _shape(2304, 26, 8, 4, 9216, 256000, 8192), **GEMMA2),
    "gemma-2-9b": _row(9_241_705_984, "gemma2", _shape(3584, 42, 16, 8, 14336, 256000, 8192), **GEMMA2),
    "gemma-2-27b": _row(
        27_227_128_320,
        "gemma2",
        {**_shape(4608, 46, 32, 16, 36864, 256000, 8192), **GEMMA2},
        head_dim=128,
        query_pre_attn_scalar=144,
    ),
    "gemma-3-270m": _row(268_098_176, "gemma3_text", _shape(640, 18, 4, 1, 2048, 262144, 32768), **GEMMA3),
    "gemma-3-1b": _row(999_885_952, "gemma3_text", _shape(1152, 26, 4, 1, 6912, 262144, 32768), **GEMMA3),
    "gpt-neox-20b": _row(20_554_567_680, "gpt_neox", _neox(6144, 44, 64, 50432, "gelu_fast")),
    "gpt2": _row(124_439_808, "gpt2", _gpt2(768, 12, 12)),
    "gpt2-medium": _row(354_823_168, "gpt2", _gpt2(1024, 24, 16)),
    "gpt2-large": _row(774_030_080, "gpt2", _gpt2(1280, 36, 20)),
    "gpt2-xl": _row(1_557_611_200, "gpt2", _gpt2(1600, 48, 25)),
    "gpt-oss-20b": _row(
        20_914_757_184, "gpt_oss", _shape(2880, 24, 64, 8, 2880, 201088, 131072), num_local_experts=32, **GPT_OSS
    ),
    "gpt-oss-120b": _row(
        116_829_156_672, "gpt_oss", _shape(2880, 36, 64, 8, 2880, 201088, 131072), num_local_experts=128, **GPT_OSS
    ),
    "llama-2-7b": _row(6_738_415_616, "llama", _shape(4096, 32, 32, 32, 11008, 32000, 4096), **LLAMA2),
    "llama-2-13b": _row(13_015_864_320, "llama", _shape(5120, 40, 40, 40, 13824, 32000, 4096), **LLAMA2),
    "llama-2-70b": _row(68_976_648_192, "llama", _shape(8192, 80, 64, 8, 28672, 32000, 4096), **LLAMA2),
    "llama-3-8b": _row(8_030_261_248, "llama", _llama3(4096, 32, 32, 14336)),
    "llama-3-70b": _row(70_553_706_496, "llama", _llama3(8192, 80, 64, 28672)),
    "llama-3.1-8b": _row(8_030_261_248, "llama", _llama3(4096, 32, 32, 14336, factor=8.0)),
    "llama-3.1-70b": _row(70_553_706_496, "llama", _llama3(8192, 80, 64, 28672, factor=8.0)),
    "llama-3.1-405b": _row(405_853_388_800, "llama", _llama3(16384, 126, 128, 53248, factor=8.0)),
    "llama-3.2-1b": _row(1_235_814_400, "llama", _llama3(2048, 16, 32, 8192, factor=32.0, tied=True)),
    "llama-3.2-3b": _row(3_212_749_824, "llama", _llama3(3072, 28, 24, 8192, factor=32.0, tied=True)),
    "mistral-7b-v0.1": _row(
        7_241_732_096, "mistral", _mistral(4096, 32, 32, 8, 14336, 32000, 32768, base=10000.0, window=4096)
    ),
    "mistral-7b-v0.2": _row(7_241_732_096, "mistral", _mistral(4096, 32, 32, 8, 14336, 32000, 32768, base=1e6)),
    "mistral-7b-v0.3": _row(7_248_023_552, "mistral", _mistral(4096, 32, 32, 8, 14336, 32768, 32768, base=1e6)),
    "mistral-nemo-12b": _row(
        12_247_782_400, "mistral", _mistral(5120, 40, 32, 8, 14336, 131072, 131072, base=1e6, head_dim=128)
    ),
    "mistral-small-24b": _row(
        23_572_403_200, "mistral", _mistral(5120, 40, 32, 8, 32768, 131072, 32768, base=1e8, head_dim=128)
    ),
    "mistral-large-123b": _row(
        122_610_069_504, "mistral", _mistral(12288, 88, 96, 8, 28672, 32768, 131072, base=1e6, head_dim=128)
    ),
    "kimi-k2": _row(
        1_026_408_209_408,
        "kimi_k2",
        _deepseek(
            7168,
            61,
            64,
            64,
            18432,
            163840,
            131072,
            width=2048,
            experts=384,
            chosen=8,
            scale=2.827,
            mscale=1.0,
            base=50000.0,
            factor=32.0,
            beta_fast=1.0,
        ),
        **V3,
    ),
    "mixtral-8x7b": _row(46_702_792_704, "mixtral", _shape(4096, 32, 32, 8, 14336, 32000, 32768), **MIXTRAL),
    "mixtral-8x22b": _row(140_620_634_112, "mixtral", _shape(6144, 56, 48, 8, 16384, 32000, 65536), **MIXTRAL),
    "olmoe-1b-7b": _row(
        6_919_161_856,
        "olmoe",
        _shape(2048, 16, 16, 16, 1024, 50304, 4096),
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=False,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        **OLMO,
    ),
    "olmo-1b": _row(
        1_176_764_416, "olmo", _shape(2048, 16, 16, 16, 8192, 50304, 2048), tie_word_embeddings=True, **OLMO
    ),
    "olmo-7b": _row(
        6_888_095_744, "olmo", _shape(4096, 32, 32, 32, 11008, 50304, 2048), tie_word_embeddings=False, **OLMO
    ),
    "olmo-2-1b": _row(1_484_916_736, "olmo2", _shape(2048, 16, 16, 16, 8192, 100352, 4096), **OLMO2),
    "olmo-2-7b": _row(7_298_617_344, "olmo2", _shape(4096, 32, 32, 32, 11008, 100352, 4096), **OLMO2),
    "olmo-2-13b": _row(13_716_198_400, "olmo2", _shape(5120, 40, 40, 40, 13824, 100352, 4096), **OLMO2),
    "olmo-2-32b": _row(32_234_279_936, "olmo2", _shape(5120, 64, 40, 8, 27648, 100352, 4096), **OLMO2),
    "phi-2": _row(
        2_779_683_840,
        "phi",
        {
            **_shape(2560, 32, 32, 32, 10240, 51200, 2048),
            "partial_rotary_factor": 0.4,
            "rope_theta": 10000.0,
            "layer_norm_eps": 1e-5,
            "hidden_act": "gelu_new",
        },
    ),
    "phi-3-mini": _row(3_821_079_552, "phi3", _shape(3072, 32, 32, 32, 8192, 32064, 4096), **PHI3),
    "phi-3-medium": _row(13_960_238_080, "phi3", _shape(5120, 40, 40, 10, 17920, 32064, 4096), **PHI3),
    "phi-4": _row(
        14_659_507_200,
        "phi3",
        {**PHI3, **_shape(5120, 40, 40, 10, 17920, 100352, 16384)},
        rope_theta=250000.0,
        sliding_window=None,
    ),
    "phi-4-mini": _row(3_836_021_760, "phi3", {**PHI3, **_shape(3072, 32, 24, 8, 8192, 200064, 131072), **PHI4_MINI}),
    "pythia-160m": _row(162_322_944, "gpt_neox", _neox(768, 12, 12, 50304)),
    "pythia-1.4b": _row(1_414_647_808, "gpt_neox", _neox(2048, 24, 16, 50304)),
    "pythia-6.9b": _row(6_857_302_016, "gpt_neox", _neox(4096, 32, 32, 50432)),
    "pythia-12b": _row(11_846_072_320, "gpt_neox", _neox(5120, 36, 40, 50688)),
    "qwen1.5-moe-a2.7b": _row(
        14_315_784_192,
        "qwen2_moe",
        _qwen2(2048, 24, 16, 16, 5632, 151936, 8192, eps=1e-6),
        num_experts=60,
        num_experts_per_tok=4,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        norm_topk_prob=False,
        decoder_sparse_step=1,
    ),
    "qwen3-30b-a3b": _row(
        30_532_122_624,
        "qwen3_moe",
        _shape(2048, 48, 32, 4, 6144, 151936, 40960),
        moe_intermediate_size=768,
        **QWEN3_MOE,
    ),
    "qwen3-235b-a22b": _row(
        235_093_634_560,
        "qwen3_moe",
        _shape(4096, 94, 64, 4, 12288, 151936, 40960),
        moe_intermediate_size=1536,
        **QWEN3_MOE,
    ),
    "qwen2.5-0.5b": _row(494_032_768, "qwen2", _qwen2(896, 24, 14, 2, 4864, 151936, 32768, eps=1e-6, tied=True)),
    "qwen2.5-1.5b": _row(1_543_714_304, "qwen2", _qwen2(1536, 28, 12, 2, 8960, 151936, 131072, eps=1e-6, tied=True)),
    "qwen2.5-3b": _row(3_085_938_688, "qwen2", _qwen2(2048, 36, 16, 2, 11008, 151936, 32768, eps=1e-6, tied=True)),
    "qwen2.5-7b": _row(7_615_616_512, "qwen2", _qwen2(3584, 28, 28, 4, 18944, 152064, 131072, eps=1e-6)),
    "qwen2.5-14b": _row(14_770_033_664, "qwen2", _qwen2(5120, 48, 40, 8, 13824, 152064, 131072, eps=1e-5)),
    "qwen2.5-32b": _row(32_763_876_352, "qwen2", _qwen2(5120, 64, 40, 8, 27648, 152064, 131072, eps=1e-5)),
    "qwen2.5-72b": _row(72_706_203_648, "qwen2", _qwen2(8192, 80, 64, 8, 29568, 152064, 131072, eps=1e-5)),
    "qwen3-0.6b": _row(596_049_920, "qwen3", _qwen3(1024, 28, 16, 3072, tied=True)),
    "qwen3-1.7b": _row(1_720_574_976, "qwen3", _qwen3(2048, 28, 16, 6144, tied=True)),
    "qwen3-4b": _row(4_022_468_096, "qwen3", _qwen3(2560, 36, 32, 9728, tied=True)),
    "qwen3-8b": _row(8_190_735_360, "qwen3", _qwen3(4096, 36, 32, 12288)),
    "qwen3-14b": _row(14_768_307_200, "qwen3", _qwen3(5120, 40, 40, 17408)),
    "qwen3-32b": _row(32_762_123_264, "qwen3", _qwen3(5120, 64, 64, 25600)),
    "smollm2-135m": _row(
        134_515_008,
        "llama",
        _shape(576, 30, 9, 3, 1536, 49152, 8192),
        rope_theta=100000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    ),
    "smollm2-1.7b": _row(
        1_711_376_384,
        "llama",
        _shape(2048, 24, 32, 32, 8192, 49152, 8192),
        rope_theta=130000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    ),
    "tinyllama-1.1b": _row(1_100_048_384, "llama", _shape(2048, 22, 32, 4, 5632, 32000, 2048), **LLAMA2),
}
