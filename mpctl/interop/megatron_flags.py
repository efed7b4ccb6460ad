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

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from mpctl.interop.command_line import Flags
from mpctl.interop.emitted import Value
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec

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
"""Products of fewer than 16 bits, by training.dtype, in addition to --bf16."""
FSDP_STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}
ROPE_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192.0}
"""The values that --use-rope-scaling sets
(megatron/core/models/common/embeddings/rotary_pos_embedding)."""

Default = int | float | str


@dataclass(frozen=True, slots=True)
class MegatronFlag:
    """A flag with one value, and its setting. default: Megatron's; None where there is none, or
    where it depends on others. words: the setting's values in Megatron's words."""

    flag: str
    setting: str
    kind: type[int] | type[float] | type[str]
    default: Default | None = None
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
SWITCHES = {
    "--overlap-grad-reduce": "parallel.overlap_gradients",
    "--account-for-embedding-in-pipeline-split": "parallel.embedding_is_layer",
    "--account-for-loss-in-pipeline-split": "parallel.loss_is_layer",
    "--distribute-saved-activations": "training.partition_activations",
}
"""Flags without a value, each with the setting that it turns on."""
PLAIN_FLAGS = LAYOUT_FLAGS + BATCH_FLAGS + MODEL_FLAGS + TRAINING_FLAGS + FP16_FLAGS


def plain_values(job: JobSpec, flags: Iterable[MegatronFlag]) -> Iterator[tuple[str, Value]]:
    """The flags of settings that are one flag each, with their values in Megatron's words; a
    setting that is None is left out."""
    for flag in flags:
        table, key = flag.setting.split(".")
        value = getattr(getattr(job, table), key)
        if value is not None:
            yield flag.flag, value if flag.words is None else flag.words[value]


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
    MegatronFlag("--mtp-num-layers", "model.mtp_layers", int),
    MegatronFlag("--window-attn-skip-freq", "model.full_attention_every", int),
    MegatronFlag("--rotary-percent", "model.rotary_fraction", float),
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
        if row.flag in flags:
            try:
                found[row.setting] = row.kind(flags[row.flag][0])
            except ValueError:
                wrong(row.flag, f"{flags[row.flag][0]!r} is no number", "give one number")
    if "--window-size" in flags:  # `(127,0)` is a window of 128, too; -1 to the left is no window
        text = flags["--window-size"][0]
        left, _, right = text.strip("()").replace(" ", "").partition(",")
        if not left.lstrip("-").isdecimal() or right != "0":
            hint = "give keys to the left and 0: 127,0 is a window of 128"
            wrong("--window-size", f"{text!r} is no window that a job can say", hint)
        elif int(left) >= 0:
            found["model.attention_window"] = int(left) + 1
    return found
