"""Megatron-Bridge's adapters: LoRA, CanonicalLoRA and DoRA of megatron.bridge.peft, written and read.

Spelling and meanings: megatron-bridge main of 2026-08, peft/lora.py, canonical_lora.py and dora.py. LoRA and
DoRA adapt fused modules, queries, keys and values by one A; CanonicalLoRA has one adapter for each, as
PEFT and a job's all-linear have. Scale is alpha / dim, alpha an integer; dropout is before A (`pre`). The
experts of a rank share one adapter, where a job has one for each.

By hand, targets q_proj and v_proj of rank 16:

>>> peft_class("lora", ["q_proj", "v_proj"])
('CanonicalLoRA', ['linear_q', 'linear_v'])
>>> peft_class("lora", ["linear_qkv"])
('LoRA', ['linear_qkv'])
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from mpctl.core.errors import Issue
from mpctl.interop.config_text import Value, python_call
from mpctl.interop.limits import refused
from mpctl.interop.mapping import KeyReader
from mpctl.interop.peft_keys import ADAPTER, ALL, alpha_of
from mpctl.spec.job import JobSpec

SPLIT = {
    "q_proj": "linear_q",
    "k_proj": "linear_k",
    "v_proj": "linear_v",
    "gate_proj": "linear_fc1_gate",
    "up_proj": "linear_fc1_up",
}
FUSED = {
    **dict.fromkeys(("linear_qkv", "c_attn", "qkv_proj", "query_key_value", "Wqkv"), "linear_qkv"),
    **dict.fromkeys(("linear_fc1", "c_fc", "fc1", "dense_h_to_4h", "gate_up_proj"), "linear_fc1"),
}
WHOLE = {
    **dict.fromkeys(("o_proj", "out_proj", "dense", "linear_proj"), "linear_proj"),
    **dict.fromkeys(("down_proj", "fc2", "dense_4h_to_h", "linear_fc2"), "linear_fc2"),
}
GROUPS = {"attention": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
MODULES = {"LoRA": "lora", "CanonicalLoRA": "canonical_lora", "DoRA": "dora"}
DEFAULTS = {"LoRA": 32, "CanonicalLoRA": 32, "DoRA": 64}
"""alpha of a class, with dim 32."""


def peft_class(kind: str, targets: Iterable[str]) -> tuple[str, list[str]] | None:
    """The class of a kind of adapter with its target_modules; None where none has them all."""
    groups = {**GROUPS, ALL: (*GROUPS["attention"], *GROUPS["mlp"])}
    names = [name for target in targets for name in groups.get(target, (target,))]
    for word, words in (("CanonicalLoRA", {**SPLIT, **WHOLE}), ("LoRA", {**FUSED, **WHOLE})):
        if all(name in words for name in names) and not (word == "CanonicalLoRA" and kind == "dora"):
            is_fused = word == "CanonicalLoRA" and not any(name in SPLIT for name in names)
            found = "DoRA" if kind == "dora" else "LoRA" if is_fused else word
            return found, list(dict.fromkeys(words[name] for name in names))
    return None


def bridge_adapter_refusals(job: JobSpec) -> Iterator[Issue]:
    """Issues of adapters that Megatron-Bridge has no words for."""
    adapter, who = job.training.adapter, "Megatron-Bridge"
    if adapter is None or job.model is None:
        return
    where = "training.adapter."
    if adapter.rslora:
        yield refused(f"{where}rslora", "true", f"{who} multiplies by alpha / dim", "use rslora false, with its alpha")
    if adapter.alpha is not None and not float(adapter.alpha).is_integer():
        yield refused(f"{where}alpha", adapter.alpha, f"{who} takes an integer", f"use {round(adapter.alpha)}")
    if adapter.dtype not in (None, job.training.dtype):
        yield refused(f"{where}dtype", adapter.dtype, f"{who} trains A and B in the data type", "leave it out")
    if adapter.modules_to_save:
        saved = ", ".join(adapter.modules_to_save)
        yield refused(f"{where}modules_to_save", saved, f"{who} freezes all but adapters", "leave it out")
    found, targets = peft_class(adapter.kind, adapter.targets), ", ".join(adapter.targets)
    fused = "use linear_qkv, linear_proj, linear_fc1 and linear_fc2"
    if found is None:
        message = f"{who}'s {'DoRA has' if adapter.kind == 'dora' else 'classes have'} fused modules or all apart"
        yield refused(f"{where}targets", targets, message, fused)
    elif job.model.is_mla:
        yield refused(f"{where}targets", targets, "latent attention has other modules there", "use --emit trl")
    elif "linear_fc1_gate" in found[1] and not job.model.gated:
        yield refused(f"{where}targets", targets, "this model's mlp has no gate", fused)
    elif job.has_experts and any("fc" in name for name in found[1]):
        message = "the experts of a rank share one adapter there"
        yield refused(f"{where}targets", targets, message, "use targets attention, or --emit trl")


def peft_lines(job: JobSpec) -> tuple[str, list[str]]:
    """The import and the lines of cfg.peft; empty where the job has no adapter."""
    adapter = job.training.adapter
    found = peft_class(adapter.kind, adapter.targets) if adapter else None
    if adapter is None or found is None:
        return "", []
    name, targets = found
    values: Mapping[str, Value] = {
        "target_modules": targets,
        "dim": adapter.rank,
        "alpha": alpha_of(job),
        "dropout": adapter.dropout,
        "dropout_position": "pre",
    }
    text = python_call(name, values, "    ")
    return f"from megatron.bridge.peft.{MODULES[name]} import {name}", [f"    cfg.peft = {text}"]


def read_bridge_adapter(reader: KeyReader, name: str, prefix: str) -> None:
    """Set the adapter of a class with its arguments by keys with a prefix."""
    s = reader.settings
    s[f"{ADAPTER}kind"] = "dora" if name == "DoRA" else "lora"
    s[f"{ADAPTER}rank"] = int(reader.number(f"{prefix}dim", int, 32))
    s[f"{ADAPTER}alpha"] = int(reader.number(f"{prefix}alpha", int, DEFAULTS.get(name, 32)))
    s[f"{ADAPTER}dropout"] = float(reader.number(f"{prefix}dropout", float, 0.0))
    if reader.value(f"{prefix}dropout_position", "pre") != "pre" and s[f"{ADAPTER}dropout"]:
        reader.nearest(f"{prefix}dropout_position", "post: planned before A, of the same time and more memory")
    theirs = {word: ours for ours, word in SPLIT.items()} | {"linear_proj": "o_proj", "linear_fc2": "down_proj"}
    words = reader.flags.get(f"{prefix}target_modules")
    fused = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    targets = words or (tuple(theirs) if name == "CanonicalLoRA" else fused)
    s[f"{ADAPTER}targets"] = [theirs.get(word, word) for word in targets]
    if name not in DEFAULTS:
        reader.wrong("peft", f"{name!r} is not planned", f"use {', '.join(DEFAULTS)}")
