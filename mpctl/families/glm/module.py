"""GLM as a module: GPT's stack that sees part A both ways, with a second position a token.

h0 = drop(word + position[place in the corrupted text] + block[place inside the blank]); the first
`context` tokens of a sample are seen by all, the rest by later ones only (Du et al., arXiv
2103.10360, sections 2.2 and 2.3). The loss of a sample is the mean over the words of its blanks.

Letters: b batch, s sequence, v vocabulary; t tp, c cp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpctl.families.batch import Batch, Family
from mpctl.families.parts import Embedding, encoder_layers, own_head, weighted_sum
from mpctl.kernels.context import context_positions
from mpctl.kernels.cross_entropy import vocab_parallel_cross_entropy
from mpctl.kernels.embedding import tied_logits
from mpctl.kernels.group import Group
from mpctl.kernels.layer import NORMS
from mpctl.kernels.masks import partly_bidirectional_mask
from mpctl.kernels.noise import Noise
from mpctl.kernels.parameters import mark_partial
from mpctl.spec.model import Model
from mpctl.spec.training import Training


class GLM(Family):
    """One rank's share of the model: `group` splits its tensors, `cp` the sequence.

    forward gives logits [b, s/c, v_local] of this rank's words.
    """

    def __init__(
        self, model: Model, training: Training, *, group: Group, dtype: torch.dtype,
        device: torch.device, cp: Group | None = None, sequence_parallel: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model, self.group, self.cp = model, group, cp or Group(name="cp")
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        split: dict[str, Any] = {"group": group, "sequence_parallel": sequence_parallel, **place}
        tables = dict.fromkeys(("position", "block"), model.max_positions)
        self.embedding = Embedding(model, training, cp=self.cp, tables=tables, **split)
        self.layers = encoder_layers(model, training, cp=self.cp, causal=False, **split)
        self.final_norm = NORMS[model.norm](model.hidden, eps=model.norm_epsilon, **place)
        if sequence_parallel:
            mark_partial(self.final_norm)
        self.head = own_head(model, training, **split)

    def forward(
        self, tokens: Tensor, positions: Tensor, blocks: Tensor, context: Tensor,
        noise: Noise | None = None,
    ) -> Tensor:  # fmt: skip
        """tokens, positions, blocks [b, s/c]; context [b], tokens of part A."""
        hidden = self.embedding(tokens, position=positions, block=blocks)
        hidden = self.embedding.dropped(hidden, noise)
        mask = self._seen(context, tokens.shape[1] * self.cp.size)
        for layer in self.layers.values():
            hidden = layer(hidden, noise, mask=mask)
        hidden = self.final_norm(hidden)
        return tied_logits(hidden, self.embedding.word) if self.head is None else self.head(hidden)

    def _seen(self, context: Tensor, length: int) -> Tensor:
        """[b, 1, s/c, s]: what this rank's tokens may attend to."""
        rows = context_positions(length, self.cp.size, self.cp.rank, device=context.device)
        return partly_bidirectional_mask(context, length, queries=rows)

    def loss(self, batch: Batch, noise: Noise | None) -> Tensor:
        names = ("tokens", "positions", "blocks", "context")
        logits = self(*(batch[name] for name in names), noise)
        first = self.embedding.word.vocab_range.start
        losses = vocab_parallel_cross_entropy(
            logits, batch["targets"], group=self.group, first=first
        )
        return weighted_sum(losses, batch["weights"])
