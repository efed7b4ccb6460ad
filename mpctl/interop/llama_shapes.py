"""Decoders of Llama's form: RMSNorm, rotary positions, SwiGLU, no biases. Several launchers have
models of this form alone."""

from __future__ import annotations

from collections.abc import Iterator

from mpctl.errors import Issue
from mpctl.interop.sayable import refused_model
from mpctl.spec.model import VARIANTS, ModelSpec, is_set

FORM = {"norm": "rmsnorm", "position": "rotary", "activation": "swiglu"}


def llama_refusals(model: ModelSpec, who: str) -> Iterator[Issue]:
    """What makes a model another than Llama's form; who: the launcher, for messages."""
    if model.family != "gpt":
        message = f"{who}'s models here are decoders"
        yield refused_model("family", model.family, message, "use family gpt, or --emit torch")
    for key, value in FORM.items():
        if (found := getattr(model, key)) != value:
            message = f"{who}'s models here are of Llama's form"
            yield refused_model(key, found, message, f"use {key} {value}, or --emit torch")
    if model.bias:
        message = f"{who}'s models here have no biases"
        yield refused_model("bias", "true", message, "use bias false, or --emit torch")
    if model.norm_order != "pre":
        message = f"{who} has norms before"
        yield refused_model("norm_order", model.norm_order, message, "use norm_order pre")
    for key in VARIANTS:
        if is_set(model, key):
            message = f"{who}'s models here are of Llama's form"
            hint = "leave it out, or --emit torch"
            yield refused_model(key, getattr(model, key), message, hint)
    if model.head_size * model.heads != model.hidden:
        message = f"{who} takes hidden / heads"
        hint = f"use head_dim {model.hidden // model.heads}"
        yield refused_model("head_dim", model.head_size, message, hint)
