"""A model fed a batch of texts position by position: the prompts at once, then one token each.

Prompts of unequal lengths are padded on the left, so that all continue at one place of the cache;
no query sees the padding (a mask), and positions count from the text's own first token. A text's
logits then do not depend on the others of its batch. T5 pads the encoder's input on the right, and
its decoders all begin with one token.

GLM's part A sees itself both ways and nothing behind it: it is fed first, then [sop].

Letters: b texts, s positions, v vocabulary, t tp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from mpctl.families import get_prompt_form
from mpctl.families.batch import Batch, EncoderDecoderModule
from mpctl.families.single_stack import SingleStackModule
from mpctl.layers.attention import ContextCache, DecoderCaches, KeyValueCache
from mpctl.runtime.sampling.texts import Fields, TextState

T = TypeVar("T")


class Decoder(Protocol):
    """Computes one batch of texts position by position, with caches."""

    def prefill(self, texts: Sequence[TextState]) -> Tensor:
        """Feed the prompts -> logits [b, v/t] of each text's next token, of this rank's words."""

    def decode(self, fields: Sequence[Fields]) -> Tensor:
        """Feed one more position of each text -> logits [b, v/t] of the next token."""


class StackDecoder:
    """A batch of texts of a family of one stack. is_causal: whether a prompt sees what stands
    before each token alone (GPT) or itself both ways (GLM)."""

    def __init__(self, module: SingleStackModule, device: torch.device, *, is_causal: bool) -> None:
        self.module, self.device, self.is_causal = module, device, is_causal
        self.caches: list[KeyValueCache] = []
        self.real: Tensor | None = None  # [b, positions so far], False at padding; None: all True

    def prefill(self, texts: Sequence[TextState]) -> Tensor:
        """Feed the prompts, padded on the left."""
        fields = [text.initial_fields() for text in texts]
        longest = max(len(each["tokens"]) for each in fields)
        room = longest + max(_positions(text) for text in texts)
        self.caches = [KeyValueCache(room) for _ in self.module.layers]
        if self.is_causal:
            return self._feed(fields, _is_real(fields, "tokens", "left"))
        head = [{name: row[:-1] for name, row in each.items()} for each in fields]
        self._feed(head, _is_real(head, "tokens", "left"))
        return self.decode([{name: row[-1:] for name, row in each.items()} for each in fields])

    def decode(self, fields: Sequence[Fields]) -> Tensor:
        """Feed one more position of each text."""
        return self._feed(fields, [[True]] * len(fields))

    def _feed(self, fields: Sequence[Fields], is_real: list[list[bool]]) -> Tensor:
        real = torch.tensor(is_real, device=self.device)
        self.real = real if self.real is None else torch.cat((self.real, real), 1)
        # [b, positions] -> [b, 1, 1, positions]
        mask = None if bool(self.real.all()) else self.real[:, None, None]
        batch = _batch(fields, "left", self.device)
        return self.module.decode_step(batch, self.caches, mask=mask)


class EncoderDecoder:
    """A batch of texts that a decoder writes, for prompts that its encoder reads (T5)."""

    def __init__(self, module: EncoderDecoderModule, device: torch.device) -> None:
        self.module, self.device = module, device
        self.caches: list[DecoderCaches] = []

    def prefill(self, texts: Sequence[TextState]) -> Tensor:
        """Encode the prompts, padded on the right, and feed the decoder its first token."""
        inputs = [{"tokens": text.tokens} for text in texts]
        real = torch.tensor(_is_real(inputs, "tokens", "right"), device=self.device)
        self.mask = None if bool(real.all()) else real[:, None, None]
        self.source = self.module.encode(
            (), _batch(inputs, "right", self.device), None, mask=self.mask
        )
        room = 1 + max(text.limit for text in texts)
        self.caches = [
            DecoderCaches(KeyValueCache(room), ContextCache())
            for _ in range(self.module.decoder_depth)
        ]
        return self.decode([text.initial_fields() for text in texts])

    def decode(self, fields: Sequence[Fields]) -> Tensor:
        """Feed the decoder one more position of each text."""
        batch = _batch(fields, "left", self.device)
        return self.module.decode_step(batch, self.source, self.caches, mask=self.mask)


def make_decoder(module: torch.nn.Module, device: torch.device) -> Decoder:
    """A decoder for one batch of texts, of the kind that the module needs."""
    if isinstance(module, EncoderDecoderModule):
        return EncoderDecoder(module, device)
    assert isinstance(module, SingleStackModule)
    return StackDecoder(module, device, is_causal=get_prompt_form(module.model).continues)


def _positions(text: TextState) -> int:
    """The most positions that a text is fed after its first ones."""
    return max(1, len(text.masks)) * (text.limit + 1)


def _is_real(fields: Sequence[Fields], name: str, side: str) -> list[list[bool]]:
    rows = [[True] * len(each[name]) for each in fields]
    return [_padded(row, max(map(len, rows)), False, side) for row in rows]


def _batch(fields: Sequence[Fields], side: str, device: torch.device) -> Batch:
    """Each field as [b, s], padded with 0."""
    columns: Mapping[str, list[Sequence[int]]] = {
        name: [each[name] for each in fields] for name in fields[0]
    }
    fields_of_batch = {
        name: torch.tensor([_padded(row, max(map(len, rows)), 0, side) for row in rows],
                           device=device)
        for name, rows in columns.items()
    }  # fmt: skip
    return Batch(torch.arange(len(fields)), fields_of_batch)


def _padded(row: Sequence[T], size: int, filler: T, side: str) -> list[T]:
    lacking = [filler] * (size - len(row))
    return [*lacking, *row] if side == "left" else [*row, *lacking]
