"""Special tokens of GLM's objective (arXiv 2103.10360, section 2.1)."""

from __future__ import annotations

from bisect import bisect_right

from mpctl.spec.model import ModelSpec

MASK, START, END = "[MASK]", "[sop]", "[eop]"


def special_tokens(model: ModelSpec) -> tuple[str, ...]:
    """Names of the tokens that samples of this model hold beside text."""
    return (MASK, START, END)


def text_length(seq_length: int) -> int:
    """The most text that fits when spans of 3 cover 15 % of it: n + 2 n/20, 464 of 512."""
    texts = range(1, seq_length + 1)
    return bisect_right(texts, seq_length, key=lambda text: text + 2 * -(-text // 20))


def least_tokens(model: ModelSpec) -> int:
    """Tokens of text that a split must hold: one sample and one."""
    return text_length(model.seq_length) + 1
