"""Jobs of many layouts and their plans, for the output of every launcher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpctl.plan.planning.plan import Plan, load_plan
from mpctl.spec.yarn import YarnScales

Settings = Mapping[str, Any]
# Llama-3-70B's shape at 64 ranks: the layout that every launcher's documents can be asked for.
LLAMA: Settings = {
    "model": "llama-3-70b",
    "model.rotary_base": 500000.0,
    "cluster.nodes": 8,
    "cluster.gpus_per_node": 8,
    "training.dtype": "bf16",
    "training.global_batch_size": 128,
}
EXAMPLE: Settings = {
    **LLAMA,
    "parallel.tp": 4,
    "parallel.cp": 2,
    "parallel.pp": 4,
    "parallel.vpp": 5,
    "parallel.sequence_parallel": True,
    "parallel.zero": 1,
    "training.recompute": "selective",
}
SMALL: Settings = {
    "model.layers": 12,
    "model.hidden": 64,
    "model.heads": 8,
    "model.vocab": 1000,
    "model.seq_length": 64,
    "cluster.nodes": 2,
    "cluster.gpus_per_node": 8,
    "training.global_batch_size": 64,
}
GRID: Settings = {"parallel.tp": 4, "parallel.tensor_mode": "2d", "training.micro_batch_size": 2}
MIXTURE: Settings = {
    "model.position": "rotary",
    "model.norm": "rmsnorm",
    "model.activation": "swiglu",
    "model.bias": False,
    "model.tied_embeddings": False,
    "model.experts": 8,
    "model.experts_per_token": 2,
    "model.expert_ffn": 96,
}
LATENT: Settings = {
    "model.position": "rotary",
    "model.norm": "rmsnorm",
    "model.activation": "swiglu",
    "model.bias": False,
    "model.attention_kind": "mla",
    "model.kv_lora_rank": 32,
    "model.qk_nope_head_dim": 16,
    "model.qk_rope_head_dim": 8,
    "model.v_head_dim": 16,
}
# Scores of 24 columns: (0.1 x 0.707 x ln 40 + 1)^2 / sqrt(24).
YARN: Settings = {
    "model.yarn_scaling": {"factor": 40.0, "original_max_position": 4096.0, "attention_factor": 1.0},
    "model.attention_scale": YarnScales(40.0, 0.707, 0.707).attention_scale(24),
}
# What is laid over SMALL: sizes, orders, cuts, precision, recomputation, shapes.
LAYOUTS: dict[str, Settings] = {
    "one axis": {},
    "tp dp": {"parallel.tp": 4, "training.dtype": "bf16"},
    "all axes": {"parallel.tp": 2, "parallel.cp": 2, "parallel.pp": 2, "parallel.zero": 1},
    "other order": {"parallel.tp": 2, "parallel.pp": 4, "parallel.order": "tp-cp-pp-dp"},
    "chunks": {"parallel.tp": 2, "parallel.pp": 4, "parallel.vpp": 3},
    "ends": {"parallel.pp": 4, "parallel.first_stage_layers": 2, "parallel.last_stage_layers": 4},
    "first": {"parallel.pp": 4, "parallel.first_stage_layers": 3},
    "ends as layers": {
        "model.layers": 14,
        "parallel.pp": 4,
        "parallel.embedding_is_layer": True,
        "parallel.loss_is_layer": True,
    },
    "by cost": {"parallel.pp": 4, "parallel.stage_balance": "cost", "model.vocab": 4000},
    "by cost in chunks": {"parallel.pp": 4, "parallel.vpp": 2, "parallel.stage_balance": "cost"},
    "sequence": {"parallel.tp": 8, "parallel.sequence_parallel": True},
    "zero 2": {"parallel.tp": 2, "parallel.zero": 2},
    "zero 3": {"parallel.zero": 3, "parallel.overlap_gradients": False},
    "hybrid": {"parallel.tp": 2, "parallel.zero": 1, "parallel.zero_size": 4},
    "hybrid 3": {"parallel.cp": 2, "parallel.zero": 3, "parallel.zero_size": 4},
    "fp16": {"training.dtype": "fp16", "training.loss_scale": 4096.0},
    "bf16 gradients": {"training.dtype": "bf16", "training.gradient_dtype": "bf16"},
    "fp8": {"training.dtype": "fp8", "parallel.tp": 2},
    "mxfp8": {"training.dtype": "mxfp8", "parallel.tp": 2},
    "nvfp4": {"training.dtype": "nvfp4"},
    "full": {"training.recompute": "full", "parallel.tp": 2, "training.partition_activations": True},
    "selective": {"training.recompute": "selective", "training.micro_batch_size": 2},
    "windows": {
        "model.position": "rotary",
        "model.rotary_fraction": 0.5,
        "model.activation": "relu2",
        "model.bias": "qkv",
        "model.qk_norm": True,
        "model.attention_window": 16,
        "model.full_attention_every": 3,
        "model.mtp_layers": 1,
        "parallel.tp": 2,
    },
    "llama": {
        "model.position": "rotary",
        "model.norm": "rmsnorm",
        "model.activation": "swiglu",
        "model.bias": False,
        "model.tied_embeddings": False,
        "model.kv_heads": 4,
        "model.ffn": 192,
        "model.rotary_base": 500000.0,
        "parallel.tp": 2,
        "model.rotary_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position": 8192.0,
        },
    },
    "shape": {
        "model.head_dim": 16,
        "model.activation": "gelu_tanh",
        "model.position": "none",
        "model.attention": "unfused",
        "model.vocab_divisor": 64,
        "training.dropout": 0.2,
        "training.attention_dropout": 0.1,
    },
    "experts": {**MIXTURE, "parallel.ep": 4, "training.dtype": "bf16"},
    "experts before softmax": {
        **MIXTURE,
        "model.experts_per_token": 1,
        "model.router_renormalize": False,
        "model.moe_layer_every": 2,
        "training.moe_load_balancing": "micro_batch",
        "training.moe_z_loss_coeff": 1e-3,
        "model.bias": "qkv",
    },
    "experts of parts": {
        **MIXTURE,
        "parallel.tp": 2,
        "parallel.sequence_parallel": True,
        "parallel.ep": 2,
        "parallel.etp": 2,
        "parallel.zero": 1,
        "model.shared_expert_ffn": 128,
        "model.shared_expert_gate": True,
        "training.moe_load_balancing": "global",
        "training.moe_aux_loss_coeff": 1e-4,
        "model.router_groups": 4,
        "model.router_groups_per_token": 2,
    },
    "experts of another order": {
        **MIXTURE,
        "parallel.tp": 2,
        "parallel.sequence_parallel": True,
        "parallel.pp": 2,
        "parallel.ep": 2,
        "parallel.order": "tp-cp-pp-dp",
    },
    "latents": {**LATENT, "parallel.tp": 2, "parallel.cp": 2},
    "latents by yarn": {**LATENT, **YARN},
    "latents and experts": {
        **MIXTURE,
        **LATENT,
        "model.q_lora_rank": 48,
        "model.experts": 16,
        "model.experts_per_token": 4,
        "model.shared_expert_ffn": 96,
        "model.dense_layers": 1,
        "model.router_score": "sigmoid",
        "model.router_bias": True,
        "model.router_groups": 4,
        "model.router_groups_per_token": 2,
        "model.router_scale": 2.5,
        "model.mtp_layers": 1,
        "training.moe_bias_update_rate": 5e-4,
        "training.moe_load_balancing": "none",
        "parallel.tp": 2,
        "parallel.sequence_parallel": True,
        "parallel.pp": 2,
        "parallel.ep": 8,
        "parallel.zero": 1,
        "training.dtype": "bf16",
        "training.recompute": "full",
    },
    "optimizer": {
        "training.lr_schedule": "wsd",
        "training.lr_wsd_decay_steps": 20,
        "training.steps": 500,
        "training.learning_rate": 1e-4,
        "training.min_learning_rate": 0.0,
        "training.beta2": 0.99,
        "training.weight_decay": 0.05,
        "training.seed": 7,
        "training.clip_norm": 0.5,
        "training.lr_wsd_decay_style": "linear",
    },
}


def plan_of(settings: Settings, *, base: Settings = SMALL) -> Plan:
    return load_plan(None, {**base, **settings})
