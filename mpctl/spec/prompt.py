"""How a family reads a prompt and what it writes: data, read by the tokenizing half and the
workers.

By hand, BERT: the prompt `a [MASK] c` becomes [CLS] a [MASK] c [SEP], and one word is drawn for the
[MASK]. GPT: the prompt's tokens are followed by those that are written, up to end-of-text.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

MASK = "[MASK]"


class PromptKind(Enum):
    """What sampling writes for a prompt."""

    CONTINUE = "continue"
    """Tokens after the prompt, which both see only what stands before them (GPT)."""
    FILL_WORDS = "fill words"
    """One token for every [MASK], all from one forward pass (BERT)."""
    FILL_BLANKS = "fill blanks"
    """Several tokens for every [MASK], blank after blank, behind the prompt (GLM)."""
    DECODE = "decode"
    """Tokens of a decoder that attends to the encoded prompt, for each sentinel in it (T5)."""


@dataclass(frozen=True)
class PromptForm:
    """How a prompt is framed for a family, by the names of its special tokens.

    before, after: special tokens put around the prompt's own. start: the special token after which
    a blank or a decoder writes. end: the special token that ends what is written; None where the
    tokenizer's end-of-text does (CONTINUE), or where nothing has to end (FILL_WORDS).
    """

    kind: PromptKind
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    start: str | None = None
    end: str | None = None

    @property
    def continues(self) -> bool:
        """Whether what is written follows the prompt directly."""
        return self.kind is PromptKind.CONTINUE
