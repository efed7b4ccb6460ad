"""Messages of a layer that overlap with kernels, and the seconds hidden.

A message sent during a product or an attention costs only the part that outlasts the kernel, plus the
kernel's slowdown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpctl.model.operators.matmul import MatMul
from mpctl.plan.estimate.communication import Message, Phase
from mpctl.plan.estimate.kernels import OpTimes
from mpctl.plan.estimate.network import Network
from mpctl.spec.runtime import OverlapShares

PIECES = ("all_gather", "reduce_scatter")


class Hiding(NamedTuple):
    """Subtracts from a layer's messages over tp and cp the seconds that its kernels hide.

    In 1d a column product overlaps the message of its input's gradient with its dW. The gathers and
    scatters of sequence parallelism can overlap in pieces with the product that reads or writes
    them, where the switches of their link let kernels send (Transformer Engine's userbuffers). A
    product of 2d or 2.5d is computed in q `steps`, a column product whose input mpctl gathers in
    halves in 2, and all but one of its messages of a kind overlap with them. Keys and values of
    other ranks of cp travel while attention works on those at hand. No more is hidden than the work
    takes; the work itself slows down by `drag` times the hidden seconds.

    By hand, share 0.5, a gather of 3 s during a product of 2 s: min(3, 2) x 0.5 = 1 s is hidden.
    """

    overlap: OverlapShares
    network: Network
    steps: int

    def product(
        self, work: OpTimes, product: MatMul, messages: Sequence[Message], seconds: tuple[float, float, float]
    ) -> None:
        """Hide messages of one product. seconds: of one of its steps, for the result, the input's
        gradient and the weight's."""
        own = [message for message in messages if message.product == product.name]
        if not own:
            return
        forward, inputs, weights = seconds
        if weights:
            self._weights(work, own, weights)
        if self.steps > 1:
            self._in_steps(work, own, self.steps * forward, self.steps * (inputs + weights))
        elif any(message.cover == "product" for message in own):
            self._in_steps(work, own, forward, inputs + weights, steps=2)
        elif not product.is_head and self.overlap.products and self.network.multicasts("tp"):
            self._in_pieces(work, own, forward, inputs + weights)

    def keys_and_values(self, work: OpTimes, scores: OpTimes, share: float) -> None:
        """Hide messages over cp during a share of attention of these seconds."""
        work.cp_forward -= self.overlap.cp * min(work.cp_forward, share * scores.forward)
        work.cp_backward -= self.overlap.cp * min(work.cp_backward, share * scores.dgrad)

    def _weights(self, work: OpTimes, own: Sequence[Message], seconds: float) -> None:
        """Hide the backward message of a column product during its dW of `seconds`."""
        covered = (m for m in own if m.cover == "weight_gradient")
        hidden = self.overlap.tp * min(sum(map(self.network.seconds, covered)), seconds)
        work.tp_backward -= hidden
        work.wgrad += self.overlap.drag * hidden

    def _in_pieces(self, work: OpTimes, own: Sequence[Message], ahead: float, back: float) -> None:
        """Hide gathers and scatters during the product. ahead, back: seconds of its forward, and of
        both gradients."""

        def hidden(phase: Phase, seconds: float) -> float:
            pieces = (m for m in own if m.phase == phase and m.cover is None and m.kind in PIECES)
            sent = sum(map(self.network.seconds, pieces))
            return self.overlap.products * min(sent, seconds)

        self._take(work, hidden, ahead, back)

    def _in_steps(self, work: OpTimes, own: Sequence[Message], ahead: float, back: float, steps: int = 0) -> None:
        """Hide all but one of the messages of a kind of a product in steps; that one is sent before
        the first step or after the last. ahead, back: seconds of all steps of a forward, and of
        both gradients."""

        def hidden(phase: Phase, seconds: float) -> float:
            sent = sum(
                self.network.seconds(message) * (message.count - 1) / message.count
                for message in own
                if (message.cover, message.phase) == ("product", phase)
            )
            return self.overlap.tp * min(sent, seconds * (parts - 1) / parts)

        parts = steps or self.steps
        self._take(work, hidden, ahead, back)

    def _take(self, work: OpTimes, hidden: Callable[[Phase, float], float], ahead: float, back: float) -> None:
        forward, backward = hidden("forward", ahead), hidden("backward", back)
        again = hidden("recompute", ahead)
        work.tp_forward -= forward
        work.tp_backward -= backward + again
        work.forward += self.overlap.drag * forward
        work.dgrad += self.overlap.drag * (backward + again)
