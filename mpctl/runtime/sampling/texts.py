"""Texts being written, token by token, in each family's own form; no tensors here.

    gpt   tokens of the prompt, then what follows
    glm   part A with its [MASK]s; then for each of them, in order, [sop] and the words of the
          blank until [eop] (families/glm/samples.py)
    t5    <pad>, then what the decoder writes (families/t5/samples.py)

A text says what the model is fed next as fields of one position: a token and where it stands.

By hand, GLM: A = x1 M x4 M is at positions 0 to 3; [sop] of the first blank has position 1, block
1, its first word position 1, block 2; after [eop] the next [sop] has position 3, block 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpctl.spec.prompt import PromptForm, PromptKind

Fields = Mapping[str, Sequence[int]]


@dataclass
class TextState:
    """One text: `number` names it to the draws, `limit` bounds the tokens that are written, a
    token in `ends` ends it and is not written.

    start: the special token after which a blank or a decoder writes.
    written: tokens so far, latest: the last of them, blank: the blank that is being filled.
    finish: why it ended, None before: `end-of-text`, `length` or, with all blanks ended, `filled`.
    """

    number: int
    tokens: Sequence[int]
    limit: int
    ends: frozenset[int]
    start: int = 0
    masks: Sequence[int] = ()
    written: int = 0
    latest: int = 0
    blank: int = 0
    finish: str | None = None

    def first(self) -> Fields:
        """What the model is fed at the start: by name, a value a position."""
        return {"tokens": self.tokens, "positions": range(len(self.tokens))}

    def take(self, token: int) -> None:
        """The token that was chosen."""
        if token in self.ends:
            self.finish = "end-of-text"
        else:
            self.written += 1
            self.latest = token
        if self.finish is None and self.written == self.limit:
            self.finish = "length"

    def following(self) -> Fields:
        """What the model is fed next: one position. Of a text that has ended, anything legal."""
        place = len(self.tokens) + self.written - 1
        return {"tokens": [self.latest], "positions": [place]}


@dataclass
class BlankTextState(TextState):
    """GLM: the blanks of `masks`, their positions in part A; `limit` bounds each of them."""

    block: int = 1

    def first(self) -> Fields:
        a, start = len(self.tokens), self.start
        return {
            "tokens": [*self.tokens, start],
            "positions": [*range(a), self.masks[0]],
            "blocks": [*[0] * a, 1],
        }

    def take(self, token: int) -> None:
        """[eop], or a blank that is full, moves on to the next blank."""
        self.latest, self.block = token, self.block + 1
        is_end = token in self.ends
        self.written += not is_end
        if is_end or self.block > self.limit:
            self.latest, self.block, self.blank = self.start, 1, self.blank + 1
            if self.blank == len(self.masks):
                self.finish = "filled" if is_end else "length"

    def following(self) -> Fields:
        place = self.masks[min(self.blank, len(self.masks) - 1)]
        return {"tokens": [self.latest], "positions": [place], "blocks": [self.block]}


@dataclass
class DecoderTextState(TextState):
    """T5: `tokens` are the encoder's."""

    def first(self) -> Fields:
        return {"decoder_tokens": [self.start]}

    def following(self) -> Fields:
        return {"decoder_tokens": [self.latest]}


TEXT_STATES = {
    PromptKind.CONTINUE: TextState,
    PromptKind.FILL_WORDS: TextState,
    PromptKind.FILL_BLANKS: BlankTextState,
    PromptKind.DECODE: DecoderTextState,
}


def make_text_states(form: PromptForm, asked: Sequence[Mapping[str, Any]]) -> list[TextState]:
    """The texts of a request, each in the state before its first token is drawn.

    form: the family's. asked: per text its number, tokens, masks, limit, ends, and the ids of the
    family's special tokens by name under `special`.
    """
    return [
        TEXT_STATES[form.kind](
            number=text["number"],
            tokens=text["tokens"],
            limit=text["limit"],
            ends=frozenset(text["ends"]),
            start=text["special"].get(form.start, 0),
            masks=text["masks"],
        )
        for text in asked
    ]
