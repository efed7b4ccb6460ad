"""The seconds of one micro batch in a layer or in one of a model's ends, by pass.

A kernel is launched by a host thread, which needs its time too: the slower of the two sets the
pace.

By hand, two layers of 1 s forward and an end of 3 s: 2 x 1 + 3 = 5 s forward.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from mpctl.spec.runtime import MemoryPasses

SHARPNESS = 6  # of the passage from a pace set by kernels to one set by their host


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

    def pass_over(
        self, passes: MemoryPasses, size: float, bandwidth: float, *, backward: bool
    ) -> None:
        """Add passes over a tensor of `size` bytes at bytes/s of memory, of backward where there
        is one."""
        self.forward += passes.forward * size / bandwidth
        if backward:
            self.dgrad += passes.backward * size / bandwidth

    def again(self, forward: OpTimes) -> None:
        """Kernels and launches of this forward once more in backward; its messages are listed."""
        self.dgrad += forward.forward
        self.host_backward += forward.host_forward


NAMES = tuple(field.name for field in fields(OpTimes))


def pace(seconds: tuple[float, float]) -> float:
    """The slower of kernels and their host, and somewhat more where they are near each other."""
    faster, slower = sorted(seconds)
    if not faster:
        return slower
    return float(slower * (1 + (faster / slower) ** SHARPNESS) ** (1 / SHARPNESS))


def cover_backwards(pp: int, chunks: int) -> float:
    """Backwards of a stage beside which its gradients may be reduced and parameters gathered: the
    last one; of several chunks all but one are done while the last pp micro batches pass the
    others. By hand, 4 stages of 2 chunks: 1 + 3 / 2."""
    return 1 + (pp - 1) * (1 - 1 / chunks)
