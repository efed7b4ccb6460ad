"""How unevenly a router loads the ranks: the most rows that the experts of a rank compute, over the
mean of all ranks of a group.

A job states it (`training.moe_load`); memory and time then follow from it. Otherwise time is that of
balanced routing, as in the runs that the runtimes were fitted to (60 of the 95 force a balance, 24 pad to
a capacity factor of 1), and memory has to hold HELD_LOAD: a rank that gets more rows than its device
has room for ends the run, one that gets them late only slows it.

Balanced routing is random: the kN choices of N tokens fall on e ranks of experts by chance, and
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


HELD_LOAD = 1.2
"""The load that memory has to hold where the job states none. Measured: see LOADS."""


class MeasuredLoad(NamedTuple):
    """A measurement of the fullest rank over the mean: its mean and the most that was seen."""

    name: str
    mean: float
    most: float
    what: str
    source: str


LOADS = (
    MeasuredLoad(
        "demo_moe",
        1.19,
        1.54,
        "8 experts over ep 2, steps 1 to 40 from random weights: mean and largest step",
        "mpctl launch demo-moe, rank_load in metrics.jsonl",
    ),
    MeasuredLoad(
        "scattermoe",
        1.08,
        1.22,
        "8 experts, balance loss, step 38,350: mean and largest of 16 layers, one expert a rank",
        "github.com/shawntan/scattermoe/issues/10",
    ),
)
"""Loads that were measured, for `--explain routing`. Megatron-Core logs its own as the overload factor
(NVIDIA/Megatron-LM pull request 4110), mpctl as `rank_load` of a step."""


class ExpertLoad(NamedTuple):
    """Rows that the experts of a rank compute of one micro batch, in one layer.

    load: of the fullest rank over the mean, by which time goes: as the job states it, else
    random; no more than largest. random: of a router that chooses at random. largest: of one that
    sends every token to the experts of one rank. rows: of the fullest rank. held: the load that
    memory has to hold.
    """

    load: float
    random: float
    largest: float
    rows: int
    held: float


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
    held = min(max(random, HELD_LOAD), largest) if stated is None else load
    return ExpertLoad(load, random, largest, ceil(even * load - 1e-6), held)


def loaded_layout(layout: JobLayout) -> JobLayout:
    """The layout at the load that its memory has to hold; itself where the job states a load, or one
    rank has all experts."""
    if layout.model.experts is None or layout.job.training.moe_load is not None:
        return layout
    found = expert_load(layout)
    return layout if found.held == found.load else layout.with_moe_load(found.held)


def buffered_layout(layout: JobLayout) -> JobLayout:
    """The layout at the load of the rows that are kept for backward, where buffers have a capacity whatever is
    routed; itself where they have none."""
    t = layout.job.training
    return layout if t.moe_capacity is None else layout.with_moe_load(t.moe_stash or t.moe_capacity)


def balanced_layout(layout: JobLayout) -> JobLayout:
    """The layout with balanced routing; itself where the job states no higher load."""
    if layout.model.experts is None or layout.job.training.moe_load is None:
        return layout
    found = expert_load(layout)
    return layout if found.load <= found.random else layout.with_moe_load(found.random)


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
