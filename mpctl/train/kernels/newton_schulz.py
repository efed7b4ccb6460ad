"""Orthogonalisation of matrices by Newton-Schulz steps, as Muon takes them (Jordan et al., 2024).

    X = G / |G|, |G| the Frobenius norm; each step, with its own a, b, c:
    A = X X^T,  X = a X + (b A + c A A) X

A matrix with more rows than columns is transposed first. Singular values come near 1, vectors stay. Coefficients are
those of Emerging-Optimizers (muon_utils.py): quintic from modded-nanogpt, polar_express from arXiv 2505.16932 with its
safety factor. Complete matrices and one order of sums give the same bits on every rank.
"""

from __future__ import annotations

from itertools import chain, cycle, islice, repeat

import torch
from torch import Tensor

from mpctl.spec.muon import MuonSpec

QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
POLAR_EXPRESS = (
    (8.2051, -22.9019, 16.4607),
    (4.0664, -2.8612, 0.5184),
    (3.9096, -2.8234, 0.5250),
    (3.2856, -2.4153, 0.4853),
    (2.2779, -1.6198, 0.3985),
    (1.8726, -1.2307, 0.3585),
    (1.8564, -1.2132, 0.3568),
    (1.8750, -1.2500, 0.3750),
)
EPSILON = 1e-15
"""The least norm that a matrix is divided by."""


@torch.no_grad()
def orthogonalized(matrices: Tensor, settings: MuonSpec, dtype: torch.dtype) -> Tensor:
    """[.., m, n] -> the same shape, each matrix near U V^T of its decomposition U S V^T, times the factor of its
    shape. dtype: of the products; the result has that of `matrices`."""
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    wide = matrices.mT if is_tall else matrices
    norm = torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True).clamp_min(EPSILON)
    x = (wide / norm).to(dtype)
    known = POLAR_EXPRESS if settings.coefficients == "polar_express" else QUINTIC
    after = chain(known, repeat(known[-1])) if settings.coefficients == "polar_express" else cycle(known)
    for a, b, c in islice(after, settings.steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    result = (x.mT if is_tall else x).to(matrices.dtype)
    return result * scale_factor(matrices.shape[-2], matrices.shape[-1], settings)


def scale_factor(rows: int, columns: int, settings: MuonSpec) -> float:
    """The factor of an update of a matrix of this shape. By hand, spectral with extra_scale 0.2, 64 x 16: 1.6.

    >>> scale_factor(64, 16, MuonSpec()), scale_factor(64, 16, MuonSpec(scale_mode="shape_scaling", extra_scale=1.0))
    (1.6, 2.0)
    """
    if settings.scale_mode == "spectral":
        factor = max(rows, columns) ** 0.5
    elif settings.scale_mode == "shape_scaling":
        factor = max(1.0, rows / columns) ** 0.5
    else:
        factor = (rows / columns) ** 0.5
    return factor * settings.extra_scale
