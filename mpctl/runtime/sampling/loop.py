"""The loop: logits of the last position, a token for each text, and that token fed in turn.

A text that has ended is computed on beside the others of its batch, which it does not influence,
until all have ended. Families that fill words (BERT) write no new tokens: all [MASK]s of a text are
filled from one forward pass.

Letters: b texts, v vocabulary, t tp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mpctl.families.batch import Batch, FamilyModule
from mpctl.families.parts import padded
from mpctl.runtime.sampling.decoders import make_decoder
from mpctl.runtime.sampling.draw import TokenSampler, gather_logits
from mpctl.runtime.sampling.texts import TextState
from mpctl.spec.model import ModelSpec
from mpctl.transport.group import Group


@dataclass(frozen=True)
class LoadedModel:
    """One rank's part of a model in a single pipeline stage, with its weights. tp: the group that
    splits it."""

    module: FamilyModule
    model: ModelSpec
    tp: Group
    device: torch.device

    def gather_logits(self, local: Tensor) -> Tensor:
        """This rank's logits [b, v/t] -> [b, v], equal on every rank."""
        rows = padded(self.model, self.tp)
        return gather_logits(local, self.tp, vocab=self.model.vocab, padded=rows)


@dataclass(frozen=True)
class SampledToken:
    """One token of a text. text: the text's number; blank: of the text's blanks, the one that it
    was drawn for; is_end: it ended the text or blank and is no part of it; finish: why the text has
    ended, None while it goes on."""

    text: int
    blank: int
    token: int
    log_probability: float
    is_end: bool
    finish: str | None


@torch.inference_mode()
def generate(
    loaded: LoadedModel, texts: Sequence[TextState], sampler: TokenSampler
) -> Iterator[list[SampledToken]]:
    """Step by step, one token for each text that has not ended, until all have."""
    decoder, step = make_decoder(loaded.module, loaded.device), 0
    logits = loaded.gather_logits(decoder.prefill(texts))
    while True:
        tokens, log_probabilities = sampler(logits, [text.number for text in texts], step)
        drawn = zip(texts, tokens.tolist(), log_probabilities.tolist(), strict=True)
        yield [_append(*each) for each in drawn if each[0].finish is None]
        if all(text.finish for text in texts):
            return
        logits = loaded.gather_logits(decoder.decode([text.next_fields() for text in texts]))
        step += 1


@torch.inference_mode()
def fill_masks(
    loaded: LoadedModel, texts: Sequence[TextState], sampler: TokenSampler
) -> Iterator[list[SampledToken]]:
    """The words at each text's `masks`, one a step, all of a text from the same forward pass."""
    for text in texts:
        tokens = torch.tensor([text.tokens], device=loaded.device)
        batch = Batch(torch.zeros(1), {"tokens": tokens, "types": torch.zeros_like(tokens)})
        logits, _ = loaded.module(batch)
        for step, mask in enumerate(text.masks):
            full = loaded.gather_logits(logits[:, mask])
            (token,), (log_probability,) = sampler(full, [text.number], step)
            finish = "filled" if step == len(text.masks) - 1 else None
            yield [
                SampledToken(text.number, step, int(token), float(log_probability), False, finish)
            ]


def _append(text: TextState, token: int, log_probability: float) -> SampledToken:
    blank = text.blank
    text.append(token)
    return SampledToken(text.number, blank, token, log_probability, token in text.ends, text.finish)
