"""Tokens back to text, as they come: a piece of text is given out once no later token changes it.

A byte-level token may be a part of a character, and some tokenizers drop the space before the first
token of a text. So the tokens are decoded behind those of the prompt, the prompt's text is cut off,
and what ends in an incomplete character (U+FFFD) waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

INCOMPLETE = "\ufffd"
CONTEXT = 16  # tokens of the prompt that the first of the text are decoded behind


class TextStream:
    """The text of tokens that are pushed one by one, behind a prompt's tokens."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self.tokenizer, self.tokens = tokenizer, list(prompt[-CONTEXT:])
        self.cut = len(self._decoded())
        self.given = ""

    @property
    def text(self) -> str:
        """All of it, incomplete characters included."""
        return self._decoded()[self.cut :]

    def push(self, token: int) -> str:
        """The text that is certain now and was not before."""
        self.tokens.append(token)
        return self.rest(self.text.rstrip(INCOMPLETE))

    def rest(self, text: str | None = None) -> str:
        """What has not been given out, at the end."""
        new = (self.text if text is None else text)[len(self.given) :]
        self.given += new
        return new

    def _decoded(self) -> str:
        return self.tokenizer.decode(self.tokens, skip_special_tokens=False)
