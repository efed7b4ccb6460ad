"""What Megatron-LM can say of decoders that differ from GPT-2's and Llama's shapes, both ways.

Spelling: megatron-core 0.19.2, megatron/training/arguments.py. A window of w keys is
`--window-size w-1,0` there (keys to the left of the query, and to its right);
`--window-attn-skip-freq N` leaves every N-th layer without it, the last of each N. Names of the
same fields in TransformerConfig, which Megatron-Bridge sets, are told beside the flags.

By hand, a window of 128 in every second layer: `--window-size 127,0 --window-attn-skip-freq 2`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mpctl.errors import Issue
from mpctl.interop.command_line import Flags
from mpctl.interop.sayable import refused_model
from mpctl.interop.texts import Value
from mpctl.spec.model import ModelSpec, is_set

SWITCHES = ("--squared-relu", "--qk-layernorm", "--add-qkv-bias")
VALUES = ("--window-size", "--window-attn-skip-freq", "--mtp-num-layers", "--rotary-percent")
UNSAYABLE = (
    "embedding_norm", "embedding_multiplier", "parallel_residual", "shared_norm",
    "rotary_scaling_type", "window_rotary_base", "attention_scale", "attention_softcap",
    "logit_softcap", "head_bias",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Variant:
    """A way in which a model differs: its flag with the flag's value, empty of a switch, and its
    field of TransformerConfig with the field's value."""

    flag: str
    text: str
    field: str
    value: Value


def variants(model: ModelSpec) -> Iterator[Variant]:
    """What is said of a model beside the settings that are a flag one to one."""
    if model.qk_norm:
        yield Variant("--qk-layernorm", "", "qk_layernorm", True)
    if model.bias == "qkv":
        yield Variant("--add-qkv-bias", "", "add_qkv_bias", True)
    if model.mtp_layers:
        yield Variant("--mtp-num-layers", str(model.mtp_layers), "mtp_num_layers", model.mtp_layers)
    if model.position == "rotary" and model.rotary_fraction != 1:
        part = model.rotary_fraction
        yield Variant("--rotary-percent", str(part), "rotary_percent", part)
    if model.attention_window is not None:
        left = model.attention_window - 1
        yield Variant("--window-size", f"{left},0", "window_size", [left, 0])
        every = model.full_attention_every or model.attention_window_every or 1
        if every > 1:
            name = "window_attn_skip_freq"
            yield Variant("--window-attn-skip-freq", str(every), name, every)


def variant_refusals(model: ModelSpec, who: str) -> Iterator[Issue]:
    """What of a model Megatron-Core cannot be told; who: the launcher, for messages."""
    for key in UNSAYABLE:
        if is_set(model, key):
            message = f"{who} has no setting that does the same"
            yield refused_model(key, getattr(model, key), message, "--emit torch for the layout")
    every = model.attention_window_every
    if every is not None and every > 2:
        message = f"{who} leaves out every so manieth layer, and cannot pick one of {every}"
        yield refused_model("attention_window_every", every, message, "use full_attention_every")
    if model.position == "alibi":
        message = f"{who} has learned_absolute, rope and none"
        yield refused_model("position", "alibi", message, "use learned or rotary")
    if model.norm == "nonparametric":
        message = f"{who}'s norms have weights"
        yield refused_model("norm", model.norm, message, "use layernorm or rmsnorm")
    if model.qk_norm == "width":
        yield refused_model("qk_norm", "width", f"{who} norms each head", "use qk_norm true")
    if model.bias in ("attention", "mlp"):
        message = f"{who} has biases in all linear layers, in q, k and v, or in none"
        yield refused_model("bias", model.bias, message, "use true, qkv or false")


def read_variants(flags: Flags, wrong: Callable[[str, str, str], None]) -> dict[str, object]:
    """The settings of the flags above, by full name; wrong: is told flag, message and hint."""
    found: dict[str, object] = {}
    if "--squared-relu" in flags:
        found["model.activation"] = "relu2"
    if "--qk-layernorm" in flags:
        found["model.qk_norm"] = True
    if "--add-qkv-bias" in flags and "--disable-bias-linear" in flags:
        found["model.bias"] = "qkv"
    for flag, setting, kind in (
        ("--mtp-num-layers", "model.mtp_layers", int),
        ("--window-attn-skip-freq", "model.full_attention_every", int),
        ("--rotary-percent", "model.rotary_fraction", float),
    ):
        if flag in flags:
            try:
                found[setting] = kind(flags[flag][0])
            except ValueError:
                wrong(flag, f"{flags[flag][0]!r} is no number", "give one number")
    if "--window-size" in flags:
        found |= _read_window(flags["--window-size"][0], wrong)
    return found


def _read_window(text: str, wrong: Callable[[str, str, str], None]) -> dict[str, object]:
    """`127,0` and `(127,0)` are a window of 128; -1 to the left is none."""
    left, _, right = text.strip("()").replace(" ", "").partition(",")
    if not left.lstrip("-").isdecimal() or right != "0":
        hint = "give keys to the left and 0: 127,0 is a window of 128"
        wrong("--window-size", f"{text!r} is no window that a job can say", hint)
        return {}
    return {"model.attention_window": int(left) + 1} if int(left) >= 0 else {}
