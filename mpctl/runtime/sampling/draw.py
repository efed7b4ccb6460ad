"""Which token comes next: the likeliest, or one drawn by temperature, top-k and top-p.

Drawing is Gumbel's law: the largest of log p + g, with g = -log(-log u) and u uniform, is word w
with probability p(w). Each u is a hash of (seed, number of the text, step, word)
(kernels/counter_rng.py), so a text does not depend on the layout, on the other texts of its batch
or on the device. All ranks of a tensor-parallel group gather the same logits and so draw the same
token; nothing is broadcast.

By hand: probabilities 0.5, 0.3, 0.2 with top_p 0.7 keep the first two, the fewest that reach 0.7.

Letters: b texts, v vocabulary, t tp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mpctl.kernels.counter_rng import site_key, uniform
from mpctl.transport.group import Group


@dataclass(frozen=True)
class TokenSampler:
    """Draws the next token of each text. temperature 0 takes the likeliest word; top_k and top_p
    narrow the choice, in this order, after the division by the temperature (Holtzman et al., arXiv
    1904.09751, section 3)."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __call__(self, logits: Tensor, texts: Sequence[int], step: int) -> tuple[Tensor, Tensor]:
        """logits [b, v] of the texts so numbered -> tokens [b], and their log probabilities [b]
        under the model itself: at temperature 1, without top_k and top_p.

        step: how many tokens were drawn for each text before. Raises FloatingPointError where a
        logit is not a number.
        """
        scores = logits.double()
        if bool(scores.isnan().any()):
            raise FloatingPointError("the model gives logits that are not numbers (NaN)")
        log_probabilities = scores.log_softmax(-1)
        tokens = scores.argmax(-1)
        if self.temperature:
            # 0 at most: a temperature near 0 makes no infinities that could not be told apart
            heated = (scores - scores.amax(-1, keepdim=True)) / self.temperature
            noise = self._noise(scores, texts, step)
            tokens = (self._narrowed(heated) + noise).argmax(-1)
        return tokens, log_probabilities.gather(-1, tokens[:, None])[:, 0]

    def _narrowed(self, scores: Tensor) -> Tensor:
        """[b, v] with -inf for the words that top_k and top_p leave out."""
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            least = scores.topk(self.top_k, -1).values[:, -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        if self.top_p is not None and self.top_p < 1:
            ordered, words = scores.sort(dim=-1, descending=True, stable=True)
            before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
            is_out = before >= self.top_p
            is_out[:, 0] = False  # top_p 0 keeps the likeliest word too
            left_out = torch.zeros_like(is_out).scatter_(-1, words, is_out)
            scores = scores.masked_fill(left_out, -torch.inf)
        return scores

    def _noise(self, scores: Tensor, texts: Sequence[int], step: int) -> Tensor:
        """Gumbel noise [b, v]."""
        numbers = torch.tensor(texts, device=scores.device)[:, None, None]
        steps = torch.tensor([step], device=scores.device)[:, None]
        words = torch.arange(scores.shape[-1], device=scores.device)
        key = site_key(self.seed, "sample")
        return -uniform(key, (numbers, steps, words), torch.float64)[:, 0].log().neg().log()


def gather_logits(local: Tensor, group: Group, *, vocab: int, padded: int) -> Tensor:
    """This rank's words [b, v_local] -> [b, v], equal on every rank of the group.

    padded: rows of the word table over all ranks; those above `vocab` give no logit.
    """
    if group.size == 1:
        return local
    rows = padded // group.size
    # [b, v_local] -> [b, padded/t] -> [b, padded] -> [b, v]
    filled = F.pad(local, (0, rows - local.shape[-1]), value=-torch.inf)
    return group.all_gather(filled, -1)[:, :vocab]
