"""The seconds of one micro batch in a layer or in one of a model's ends, by pass.

A kernel is launched by a host thread, which needs its time too: the slower of the two sets the pace
(time.py).

By hand, two layers of 1 s forward and an end of 3 s: 2 x 1 + 3 = 5 s forward.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class OpTimes:
    """Seconds of a micro batch by pass: kernels (forward, gradients of inputs and of weights),
    messages over tp and cp that nothing hides, and the host's launches. dgrad, wgrad: gradients of
    inputs, with what is computed again, and of weights."""

    forward: float = 0.0
    dgrad: float = 0.0
    wgrad: float = 0.0
    tp_forward: float = 0.0
    tp_backward: float = 0.0
    cp_forward: float = 0.0
    cp_backward: float = 0.0
    host_forward: float = 0.0
    host_backward: float = 0.0

    def add(self, other: OpTimes, times: int = 1) -> None:
        """Add the seconds of `times` equal layers or ends."""
        for name in NAMES:
            setattr(self, name, getattr(self, name) + times * getattr(other, name))

    def again(self, forward: OpTimes) -> None:
        """Kernels and launches of this forward once more in backward; its messages are listed."""
        self.dgrad += forward.forward
        self.host_backward += forward.host_forward


NAMES = tuple(field.name for field in fields(OpTimes))
