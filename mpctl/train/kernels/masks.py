"""Attention masks as booleans: pure functions of lengths and positions.

True means "may attend", the convention of torch's scaled_dot_product_attention. A causal mask says
key <= query; BERT (arXiv 1810.04805) sees every real token; GLM (arXiv 2103.10360, section 2.1)
sees its prefix, part A, from everywhere and the spans, part B, causally. Prefix 2 of 4 tokens:

>>> partly_bidirectional_mask(torch.tensor([2]), 4)[0, 0].int().tolist()
[[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]

Masks meet by `&`. Letters: b batch, s sequence, q queries, k keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

Positions = range | Tensor


def numbers(positions: Positions, device: torch.device | None = None) -> Tensor:
    """Global positions, given as a range or as an integer tensor, as a tensor on `device`."""
    if isinstance(positions, Tensor):
        return positions.to(device)
    return torch.arange(positions.start, positions.stop, positions.step, device=device)


def causal_mask(
    queries: Positions, keys: Positions, *, window: int | None = None, device: torch.device | None = None
) -> Tensor:
    """[q, k]: whether the key's global position is at most the query's and, with a window, among
    the last `window` up to it.
    """
    rows, columns = numbers(queries, device)[:, None], numbers(keys, device)
    seen = rows >= columns
    return seen if window is None else seen & (columns > rows - window)


def packed_mask(places: Tensor, length: int, *, queries: Positions) -> Tensor:
    """places [b, q], how far each query stands behind the start of its sample in a row of several -> [b, 1, q, s]:
    the keys from that start on. A causal mask hides those behind the query. queries: global positions of the rows.

    >>> packed_mask(torch.tensor([[0, 1, 0, 1]]), 4, queries=range(4))[0, 0].int().tolist()
    [[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1]]
    """
    starts = numbers(queries, places.device) - places
    return (numbers(range(length), places.device) >= starts[..., None])[:, None]


def partly_bidirectional_mask(prefix: Tensor, length: int, *, queries: Positions | None = None) -> Tensor:
    """prefix [b], tokens of part A per sample -> [b, 1, s, s] (GLM).

    The first prefix[i] keys are seen by all, the rest by later queries only; prefix 0 is causal,
    prefix s bidirectional. queries: the global positions of the rows, where a context-parallel
    rank holds only those: [b, 1, q, s].
    """
    keys = range(length)
    causal = causal_mask(keys if queries is None else queries, keys, device=prefix.device)
    known = numbers(keys, prefix.device) < prefix[:, None]
    # [q, s] | [b, 1, 1, s] -> [b, 1, q, s]
    return causal | known[:, None, None, :]
