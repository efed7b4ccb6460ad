"""What messages of once a step add to it: gradients, gathered parameters, sums over tp and pp.

Gradients go beside the last backward, as far as the runtime overlaps them and they fit into it. The
parameters that ZeRO 1 and 2 gather afterwards go beside the next step's first forward where the
profile says how much of them (`overlap.gather`), else with the gradients. The rest of a step's
messages nothing hides.

By hand, 3 s of gradients of which 0.8 are hidden and 1 s of parameters of which 0.8 are, beside a
backward of 2 s and a forward of 0.5 s: 2 s and 0.5 s are hidden, 1.5 s remain.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from mpctl.estimate.message import Message
from mpctl.estimate.network import Network
from mpctl.spec.runtime import OverlapShares


class ClosingTimes(NamedTuple):
    """Seconds of a stage in messages once a step, by group, as far as nothing hides them; tp: over
    any group of its grid."""

    dp_cp: float
    tp: float
    pp: float
    world: float


def closing_times(
    messages: Iterable[Message],
    network: Network,
    overlap: OverlapShares,
    backward: float,
    forward: float,
) -> ClosingTimes:
    """Seconds of a stage's messages once a step, beside `backward` seconds of a last backward and
    `forward` seconds of a first forward that may hide some of them; 0 where nothing may be
    hidden."""
    covered = gradients = parameters = 0.0
    rest = {"dp_cp": 0.0, "tp": 0.0, "pp": 0.0, "world": 0.0}
    for message in messages:
        seconds = network.seconds(message)
        if message.cover == "last_backward":
            covered += seconds
            if message.what == "parameters" and overlap.gather is not None:
                parameters += overlap.gather * seconds
            else:
                gradients += overlap.dp * seconds
        else:
            rest[message.axis if message.axis in rest else "tp"] += seconds
    hidden = min(gradients, backward) + min(parameters, forward)
    rest["dp_cp"] += covered - hidden + overlap.drag * hidden
    return ClosingTimes(**rest)
