"""Masks by hand."""

from __future__ import annotations

import torch

from mpctl.train.kernels.masks import causal_mask, partly_bidirectional_mask


def test_glm_mask_by_hand() -> None:
    mask = partly_bidirectional_mask(torch.tensor([3, 0, 5]), 5)
    assert mask.shape == (3, 1, 5, 5)
    assert mask.dtype == torch.bool
    assert mask[0, 0].int().tolist() == [
        [1, 1, 1, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1],
    ]
    assert torch.equal(mask[1, 0], torch.ones(5, 5).tril().bool())
    assert mask[2].all()


def test_glm_rows_of_a_context_rank() -> None:
    prefix, rows = torch.tensor([3, 1]), torch.tensor([0, 1, 6, 7])
    whole = partly_bidirectional_mask(prefix, 8)
    assert torch.equal(partly_bidirectional_mask(prefix, 8, queries=rows), whole[:, :, rows])
    part = partly_bidirectional_mask(prefix, 8, queries=range(2, 6))
    assert torch.equal(part, whole[:, :, 2:6])


def test_causal_mask_of_any_positions() -> None:
    assert causal_mask(range(2, 4), range(4)).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    rows = torch.tensor([3, 0])
    assert causal_mask(rows, torch.tensor([0, 3, 1])).int().tolist() == [[1, 1, 1], [1, 0, 0]]
