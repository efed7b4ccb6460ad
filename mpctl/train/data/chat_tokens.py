"""Conversations as tokens, with a mask of those that the loss counts.

A token counts where any of its characters lies in a span that the assistant writes (chat_template.py); of a prompt
and its completion, the completion's tokens and the end-of-text behind it. Templates write their own first and last
tokens, so that none is added to what they render.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpctl.core.errors import InputError
from mpctl.spec.chat import LossOn
from mpctl.train.data.chat_template import ChatTemplate, Rendered
from mpctl.train.data.conversations import Conversation
from mpctl.train.data.tokenizer import end_of_text_id

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NO_TEMPLATE = "the tokenizer has no chat template, which messages need"
TEMPLATE_HINT = "name one: --template FILE, data.chat.template in a job"


class ChatTokens(NamedTuple):
    """Token ids and whether the loss counts each, both [length]."""

    ids: NDArray[np.int64]
    mask: NDArray[np.bool_]


def last_token_id(tokenizer: Tokenizer, named: str | None) -> int:
    """The id of the token that ends a text: the one named in tokenizer_config.json, else end-of-text."""
    token = None if named is None else tokenizer.token_to_id(named)
    return end_of_text_id(tokenizer) if token is None else token


@dataclass(frozen=True)
class ChatEncoder:
    """Encodes conversations. template: None where the tokenizer has none; first, last: ids of the tokens that begin
    (None: none) and end a text."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    last: int
    first: int | None = None
    loss_on: LossOn = "completions"

    def __post_init__(self) -> None:
        self.tokenizer.encode_special_tokens = False  # templates spell them

    def rendered(self, conversation: Conversation) -> Rendered:
        """The text of a conversation and its trained spans. Raises ValueError as ChatTemplate.conversation does."""
        if conversation.text is not None:
            return Rendered(conversation.text, [(conversation.given, len(conversation.text))])
        if self.template is None:
            raise ValueError(NO_TEMPLATE)
        return self.template.conversation(conversation.messages, tools=conversation.tools, first=conversation.given)

    def encode(self, conversations: Sequence[Conversation], texts: Sequence[Rendered]) -> list[ChatTokens]:
        """The tokens of conversations, rendered before. Raises InputError where the tokenizer cannot encode one."""
        results: dict[int, ChatTokens] = {}
        for is_text in (False, True):
            chosen = [i for i, one in enumerate(conversations) if (one.text is not None) == is_text]
            try:
                found = self.tokenizer.encode_batch([texts[i].text for i in chosen], add_special_tokens=is_text)
            except Exception as error:  # the library raises bare Exception
                message, hint = f"cannot encode the conversations: {error}", "use a byte-level tokenizer"
                raise InputError.of("tokenizer-encode", "data.tokenizer", message, hint) from None
            for i, one in zip(chosen, found, strict=True):
                results[i] = self._tokens(one.ids, one.offsets, texts[i].spans, is_text=is_text)
        return [results[i] for i in range(len(conversations))]

    def _tokens(
        self, ids: list[int], offsets: list[tuple[int, int]], spans: list[tuple[int, int]], *, is_text: bool
    ) -> ChatTokens:
        tokens = np.array(ids, np.int64)
        mask = np.ones(len(ids), bool) if self.loss_on == "all" else _covered(offsets, spans)
        if not is_text:
            return ChatTokens(tokens, mask)
        if self.first is not None and tokens[:2].tolist() == [self.first] * 2:  # the text spells it, too
            tokens, mask = tokens[1:], mask[1:]
        if not len(tokens) or tokens[-1] != self.last:
            tokens, mask = np.append(tokens, self.last), np.append(mask, True)
        mask[-1] = True
        return ChatTokens(tokens, mask)


def _covered(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> NDArray[np.bool_]:
    """Whether each token, of characters [start, end), meets a span: bool [tokens].

    >>> _covered([(0, 2), (2, 3), (3, 3), (3, 6)], [(2, 4)]).tolist()
    [False, True, True, True]
    """
    pairs = np.array(offsets, np.int64).reshape(-1, 2)
    starts, ends = pairs[:, 0], np.maximum(pairs[:, 1], pairs[:, 0] + 1)
    mask = np.zeros(len(pairs), bool)
    for start, end in spans:
        mask |= (starts < end) & (ends > start)
    return mask


def named_id(tokenizer: Tokenizer, named: str | None) -> int | None:
    """The id of a named token, None where there is none."""
    return None if named is None else tokenizer.token_to_id(named)


def special_texts(tokenizer: Tokenizer) -> list[str]:
    """The texts of the tokenizer's special tokens."""
    return [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
