"""GPT as a module: what the operator table beside it counts, with the same names and shapes.

h0 = drop(word[tokens] + position[0..s)); h = blocks(h0); logits = norm(h) word^T
(Radford et al. 2019, GPT-2: pre-norm, tied output). The modern variant is the same with RMSNorm,
rotary positions, a gated MLP, fewer kv heads, no biases and a head of its own (Llama, arXiv
2302.13971). Names are global (`layers.7.mlp.up.weight`), so that weights and dropout masks follow
from the seed whatever the layout.

Letters: b batch, s sequence, h hidden, v vocabulary; t tp, c cp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpctl.families.batch import Batch, Family
from mpctl.families.parts import Embedding, encoder_layers, own_head
from mpctl.kernels.cross_entropy import vocab_parallel_cross_entropy
from mpctl.kernels.embedding import tied_logits
from mpctl.kernels.group import Group
from mpctl.kernels.layer import NORMS
from mpctl.kernels.noise import Noise
from mpctl.kernels.parameters import mark_partial
from mpctl.spec.model import Model
from mpctl.spec.training import Training


class GPT(Family):
    """One rank's share of the model: `group` splits its tensors, `cp` the sequence.

    forward gives logits [b, s/c, v_local] of this rank's words; `losses` gives [b, s/c] float32,
    equal on every rank of the group; `loss` is what training sums.
    """

    def __init__(
        self, model: Model, training: Training, *, group: Group, dtype: torch.dtype,
        device: torch.device, cp: Group | None = None, sequence_parallel: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model, self.group = model, group
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        split: dict[str, Any] = {"group": group, "sequence_parallel": sequence_parallel, **place}
        cp = cp or Group(name="cp")
        tables = {"position": model.max_positions} if model.position == "learned" else {}
        self.embedding = Embedding(model, training, cp=cp, tables=tables, **split)
        self.layers = encoder_layers(model, training, cp=cp, causal=True, **split)
        self.final_norm = NORMS[model.norm](model.hidden, eps=model.norm_epsilon, **place)
        if sequence_parallel:
            mark_partial(self.final_norm)
        self.head = own_head(model, training, **split)

    def forward(self, tokens: Tensor, noise: Noise | None = None) -> Tensor:
        learned = self.model.position == "learned"
        hidden = self.embedding(tokens, **{"position": None} if learned else {})
        hidden = self.embedding.dropped(hidden, noise)
        for layer in self.layers.values():
            hidden = layer(hidden, noise)
        hidden = self.final_norm(hidden)
        return tied_logits(hidden, self.embedding.word) if self.head is None else self.head(hidden)

    def losses(self, tokens: Tensor, targets: Tensor, noise: Noise | None = None) -> Tensor:
        """-log p(target) of every token, [b, s/c]; the vocabulary is never gathered."""
        first = self.embedding.word.vocab_range.start
        logits = self(tokens, noise)
        return vocab_parallel_cross_entropy(logits, targets, group=self.group, first=first)

    def loss(self, batch: Batch, noise: Noise | None) -> Tensor:
        """Sum over the batch's samples of their mean loss (this rank's tokens of it), a scalar."""
        losses = self.losses(batch["tokens"], batch["targets"], noise)
        return losses.sum() * (1 / self.model.seq_length)
