"""Special tokens of BERT's objective (arXiv 1810.04805, section 3)."""

from __future__ import annotations

from mpctl.spec.model import ModelSpec

CLS, SEP, MASK = "[CLS]", "[SEP]", "[MASK]"
SPECIAL_PLACES = 3  # [CLS] A [SEP] B [SEP]


def special_tokens(model: ModelSpec) -> tuple[str, ...]:
    """Names of the tokens that samples of this model hold beside text."""
    return (CLS, SEP, MASK)


def least_tokens(model: ModelSpec) -> int:
    """Tokens of text that a split must hold: two samples, since a pair may take both, and one."""
    return 2 * (model.seq_length - SPECIAL_PLACES) + 1
