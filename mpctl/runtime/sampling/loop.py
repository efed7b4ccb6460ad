"""The loop: logits of the last position, a token of each text, and that token fed in turn.

A text that has ended is fed on beside the others of its batch, which it does not influence, until
all have ended. BERT writes nothing: all its [MASK]s are filled from one forward pass.
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
class SampledToken:
    """One token of one text, or of its blank number `blank`; is_end: it ended that and is no part
    of it. finish: why the text has ended, None where it goes on."""

    text: int
    blank: int
    token: int
    log_probability: float
    is_end: bool
    finish: str | None


@torch.inference_mode()
def generate(
    module: FamilyModule,
    model: ModelSpec,
    group: Group,
    texts: Sequence[TextState],
    draw: TokenSampler,
    *,
    device: torch.device,
) -> Iterator[list[SampledToken]]:
    """What is chosen for the texts that have not ended, place by place."""
    decoder, place = make_decoder(module, device), 0
    logits = decoder.begin(texts)
    while True:
        tokens, shares = draw(_whole(logits, model, group), [t.number for t in texts], place)
        yield [
            _taken(text, token, share)
            for text, token, share in zip(texts, tokens.tolist(), shares.tolist(), strict=True)
            if text.finish is None
        ]
        if all(text.finish for text in texts):
            return
        logits, place = decoder.go_on([text.following() for text in texts]), place + 1


@torch.inference_mode()
def fill_masks(
    module: FamilyModule,
    model: ModelSpec,
    group: Group,
    texts: Sequence[TextState],
    draw: TokenSampler,
    *,
    device: torch.device,
) -> Iterator[list[SampledToken]]:
    """BERT: for each text the words of its `masks`, each drawn from the same forward pass."""
    for text in texts:
        tokens = torch.tensor([text.tokens], device=device)
        batch = Batch(torch.zeros(1), {"tokens": tokens, "types": torch.zeros_like(tokens)})
        logits, _ = module(batch)
        for place, mask in enumerate(text.masks):
            whole = _whole(logits[:, mask], model, group)
            (token,), (share,) = draw(whole, [text.number], place)
            finish = "filled" if place == len(text.masks) - 1 else None
            yield [SampledToken(text.number, place, int(token), float(share), False, finish)]


def _whole(local: Tensor, model: ModelSpec, group: Group) -> Tensor:
    return gather_logits(local, group, vocab=model.vocab, padded=padded(model, group))


def _taken(text: TextState, token: int, share: float) -> SampledToken:
    blank = text.blank
    text.take(token)
    return SampledToken(text.number, blank, token, share, token in text.ends, text.finish)
