"""Special tokens of GLM's objective (arXiv 2103.10360, section 2.1)."""

from __future__ import annotations

from mpctl.spec.model import Model

MASK, START, END = "[MASK]", "[sop]", "[eop]"


def special_tokens(model: Model) -> tuple[str, ...]:
    """Names of the tokens that samples of this model hold beside text."""
    return (MASK, START, END)
