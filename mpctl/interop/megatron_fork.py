"""The flags of sail-sg's zero-bubble fork of Megatron-LM that a job can say; they are only read.

Their meaning is that of megatron/core/zbpp_utils.py at commit 39f2c186 (core 0.9). With
`--allow-padding-num-layers` the fork counts layers up to a multiple of pp, of which the last virtual
stage has one fewer, then the first, then the second. Weight gradients are put off in local layers
alone; the legacy ones of these have flash attention.

By hand, `--zero-bubble-v-schedule --zero-bubble-v-schedule-mem-setup half` is schedule v-half with
vpp 2; 30 layers on 8 stages with padding are 32, of which the last and the first are not there.
"""

from __future__ import annotations

from mpctl.interop.mapping import KeyReader

ENABLE, PENDING = "--enable-zero-bubble", "--zero-bubble-max-pending-backward"
V, SETUP, PADDING = "--zero-bubble-v-schedule", "--zero-bubble-v-schedule-mem-setup", "--allow-padding-num-layers"
LEGACY, FLASH = "--use-legacy-models", "--use-flash-attn"
V_SCHEDULES = {"zb": "zbv", "half": "v-half", "min": "v-min"}
READ = frozenset((ENABLE, PENDING, V, SETUP, PADDING, LEGACY))


def read_fork(reader: KeyReader) -> None:
    """Set the schedule and the layers of the ends; the number of chunks is set with other pipelines'."""
    s = reader.settings
    if reader.has(V):
        setup = reader.value(SETUP, "zb")
        if setup not in V_SCHEDULES:
            reader.wrong(SETUP, f"{setup!r} is not known", f"use {', '.join(V_SCHEDULES)}")
        s["parallel.schedule"] = V_SCHEDULES.get(setup, "zbv")
    elif reader.has(ENABLE):
        s["parallel.schedule"] = "zero-bubble"
        pending, pp = reader.value(PENDING, "auto"), s.get("parallel.pp")
        if pending != str(pp):
            message = f"{pending} pending backwards are planned as pp, {pp}: the fork's ZB1P"
            reader.nearest(PENDING, message, f"{PENDING} {pp} asks for it; {V} has no bubble at this memory")
    for flag, needed in ((SETUP, V), (PENDING, ENABLE)):
        if reader.has(flag) and not reader.has(needed) and not reader.has(V):
            reader.nearest(
                flag, f"{reader.value(flag)}: says nothing without {needed}", f"add {needed}, or leave it out"
            )
    is_split = reader.has(V) or reader.has(ENABLE)
    if is_split and reader.value("--transformer-impl", "transformer_engine") != "local":
        message = "with Transformer Engine the fork does not put weight gradients off, and the plan does"
        reader.nearest("--transformer-impl", message, "use --transformer-impl local, or leave the fork's schedule out")
    if reader.has(PADDING):
        _read_padding(reader)


def _read_padding(reader: KeyReader) -> None:
    s = reader.settings
    layers, pp = s.get("model.layers"), s.get("parallel.pp")
    if not isinstance(layers, int) or not isinstance(pp, int) or pp < 1:
        return
    missing = -layers % pp
    if missing > 2:
        message = f"{layers} layers are {missing} fewer than a multiple of pp {pp}: the fork takes them from the last "
        message += "and from the first stages, which no setting of a job says"
        reader.wrong(PADDING, message, f"use {layers + missing - 2} to {layers + missing} layers")
        return
    s["parallel.loss_is_layer"], s["parallel.embedding_is_layer"] = missing > 0, missing > 1


def has_flash(reader: KeyReader) -> bool:
    """Whether the layers are the legacy ones with their own flash attention."""
    return reader.has(LEGACY) and reader.has(FLASH)
