"""Which documents validate: a stateless function of (seed, document index).

Document i validates if h(seed, i) < fraction * 2^64, where h is SplitMix64 (Steele, Lea and
Flood, OOPSLA 2014, figure 17) at step i of the stream that `seed` starts. The smallest hash always
validates and the largest always trains, so neither side is empty from two documents on.
By hand: fraction 0.02 of 1000 documents is about 20, and the same 20 in every later run.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def splitmix64(seed: int, count: int) -> NDArray[np.uint64]:
    """The first `count` outputs of SplitMix64 from `seed`, uint64 [count]."""
    steps = np.arange(1, count + 1, dtype=np.uint64)
    z = np.uint64(seed) + steps * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def validates(documents: int, fraction: float, seed: int) -> NDArray[np.bool_]:
    """True where a document validates, bool [documents]; documents >= 2, 0 < fraction < 1."""
    hashes = splitmix64(seed, documents)
    chosen = hashes < np.uint64(fraction * 2**64)
    chosen[hashes.argmin()] = True
    chosen[hashes.argmax()] = False
    return chosen
