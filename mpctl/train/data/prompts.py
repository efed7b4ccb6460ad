"""Prompts as tokens, in the form that the family's training gave its text, and tokens back to text.

    CONTINUE      the prompt's tokens; an empty prompt is end-of-text, which precedes a document
    FILL_WORDS    [CLS] tokens [SEP], with the [MASK]s to fill
    FILL_BLANKS   tokens with their [MASK]s; without any, one is added at the end
    DECODE        tokens with sentinels <extra_id_0>, <extra_id_1>, .., then </s>

Names of the family's special tokens in a prompt stand for these tokens; all else is plain text.

Tokens come back as text one by one. A byte-level token may be a part of a character, and some
tokenizers drop the space before the first token of a text. So tokens are decoded together with a
few preceding ones (at first the prompt's), whose text is cut off, and text that ends in an
incomplete character (U+FFFD) waits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from mpctl.core.errors import InputError, Issue
from mpctl.spec.families import MASK, PromptForm, PromptKind
from mpctl.spec.model import ModelSpec
from mpctl.train.data.tokenizer import added_tokens, end_of_text_id, load_tokenizer, special_ids, vocabulary_size

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DEFAULT_TOKENS = 128  # tokens to write by default, where the model has positions for so many
MOST_ISSUES = 20


@dataclass(frozen=True)
class Encoded:
    """A prompt as workers receive it.

    tokens: the framed prompt. masks: indices of the [MASK]s in it. limit: the most tokens to write:
    in all (CONTINUE, DECODE) or for each [MASK] (FILL_BLANKS).
    """

    tokens: tuple[int, ...]
    masks: tuple[int, ...]
    limit: int


@dataclass(frozen=True)
class PromptEncoder:
    """Turns prompts into tokens for one model.

    form, special_names: how the model's family reads prompts, and the names of its special tokens.
    own_ends: ids that end a text for this model in addition to the tokenizer's end-of-text.
    adds_template: whether to add what the tokenizer's template adds, such as the begin-of-text
    token that many models expect; text prepared by mpctl has none.
    """

    model: ModelSpec
    form: PromptForm
    special_names: tuple[str, ...]
    tokenizer_path: Path
    own_ends: tuple[int, ...] = ()
    adds_template: bool = False

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.tokenizer_path)

    @cached_property
    def special(self) -> dict[str, int]:
        if not self.special_names:
            return {}
        words = min(self.model.vocab, vocabulary_size(self.tokenizer))
        added = added_tokens(self.tokenizer_path)
        return special_ids(added, self.special_names, vocab=self.model.vocab, words=words)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        if self.form.end is not None:
            return (self.special[self.form.end],)
        if not self.form.continues:
            return ()
        try:
            return tuple({*self.own_ends, end_of_text_id(self.tokenizer)})
        except InputError:
            return self.own_ends

    def encode(self, prompts: Sequence[str], *, max_tokens: int | None) -> list[Encoded]:
        """Return the prompts as tokens. Raises InputError with their faults."""
        encoded: list[Encoded] = []
        issues: list[Issue] = []
        for number, prompt in enumerate(prompts, start=1):
            tokens = self._framed(self._tokens(prompt))
            masks = tuple(i for i, token in enumerate(tokens) if token == self.special.get(MASK))
            if fault := self._fault(tokens, masks, max_tokens):
                issues.append(Issue("prompt-fits-model", f"prompt {number}", *fault))
            else:
                encoded.append(Encoded(tuple(tokens), masks, max_tokens or self._default(tokens)))
        if issues:
            raise InputError(issues[:MOST_ISSUES])
        return encoded

    @property
    def positions(self) -> int | None:
        """The most positions that the model has; None where positions follow from a formula."""
        return self.model.max_positions if self.model.position == "learned" else None

    def _tokens(self, prompt: str) -> list[int]:
        """Tokenize a prompt; names of special tokens in it become their ids."""
        if not self.special:
            return self._plain(prompt, self.adds_template)
        names = "|".join(map(re.escape, sorted(self.special, key=len, reverse=True)))
        parts = re.split(f"({names})", prompt)
        return [
            token
            for part in parts
            if part
            for token in ([self.special[part]] if part in self.special else self._plain(part, False))
        ]

    def _plain(self, text: str, adds_template: bool) -> list[int]:
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=adds_template).ids)
        except Exception as error:  # the library raises bare Exception
            hint = "use a byte-level tokenizer, or one with an unknown token"
            raise InputError.of(
                "tokenizer-encode", str(self.tokenizer_path), f"cannot encode the prompt: {error}", hint
            ) from None

    def _framed(self, tokens: list[int]) -> list[int]:
        form = self.form
        if form.continues and not tokens:
            return list(self.ends[:1])
        if form.kind is PromptKind.FILL_BLANKS and self.special[MASK] not in tokens:
            tokens = [*tokens, self.special[MASK]]
        before, after = ([self.special[name] for name in side] for side in (form.before, form.after))
        return [*before, *tokens, *after]

    def _fault(self, tokens: list[int], masks: Sequence[int], max_tokens: int | None) -> tuple[str, str] | None:
        """Return the fault of a prompt and its fix; None if there is none."""
        if not tokens:
            return "is empty, and the tokenizer has no end-of-text token", "give some text"
        if (largest := max(tokens)) >= self.model.vocab:
            return (
                f"holds token {largest}, but the model has {self.model.vocab} words",
                "give the tokenizer that the model was trained with",
            )
        if self.form.kind is PromptKind.FILL_WORDS and not masks:
            return (f"has no {MASK}, and a {self.model.family} model fills those", f"write {MASK} for a word")
        return self._length_fault(len(tokens), max_tokens)

    def _length_fault(self, length: int, max_tokens: int | None) -> tuple[str, str] | None:
        """The same if prompt and tokens to write exceed the model's positions."""
        positions = self.positions
        if positions is None:
            return None
        written = max_tokens or 1 if self.form.continues else 0  # else at separate positions
        if length + written > positions:
            said = f"{length} tokens" + (f" and {written} to write" if written else "")
            return f"{said} exceed the model's {positions} positions", (
                f"use --max-tokens {positions - length} or a shorter prompt"
                if written and length < positions
                else "use a shorter prompt"
            )
        blanks = self.form.kind is PromptKind.FILL_BLANKS
        if blanks and max_tokens is not None and max_tokens >= positions:
            return (
                f"{max_tokens} tokens for a blank, but the model has positions for {positions - 1}",
                f"use --max-tokens {positions - 1} or less",
            )
        return None

    def _default(self, tokens: list[int]) -> int:
        """Tokens to write where the user gave no number."""
        if self.positions is None:
            return DEFAULT_TOKENS
        return min(DEFAULT_TOKENS, self.positions - (len(tokens) if self.form.continues else 1))


