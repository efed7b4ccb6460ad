"""The flags of Megatron-LM that are a setting of a job one to one, for writing and for reading.

Names, types and defaults are those of megatron-core 0.19.2, megatron/training/arguments.py, held by
tests/interop/test_megatron_flags.py. Flags that say several settings, or a setting in other
words, are in megatron.py (writing) and from_megatron.py (reading).

By hand: training.weight_decay 0.1 is `--weight-decay 0.1`; without the flag Megatron takes 0.01.
"""

from __future__ import annotations

from dataclasses import dataclass

SOFTWARE = "Megatron-LM core 0.19"
ORDERS = {"tp-cp-dp-pp": (), "tp-cp-pp-dp": ("--use-tp-pp-dp-mapping",)}
POSITIONS = {"learned": "learned_absolute", "rotary": "rope", "none": "none"}
NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
ATTENTIONS = {"flash": "flash", "unfused": "unfused"}
LR_SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "wsd": "WSD"}
NARROW_FLAGS = {
    "fp8": ("--fp8-format", "hybrid"),
    "mxfp8": ("--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"),
    "nvfp4": ("--fp4-format", "e2m1", "--fp4-recipe", "nvfp4"),
}
"""Products of fewer than 16 bits, by training.dtype, beside --bf16."""
FSDP_STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}
ROPE_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192.0}
"""What --use-rope-scaling fixes (megatron/core/models/common/embeddings/rotary_pos_embedding)."""

Value = int | float | str


@dataclass(frozen=True, slots=True)
class MegatronFlag:
    """A flag with one value, and the setting that it is. default: Megatron's; None where it has
    none of its own, or where it follows from others. words: the setting's values in Megatron's
    words."""

    flag: str
    setting: str
    kind: type[int] | type[float] | type[str]
    default: Value | None = None
    words: dict[str, str] | None = None


LAYOUT_FLAGS = (
    MegatronFlag("--tensor-model-parallel-size", "parallel.tp", int, 1),
    MegatronFlag("--pipeline-model-parallel-size", "parallel.pp", int, 1),
    MegatronFlag("--context-parallel-size", "parallel.cp", int, 1),
    MegatronFlag("--decoder-first-pipeline-num-layers", "parallel.first_stage_layers", int),
    MegatronFlag("--decoder-last-pipeline-num-layers", "parallel.last_stage_layers", int),
)
BATCH_FLAGS = (
    MegatronFlag("--micro-batch-size", "training.micro_batch_size", int),
    MegatronFlag("--global-batch-size", "training.global_batch_size", int),
)
MODEL_FLAGS = (
    MegatronFlag("--num-layers", "model.layers", int),
    MegatronFlag("--hidden-size", "model.hidden", int),
    MegatronFlag("--ffn-hidden-size", "model.ffn", int),
    MegatronFlag("--num-attention-heads", "model.heads", int),
    MegatronFlag("--kv-channels", "model.head_dim", int),
    MegatronFlag("--seq-length", "model.seq_length", int),
    MegatronFlag("--max-position-embeddings", "model.max_positions", int),
    MegatronFlag("--vocab-size", "model.vocab", int),
    MegatronFlag("--make-vocab-size-divisible-by", "model.vocab_divisor", int, 128),
    MegatronFlag("--position-embedding-type", "model.position", str, "learned_absolute", POSITIONS),
    MegatronFlag("--normalization", "model.norm", str, "LayerNorm", NORMS),
    MegatronFlag("--norm-epsilon", "model.norm_epsilon", float, 1e-5),
    MegatronFlag("--attention-backend", "model.attention", str, "flash", ATTENTIONS),
    MegatronFlag("--hidden-dropout", "training.dropout", float, 0.1),
    MegatronFlag("--attention-dropout", "training.attention_dropout", float, 0.1),
)
TRAINING_FLAGS = (
    MegatronFlag("--train-iters", "training.steps", int),
    MegatronFlag("--seed", "training.seed", int, 1234),
    MegatronFlag("--lr", "training.learning_rate", float),
    MegatronFlag("--min-lr", "training.min_learning_rate", float, 0.0),
    MegatronFlag("--lr-warmup-iters", "training.warmup_steps", int, 0),
    MegatronFlag("--lr-decay-style", "training.lr_schedule", str, "linear", LR_SCHEDULES),
    MegatronFlag("--lr-decay-iters", "training.lr_decay_steps", int),
    MegatronFlag("--lr-wsd-decay-iters", "training.lr_wsd_decay_steps", int),
    MegatronFlag("--lr-wsd-decay-style", "training.lr_wsd_decay_style", str, "exponential"),
    MegatronFlag("--weight-decay", "training.weight_decay", float, 0.01),
    MegatronFlag("--adam-beta1", "training.beta1", float, 0.9),
    MegatronFlag("--adam-beta2", "training.beta2", float, 0.999),
    MegatronFlag("--adam-eps", "training.epsilon", float, 1e-8),
    MegatronFlag("--clip-grad", "training.clip_norm", float, 1.0),
    MegatronFlag("--init-method-std", "training.init_std", float, 0.02),
)
FP16_FLAGS = (
    MegatronFlag("--initial-loss-scale", "training.loss_scale", float, 2.0**32),
    MegatronFlag("--loss-scale-window", "training.loss_scale_window", int, 1000),
    MegatronFlag("--min-loss-scale", "training.min_loss_scale", float, 1.0),
)
PLAIN_FLAGS = LAYOUT_FLAGS + BATCH_FLAGS + MODEL_FLAGS + TRAINING_FLAGS + FP16_FLAGS
