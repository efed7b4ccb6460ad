"""What a layout that nearly fills its device costs in expectation, beside its step.

torch's allocator asks the driver for memory until the device is full. Then it frees every cached block and
asks again ("cudaMalloc retries" of torch.cuda.memory_stats; c10/cuda/CUDACachingAllocator.cpp), which waits for
the device, in every step anew. A layout whose tensors fit while the allocator's blocks do not runs, and
runs slowly. Whether it does depends on the true peak, which a plan misses by some percent.

So a search counts step x expected_slowdown: SLOWER with the chance that the true peak passes the edge. All
three figures are of the 467 runs of nanotron in tests/recorded/nanotron.tsv. The three that reserved
more than 75 of 79.6 GiB on their first stage took 4.2 to 4.6 times their estimate; none below 70 GiB of
those planned on less than the edge did for that reason. Runs planned above 50 GiB peaked at 0.93 of their
plan in the median, half of them from 0.89 to 0.98.

>>> [round(expected_slowdown(share), 2) for share in (0.5, 0.85, 0.9, 0.95, 1.0)]
[1.0, 1.0, 1.02, 1.16, 1.69]
"""

from __future__ import annotations

from math import erf, log, sqrt

SLOWER = 4.3
"""Times its estimate that a step takes whose allocator retries."""
EDGE, SPREAD = 1.05, 0.06
"""Planned share of the device at which half of the runs pass the edge, and the spread of its logarithm."""
LEAST = 0.005
"""A slowdown that is not counted: layouts with room keep their seconds to the bit."""


def expected_slowdown(share: float) -> float:
    """Return by what factor a step takes longer in expectation. share: planned peak of the device's memory."""
    if share <= 0:
        return 1.0
    chance = (1 + erf(log(share / EDGE) / SPREAD / sqrt(2))) / 2
    more = (SLOWER - 1) * chance
    return 1 + more if more >= LEAST else 1.0