def filled_text(encoder: PromptEncoder, encoded: Encoded, blanks: Sequence[Sequence[int]], prompt: str) -> str:
    """The prompt with its blanks filled by what was written, `blanks`, tokens for each of them.

    For DECODE there is one list, which names the sentinels that it fills; if the prompt has no
    sentinel, the result is the decoder's text.
    """
    if encoder.form.kind is PromptKind.DECODE:
        return _by_sentinel(encoder, prompt, blanks[0] if blanks else ())
    texts = [_decoded(encoder, blank) for blank in blanks]
    if MASK not in prompt:
        return prompt + "".join(texts)
    pieces = prompt.split(MASK)
    texts += [MASK] * (len(pieces) - 1 - len(texts))
    return "".join(part for pair in zip(pieces, [*texts, ""], strict=True) for part in pair)


def _by_sentinel(encoder: PromptEncoder, prompt: str, written: Sequence[int]) -> str:
    form = encoder.form
    sentinels = {
        encoder.special[name]: name
        for name in encoder.special
        if name not in (form.start, form.end, *form.before, *form.after)
    }
    spans: dict[str | None, list[int]] = {}
    sentinel: str | None = None
    for token in written:
        sentinel = sentinels.get(token, sentinel)
        if token not in sentinels:
            spans.setdefault(sentinel, []).append(token)
    if not any(name in prompt for name in sentinels.values()):
        return "".join(_decoded(encoder, span) for span in spans.values())
    for name in sorted(sentinels.values(), key=len, reverse=True):
        prompt = prompt.replace(name, _decoded(encoder, spans.get(name, [])))
    return prompt


def _decoded(encoder: PromptEncoder, tokens: Sequence[int]) -> str:
    return encoder.tokenizer.decode(list(tokens), skip_special_tokens=False)


INCOMPLETE = "\ufffd"
CONTEXT = 16  # tokens of the prompt, or of the text so far, that precede those to decode
MOST = 64  # tokens decoded at once: the cost of a token does not grow with the text


class TextStream:
    """The text of tokens that are pushed one by one, after a prompt's tokens."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self._begin(prompt[-CONTEXT:])

    def _begin(self, context: Sequence[int]) -> None:
        """Decode from here on, after these tokens."""
        self.tokens = list(context)
        self.cut = len(self._decoded())
        self.returned = ""

    @property
    def text(self) -> str:
        return self._decoded()[self.cut :]

    def push(self, token: int) -> str:
        """The new text that is certain now."""
        self.tokens.append(token)
        text = self.text
        new = self.rest(text.rstrip(INCOMPLETE))
        if len(self.tokens) >= MOST and not text.endswith(INCOMPLETE):
            self._begin(self.tokens[-CONTEXT:])
        return new

    def rest(self, text: str | None = None) -> str:
        """The remaining text, at the end."""
        new = (self.text if text is None else text)[len(self.returned) :]
        self.returned += new
        return new

    def _decoded(self) -> str:
        return self.tokenizer.decode(self.tokens, skip_special_tokens=False)
