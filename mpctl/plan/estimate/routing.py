"""How unevenly a router loads the ranks: the most rows that the experts of a rank compute, over the
mean of all ranks of a group.

A job states it (`training.moe_load`). Otherwise the router is taken to choose at random, as one
does whose load is balanced: the kN choices of N tokens fall on e ranks of experts by chance, and
the fullest has 1 + z sqrt(e / (k N)) times the mean, where z is the expected largest of e standard
normal numbers: the share of a rank deviates by sqrt((e - 1) / (k N)), and what one has more others
have less, which spreads them by sqrt(e / (e - 1)). No rank can have more than min(e, E / k) times
the mean: the experts of one rank are then chosen by every token. Every layer waits for its own
fullest rank.

By hand, e 8, k 2, T 4096 tokens of each of the 8 ranks: 1 + 1.42 sqrt(8 / 65536) = 1.016; of 4096
tokens together 1.044.
"""

from __future__ import annotations

from math import ceil, log2, sqrt
from typing import NamedTuple

from mpctl.model.layout.job_layout import JobLayout

LARGEST = (0.0, 0.56, 1.03, 1.42, 1.77, 2.07, 2.34, 2.59, 2.83, 3.04, 3.25)
"""The expected largest of 1, 2, 4, .., 1024 standard normal numbers."""
DOUBLING = 0.2
"""Its growth with each further doubling."""


class ExpertLoad(NamedTuple):
    """Rows that the experts of a rank compute of one micro batch, in one layer.

    load: of the fullest rank over the mean, by which the plan goes: as the job states it, else
    random; no more than largest. random: of a router that chooses at random. largest: of one that
    sends every token to the experts of one rank. rows: of the fullest rank.
    """

    load: float
    random: float
    largest: float
    rows: int


def expert_load(layout: JobLayout) -> ExpertLoad:
    """The load of the ranks of a layout whose model has experts. The mean is x k T rows: those of
    T tokens a rank, for each of the etp ranks that share an expert."""
    model, sizes = layout.model, layout.job.expert_sizes
    ranks, chosen, tokens = sizes["ep"], model.experts_per_token, rank_tokens(layout)
    even = sizes["etp"] * chosen * tokens
    largest = max(1.0, min(ranks, (model.experts or 1) / chosen))
    by_chance = sqrt(ranks / max(1.0, even * ranks))
    random = min(1 + largest_of_normals(ranks) * by_chance, largest)
    stated = layout.job.training.moe_load
    load = random if stated is None else min(stated, largest)
    return ExpertLoad(load, random, largest, ceil(even * load - 1e-6))


def rank_tokens(layout: JobLayout) -> float:
    """Positions of a micro batch that one rank brings to a layer with experts."""
    job, parallel = layout.job, layout.job.parallel
    shared = parallel.cp * (parallel.tp if parallel.sequence_parallel else 1)
    return job.training.micro_batch_size * layout.model.seq_length / shared


def largest_of_normals(count: int) -> float:
    """The expected largest of `count` standard normal numbers, on lines between LARGEST."""
    doublings, last = log2(count), len(LARGEST) - 1
    at = min(int(doublings), last)
    step = LARGEST[at + 1] - LARGEST[at] if at < last else DOUBLING
    return LARGEST[at] + step * (doublings - at)
