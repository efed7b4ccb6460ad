"""Prompts as tokens, in the form that each family's training gave its text. Needs no torch.

    gpt    the prompt's tokens; an empty prompt is end-of-text, which stands before a document
    bert   [CLS] tokens [SEP], with the [MASK]s to fill
    glm    tokens with their [MASK]s; without any, one is put at the end
    t5     tokens with sentinels <extra_id_0>, <extra_id_1>, .., then </s>

Names of special tokens count in a prompt of the last three; everywhere else they are plain text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpctl.data.special import added_tokens, special_ids
from mpctl.data.tokenizer import end_of_text_id, load_tokenizer, vocabulary_size
from mpctl.errors import InputError, Issue
from mpctl.families import special_tokens
from mpctl.spec.model import ModelSpec

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MASK = "[MASK]"
DEFAULT_TOKENS = 128  # that are written, or as many as the model has positions for


@dataclass(frozen=True)
class Encoded:
    """A prompt for the workers: masks are places in tokens, limit is the most to write (in GLM a
    blank, in BERT one word a mask)."""

    tokens: tuple[int, ...]
    masks: tuple[int, ...]
    limit: int


@dataclass(frozen=True)
class PromptEncoder:
    """adds_template: as the tokenizer's own template says, which puts a begin-of-text token before
    the text of many models; text prepared by mpctl has none."""

    model: ModelSpec
    tokenizer_path: Path
    own_ends: tuple[int, ...] = ()
    adds_template: bool = False

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.tokenizer_path)

    @cached_property
    def special(self) -> dict[str, int]:
        """Ids of the family's special tokens."""
        names = special_tokens(self.model)
        return special_ids(
            added_tokens(self.tokenizer_path), names, vocab=self.model.vocab,
            words=min(self.model.vocab, vocabulary_size(self.tokenizer)),
        ) if names else {}  # fmt: skip

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end a text, or a blank."""
        name = {"glm": "[eop]", "t5": "</s>"}.get(self.model.family)
        if name is not None:
            return (self.special[name],)
        if self.model.family == "bert":
            return ()
        try:
            return tuple({*self.own_ends, end_of_text_id(self.tokenizer)})
        except InputError:
            return self.own_ends

    def encode(self, prompts: Sequence[str], *, max_tokens: int | None) -> list[Encoded]:
        """Raises InputError with what is wrong with any of the prompts."""
        found: list[Encoded] = []
        issues: list[Issue] = []
        for number, prompt in enumerate(prompts, start=1):
            tokens, where = self._framed(self._tokens(prompt)), f"prompt {number}"
            masks = tuple(i for i, token in enumerate(tokens) if token == self.special.get(MASK))
            if why := self._unfit(tokens, masks, max_tokens):
                issues.append(Issue("prompt-fits-model", where, *why))
            else:
                found.append(Encoded(tuple(tokens), masks, max_tokens or self._default(tokens)))
        if issues:
            raise InputError(issues[:20])
        return found

    @property
    def positions(self) -> int | None:
        """The most positions that the model has; None where positions follow from a formula."""
        return self.model.max_positions if self.model.position == "learned" else None

    def _tokens(self, prompt: str) -> list[int]:
        """With the ids of the special tokens that are named in it."""
        if not self.special:
            return self._plain(prompt, self.adds_template)
        names = "|".join(map(re.escape, sorted(self.special, key=len, reverse=True)))
        parts = re.split(f"({names})", prompt)
        return [token for part in parts if part for token in (
            [self.special[part]] if part in self.special else self._plain(part, False)
        )]  # fmt: skip

    def _plain(self, text: str, adds_template: bool) -> list[int]:
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=adds_template).ids)
        except Exception as error:  # the library raises bare Exception
            hint = "use a byte-level tokenizer, or one with an unknown token"
            raise InputError.of(
                "tokenizer-encode", str(self.tokenizer_path), f"cannot encode the prompt: {error}",
                hint,
            ) from None  # fmt: skip

    def _framed(self, tokens: list[int]) -> list[int]:
        match self.model.family:
            case "gpt":
                return tokens or list(self.ends[:1])
            case "bert":
                return [self.special["[CLS]"], *tokens, self.special["[SEP]"]]
            case "t5":
                return [*tokens, self.special["</s>"]]
            case "glm":
                mask = self.special[MASK]
                return tokens if mask in tokens else [*tokens, mask]

    def _unfit(
        self, tokens: list[int], masks: Sequence[int], max_tokens: int | None
    ) -> tuple[str, str] | None:
        """What is wrong, and the way out."""
        family, positions = self.model.family, self.positions
        if not tokens:
            return "is empty, and the tokenizer has no end-of-text token", "give some text"
        if (largest := max(tokens)) >= self.model.vocab:
            return (f"holds token {largest}, but the model has {self.model.vocab} words",
                    "give the tokenizer that the model was trained with")  # fmt: skip
        if family == "bert" and not masks:
            return f"has no {MASK}, and a bert model fills those", f"write {MASK} for a word"
        if positions is None:
            return None
        shared = max_tokens or 1 if family == "gpt" else 0  # written after the prompt
        if len(tokens) + shared > positions:
            said = f"{len(tokens)} tokens" + (f" and {shared} to write" if shared else "")
            return f"{said} exceed the model's {positions} positions", (
                f"use --max-tokens {positions - len(tokens)} or a shorter prompt"
                if family == "gpt" and len(tokens) < positions else "use a shorter prompt"
            )  # fmt: skip
        if family == "glm" and max_tokens is not None and max_tokens >= positions:
            return (f"{max_tokens} tokens for a blank, the model has positions for "
                    f"{positions - 1}", f"use --max-tokens {positions - 1} or less")  # fmt: skip
        return None

    def _default(self, tokens: list[int]) -> int:
        if self.positions is None:
            return DEFAULT_TOKENS
        taken = len(tokens) if self.model.family == "gpt" else 1
        return min(DEFAULT_TOKENS, self.positions - taken)


def filled_text(
    encoder: PromptEncoder, encoded: Encoded, blanks: Sequence[Sequence[int]], prompt: str
) -> str:
    """The prompt with what was written in its blanks: bert's and glm's by mask, t5's by sentinel;
    of a t5 prompt without a sentinel, what the decoder wrote."""
    texts = [_decoded(encoder, blank) for blank in blanks]
    if encoder.model.family == "t5":
        return _by_sentinel(encoder, prompt, blanks[0] if blanks else ())
    if MASK not in prompt:
        return prompt + "".join(texts)
    pieces = prompt.split(MASK)
    texts += [MASK] * (len(pieces) - 1 - len(texts))
    return "".join(part for pair in zip(pieces, [*texts, ""], strict=True) for part in pair)


def _by_sentinel(encoder: PromptEncoder, prompt: str, written: Sequence[int]) -> str:
    names = {encoder.special[name]: name for name in encoder.special if "extra_id" in name}
    spans: dict[str, list[int]] = {}
    at: Any = None
    for token in written:
        at = names.get(token, at)
        if token not in names:
            spans.setdefault(at, []).append(token)
    if not any(name in prompt for name in names.values()):
        return "".join(_decoded(encoder, span) for span in spans.values())
    for name in sorted(names.values(), key=len, reverse=True):
        prompt = prompt.replace(name, _decoded(encoder, spans.get(name, [])))
    return prompt


def _decoded(encoder: PromptEncoder, tokens: Sequence[int]) -> str:
    return encoder.tokenizer.decode(list(tokens), skip_special_tokens=False)
