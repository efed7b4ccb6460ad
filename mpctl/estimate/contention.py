"""What ranks add that take turns on too few cores.

Ranks that wait leave their core to others, so the cores of a node are busy as long as any of its
ranks has work. A step then ends neither before its slowest chain of work and messages nor before
the cores have done the work of all ranks: T = max(chain, sum of work / cores).

By hand, 4 stages on 2 cores, each with 1 s of work in a pipeline of 1.5 s: 4 / 2 = 2 s, of which
0.5 s is contention. With 4 cores it is 1.5 s and none.
"""

from __future__ import annotations

from collections.abc import Sequence


def contention_seconds(works: Sequence[float], ranks_per_core: float, chain: float) -> float:
    """Seconds that a step takes longer than `chain`, which it takes where ranks have a core each.

    works: seconds of work of a rank of each stage, which all have as many ranks.

    >>> contention_seconds([1.0] * 4, 2.0, 1.5)
    0.5
    """
    if ranks_per_core == 1.0:
        return 0.0
    return max(ranks_per_core * sum(works) / len(works) - chain, 0.0)
