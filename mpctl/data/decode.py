"""Tokens back to text, as they come: a piece of text is given out once no later token changes it.

A byte-level token may be a part of a character, and some tokenizers drop the space before the first
token of a text. So tokens are decoded behind a few that came before (the prompt's, at first), the
text of these is cut off, and what ends in an incomplete character (U+FFFD) waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

INCOMPLETE = "\ufffd"
CONTEXT = 16  # tokens of the prompt, or of the text so far, that others are decoded behind
MOST = 64  # tokens decoded at once: the cost of a token does not grow with the text


class TextStream:
    """The text of tokens that are pushed one by one, behind a prompt's tokens."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self._begin(prompt[-CONTEXT:])

    def _begin(self, context: Sequence[int]) -> None:
        """From here on, behind these tokens."""
        self.tokens = list(context)
        self.cut = len(self._decoded())
        self.given = ""

    @property
    def text(self) -> str:
        """What came behind the context, incomplete characters included."""
        return self._decoded()[self.cut :]

    def push(self, token: int) -> str:
        """The text that is certain now and was not before."""
        self.tokens.append(token)
        text = self.text
        new = self.rest(text.rstrip(INCOMPLETE))
        if len(self.tokens) >= MOST and not text.endswith(INCOMPLETE):
            self._begin(self.tokens[-CONTEXT:])
        return new

    def rest(self, text: str | None = None) -> str:
        """What has not been given out, at the end."""
        new = (self.text if text is None else text)[len(self.given) :]
        self.given += new
        return new

    def _decoded(self) -> str:
        return self.tokenizer.decode(self.tokens, skip_special_tokens=False)
