"""One collective, as it is counted and timed.

>>> Collective("all_reduce", "tp", 8, "float32").bytes  # of two numbers, over two ranks or twenty
8
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mpctl.collectives import Kind


@dataclass(frozen=True)
class Collective:
    """One collective of a run.

    kind: as in mpctl/collectives.py, or receive, which timers see too. axis: name of
    the group. bytes: of the whole message, over all ranks; what one rank has for all others in an
    all_to_all. dtype: of the elements, in torch's words.
    """

    kind: Kind | Literal["receive"]
    axis: str
    bytes: int
    dtype: str
