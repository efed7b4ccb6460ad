"""Special tokens of GPT's objective: none, as text predicts text."""

from __future__ import annotations

from mpctl.spec.model import ModelSpec


def special_tokens(model: ModelSpec) -> tuple[str, ...]:
    """Names of the tokens that samples of this model hold beside text."""
    return ()


def least_tokens(model: ModelSpec) -> int:
    """Tokens of text that a split must hold: one sample and its last target."""
    return model.seq_length + 1
