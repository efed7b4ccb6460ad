"""Special tokens of BERT's objective (arXiv 1810.04805, section 3)."""

from __future__ import annotations

from mpctl.spec.model import Model

CLS, SEP, MASK = "[CLS]", "[SEP]", "[MASK]"


def special_tokens(model: Model) -> tuple[str, ...]:
    """Names of the tokens that samples of this model hold beside text."""
    return (CLS, SEP, MASK)
