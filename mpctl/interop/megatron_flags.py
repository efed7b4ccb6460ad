"""The settings that are a flag of Megatron-LM one to one, and its flags for variants of decoders.

Names, types and defaults are those of megatron-core 0.19.2, megatron/training/arguments.py, checked
by tests/interop/test_megatron_flags.py: training.weight_decay 0.1 is `--weight-decay 0.1`, and
without the flag Megatron takes 0.01. Flags that combine several settings, or express one
differently, are in megatron.py (writing) and from_megatron.py (reading).

Variants are features of decoders beyond GPT-2's and Llama's shapes. A window of w keys is
`--window-size w-1,0` there (keys to the left of the query, and to its right);
`--window-attn-skip-freq N` leaves every N-th layer without it, the last of each N: a window of 128
in every second layer is `--window-size 127,0 --window-attn-skip-freq 2`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mpctl.interop.config_text import Flags, Value
from mpctl.interop.mapping import ForeignKey
from mpctl.spec.model import ModelSpec

SOFTWARE = "Megatron-LM core 0.19"
ORDERS = {"tp-cp-dp-pp": (), "tp-cp-pp-dp": ("--use-tp-pp-dp-mapping",)}
POSITIONS = {"learned": "learned_absolute", "rotary": "rope", "none": "none"}
NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
ATTENTIONS = {"flash": "flash", "unfused": "unfused"}
NEAREST = {"auto": "flash", "fused": "flash"}
LR_SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "wsd": "WSD"}
NARROW_FLAGS = {
    "fp8": ("--fp8-format", "hybrid"),
    "mxfp8": ("--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"),
    "nvfp4": ("--fp4-format", "e2m1", "--fp4-recipe", "nvfp4"),
}
"""Products of fewer than 16 bits, by training.dtype, in addition to --bf16."""
FSDP_STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}
ROPE_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192.0}
"""The values that --use-rope-scaling sets
(megatron/core/models/common/embeddings/rotary_pos_embedding)."""

LAYOUT_FLAGS = (
    ForeignKey("--tensor-model-parallel-size", "parallel.tp", int, 1),
    ForeignKey("--pipeline-model-parallel-size", "parallel.pp", int, 1),
    ForeignKey("--context-parallel-size", "parallel.cp", int, 1),
    ForeignKey("--decoder-first-pipeline-num-layers", "parallel.first_stage_layers", int),
    ForeignKey("--decoder-last-pipeline-num-layers", "parallel.last_stage_layers", int),
)
BATCH_FLAGS = (
    ForeignKey("--micro-batch-size", "training.micro_batch_size", int),
    ForeignKey("--global-batch-size", "training.global_batch_size", int),
)
MODEL_FLAGS = (
    ForeignKey("--num-layers", "model.layers", int),
    ForeignKey("--hidden-size", "model.hidden", int),
    ForeignKey("--ffn-hidden-size", "model.ffn", int),
    ForeignKey("--num-attention-heads", "model.heads", int),
    ForeignKey("--kv-channels", "model.head_dim", int),
    ForeignKey("--seq-length", "model.seq_length", int),
    ForeignKey("--max-position-embeddings", "model.max_positions", int),
    ForeignKey("--vocab-size", "model.vocab", int),
    ForeignKey("--make-vocab-size-divisible-by", "model.vocab_divisor", int, 128),
    ForeignKey("--position-embedding-type", "model.position", str, "learned_absolute", POSITIONS),
    ForeignKey("--normalization", "model.norm", str, "LayerNorm", NORMS),
    ForeignKey("--norm-epsilon", "model.norm_epsilon", float, 1e-5),
    ForeignKey("--attention-backend", "model.attention", str, "flash", ATTENTIONS, NEAREST),
    ForeignKey("--hidden-dropout", "training.dropout", float, 0.1),
    ForeignKey("--attention-dropout", "training.attention_dropout", float, 0.1),
)
TRAINING_FLAGS = (
    ForeignKey("--train-iters", "training.steps", int),
    ForeignKey("--seed", "training.seed", int, 1234),
    ForeignKey("--lr", "training.learning_rate", float),
    ForeignKey("--min-lr", "training.min_learning_rate", float, 0.0),
    ForeignKey("--lr-warmup-iters", "training.warmup_steps", int, 0),
    ForeignKey("--lr-decay-style", "training.lr_schedule", str, "linear", LR_SCHEDULES),
    ForeignKey("--lr-decay-iters", "training.lr_decay_steps", int),
    ForeignKey("--lr-wsd-decay-iters", "training.lr_wsd_decay_steps", int),
    ForeignKey("--lr-wsd-decay-style", "training.lr_wsd_decay_style", str, "exponential"),
    ForeignKey("--weight-decay", "training.weight_decay", float, 0.01),
    ForeignKey("--adam-beta1", "training.beta1", float, 0.9),
    ForeignKey("--adam-beta2", "training.beta2", float, 0.999),
    ForeignKey("--adam-eps", "training.epsilon", float, 1e-8),
    ForeignKey("--clip-grad", "training.clip_norm", float, 1.0),
    ForeignKey("--init-method-std", "training.init_std", float, 0.02),
)
FP16_FLAGS = (
    ForeignKey("--initial-loss-scale", "training.loss_scale", float, 2.0**32),
    ForeignKey("--loss-scale-window", "training.loss_scale_window", int, 1000),
    ForeignKey("--min-loss-scale", "training.min_loss_scale", float, 1.0),
)
SWITCHES = {
    "--overlap-grad-reduce": "parallel.overlap_gradients",
    "--account-for-embedding-in-pipeline-split": "parallel.embedding_is_layer",
    "--account-for-loss-in-pipeline-split": "parallel.loss_is_layer",
    "--distribute-saved-activations": "training.partition_activations",
}
"""Flags without a value, each with the setting that it turns on."""
PLAIN_FLAGS = LAYOUT_FLAGS + BATCH_FLAGS + MODEL_FLAGS + TRAINING_FLAGS + FP16_FLAGS


WITHOUT_FLAG = (
    "embedding_norm",
    "embedding_multiplier",
    "parallel_residual",
    "shared_norm",
    "yarn_scaling",
    "rotary_scaling_type",
    "window_rotary_base",
    "attention_scale",
    "attention_softcap",
    "logit_softcap",
    "head_bias",
)
VARIANT_FLAGS = (
    ForeignKey("--mtp-num-layers", "model.mtp_layers", int),
    ForeignKey("--window-attn-skip-freq", "model.full_attention_every", int),
    ForeignKey("--rotary-percent", "model.rotary_fraction", float),
)


def variants(model: ModelSpec) -> Iterator[tuple[str, Value]]:
    """Flags of a model in addition to those that are one setting each, with their values; True for
    a switch."""
    if model.qk_norm:
        yield "--qk-layernorm", True
    if model.bias == "qkv":
        yield "--add-qkv-bias", True
    if model.mtp_layers:
        yield "--mtp-num-layers", model.mtp_layers
    if model.position == "rotary" and model.rotary_fraction != 1:
        yield "--rotary-percent", model.rotary_fraction
    if model.attention_window is not None:
        yield "--window-size", [model.attention_window - 1, 0]
        every = model.full_attention_every or model.attention_window_every or 1
        if every > 1:
            yield "--window-attn-skip-freq", every


def read_variants(flags: Flags, wrong: Callable[[str, str, str], None]) -> dict[str, object]:
    """The settings of these flags, by full name. wrong: called with flag, message and hint for an
    invalid value."""
    found: dict[str, object] = {}
    if "--squared-relu" in flags:
        found["model.activation"] = "relu2"
    if "--qk-layernorm" in flags:
        found["model.qk_norm"] = True
    if "--add-qkv-bias" in flags and "--disable-bias-linear" in flags:
        found["model.bias"] = "qkv"
    for row in VARIANT_FLAGS:
        if row.key in flags:
            try:
                found[row.setting] = row.kind(flags[row.key][0])
            except ValueError:
                wrong(row.key, f"{flags[row.key][0]!r} is no number", "give one number")
    if "--window-size" in flags:  # `(127,0)` is a window of 128, too; -1 to the left is no window
        text = flags["--window-size"][0]
        left, _, right = text.strip("()").replace(" ", "").partition(",")
        if not left.lstrip("-").isdecimal() or right != "0":
            hint = "give keys to the left and 0: 127,0 is a window of 128"
            wrong("--window-size", f"{text!r} is no window that a job can say", hint)
        elif int(left) >= 0:
            found["model.attention_window"] = int(left) + 1
    return found
