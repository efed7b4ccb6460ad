"""Keys of a model by which decoders differ from the shape that all families share."""

from __future__ import annotations

from mpctl.spec.model import ModelSpec

VARIANTS = (
    "embedding_norm", "embedding_multiplier", "parallel_residual", "shared_norm",
    "rotary_scaling_type", "rotary_fraction", "window_rotary_base", "attention_window",
    "attention_window_every", "full_attention_every", "attention_scale", "attention_softcap",
    "logit_softcap", "qk_norm", "head_bias", "mtp_layers",
)  # fmt: skip


def is_set(model: ModelSpec, key: str) -> bool:
    """Whether a key of a model says something else than its default."""
    return bool(getattr(model, key) != ModelSpec.model_fields[key].default)
