"""Texts being written, token by token, in each family's own form; no tensors here.

    gpt   tokens of the prompt, then what follows
    glm   part A with its [MASK]s; then for each of them, in order, [sop] and the words of the
          blank until [eop] (families/glm/samples.py)
    t5    <pad>, then what the decoder writes (families/t5/samples.py)

A text gives what the model is fed next as fields of one position: a token and its position.

By hand, GLM: A = x1 M x4 M is at positions 0 to 3; [sop] of the first blank has position 1, block
1, its first word position 1, block 2; after [eop] the next [sop] has position 3, block 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpctl.rundir.requests import PromptRequest
from mpctl.spec.families import PromptForm, PromptKind

Fields = Mapping[str, Sequence[int]]


@dataclass
class TextState:
    """One text.

    number: of the prompt, part of each token's random seed. tokens: the prompt. limit: most tokens
    to write. ends: tokens that end it and are not written. start: the special token after which a
    blank or a decoder writes. masks: positions of the blanks. num_written: tokens so far;
    last_token: the last of them; blank: number of the blank that is being filled. finish: why it
    ended, None before: `end-of-text`, `length` or, with all blanks ended, `filled`.
    """

    number: int
    tokens: Sequence[int]
    limit: int
    ends: frozenset[int]
    start: int = 0
    masks: Sequence[int] = ()
    num_written: int = 0
    last_token: int = 0
    blank: int = 0
    finish: str | None = None

    def initial_fields(self) -> Fields:
        """What the model is fed first: by name, one value a position."""
        return {"tokens": self.tokens, "positions": range(len(self.tokens))}

    def append(self, token: int) -> None:
        """Add the token that was drawn; may end the text."""
        if token in self.ends:
            self.finish = "end-of-text"
        else:
            self.num_written += 1
            self.last_token = token
        if self.finish is None and self.num_written == self.limit:
            self.finish = "length"

    def next_fields(self) -> Fields:
        """What the model is fed next: one position; of a text that has ended, any legal one."""
        position = len(self.tokens) + self.num_written - 1
        return {"tokens": [self.last_token], "positions": [position]}


@dataclass
class BlankTextState(TextState):
    """GLM: fills the blanks at `masks` in part A, one after the other; `limit` bounds each of
    them. block: position in the blank, from 1."""

    block: int = 1

    def initial_fields(self) -> Fields:
        """Part A, and the start of the first blank."""
        a, start = len(self.tokens), self.start
        return {
            "tokens": [*self.tokens, start],
            "positions": [*range(a), self.masks[0]],
            "blocks": [*[0] * a, 1],
        }

    def append(self, token: int) -> None:
        """Add the token; [eop], or a blank that is full, moves on to the next blank."""
        self.last_token, self.block = token, self.block + 1
        is_end = token in self.ends
        self.num_written += not is_end
        if is_end or self.block > self.limit:
            self.last_token, self.block, self.blank = self.start, 1, self.blank + 1
            if self.blank == len(self.masks):
                self.finish = "filled" if is_end else "length"

    def next_fields(self) -> Fields:
        """One position of the blank that is being filled."""
        mask = self.masks[min(self.blank, len(self.masks) - 1)]
        return {"tokens": [self.last_token], "positions": [mask], "blocks": [self.block]}


@dataclass
class DecoderTextState(TextState):
    """T5: the prompt is the encoder's input, and the decoder writes."""

    def initial_fields(self) -> Fields:
        """The decoder's first token."""
        return {"decoder_tokens": [self.start]}

    def next_fields(self) -> Fields:
        """The decoder's last token; it counts positions itself."""
        return {"decoder_tokens": [self.last_token]}


TEXT_STATES = {
    PromptKind.CONTINUE: TextState,
    PromptKind.FILL_WORDS: TextState,
    PromptKind.FILL_BLANKS: BlankTextState,
    PromptKind.DECODE: DecoderTextState,
}


def make_text_states(form: PromptForm, prompts: Sequence[PromptRequest]) -> list[TextState]:
    """The texts of a request, each in the state before its first token is drawn. form: the
    family's."""
    return [
        TEXT_STATES[form.kind](
            number=text["number"],
            tokens=text["tokens"],
            limit=text["limit"],
            ends=frozenset(text["ends"]),
            start=0 if form.start is None else text["special"].get(form.start, 0),
            masks=text["masks"],
        )
        for text in prompts
    ]
