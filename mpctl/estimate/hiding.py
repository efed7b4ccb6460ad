"""What of a layer's messages over tp and cp goes on beside the layer's own kernels.

A column product of 1d sends its input's gradient beside the product of its weights' gradient. The
gathers and scatters of sequence parallelism can go in pieces beside the very product that needs or
makes them, where the switches of their link let kernels send (Transformer Engine's userbuffers). A
product of 2d or 2.5d is computed in q steps, and all but one of its messages of a kind go beside
them. Keys and values of the next ranks of cp travel while attention works on those at hand. Never
is more hidden than the work takes; the work itself slows down by `drag` of what it hides.

By hand, share 0.5, a gather of 3 s beside a product of 2 s: min(3, 2) x 0.5 = 1 s is hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpctl.estimate.message import Message, Phase
from mpctl.estimate.network import Network
from mpctl.estimate.op_times import OpTimes
from mpctl.operators.matmul import MatMul
from mpctl.spec.runtime import OverlapShares

PIECES = ("all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Hiding:
    """Takes from a layer's messages what its kernels hide.

    steps: products that one matrix product is computed in.
    """

    overlap: OverlapShares
    network: Network
    steps: int

    def product(
        self, work: OpTimes, product: MatMul, messages: Sequence[Message],
        seconds: tuple[float, float, float],
    ) -> None:  # fmt: skip
        """Messages of one product beside it. seconds: of one of its steps, for the result, the
        input's gradient and the weight's."""
        own = [message for message in messages if message.product == product.name]
        forward, inputs, weights = seconds
        if weights:
            self._weights(work, own, weights)
        if self.steps > 1:
            self._in_steps(work, own, self.steps * forward, self.steps * (inputs + weights))
        elif not product.is_head and self.overlap.products and self.network.multicasts("tp"):
            self._in_pieces(work, own, forward, inputs + weights)

    def keys_and_values(self, work: OpTimes, scores: OpTimes) -> None:
        """Messages over cp beside attention of these seconds."""
        work.cp_forward -= self.overlap.cp * min(work.cp_forward, scores.forward)
        work.cp_backward -= self.overlap.cp * min(work.cp_backward, scores.dgrad)

    def _weights(self, work: OpTimes, own: Sequence[Message], seconds: float) -> None:
        """What a column product sends backward beside its own dW of so many seconds."""
        covered = (m for m in own if m.cover == "weight_gradient")
        hidden = self.overlap.tp * min(sum(map(self.network.seconds, covered)), seconds)
        work.tp_backward -= hidden
        work.wgrad += self.overlap.drag * hidden

    def _in_pieces(self, work: OpTimes, own: Sequence[Message], ahead: float, back: float) -> None:
        """Gathers and scatters beside the product. ahead, back: seconds of its forward, and of both
        gradients."""

        def hidden(phase: Phase, seconds: float) -> float:
            pieces = (m for m in own if m.phase == phase and m.cover is None and m.kind in PIECES)
            sent = sum(map(self.network.seconds, pieces))
            return self.overlap.products * min(sent, seconds)

        self._take(work, hidden, ahead, back)

    def _in_steps(self, work: OpTimes, own: Sequence[Message], ahead: float, back: float) -> None:
        """What a product in steps sends beside them: all but one of its messages of a kind, which
        go before the first step or behind the last. ahead, back: seconds of all steps of a
        forward, and of both gradients."""

        def hidden(phase: Phase, seconds: float) -> float:
            sent = sum(
                self.network.seconds(message) * (message.count - 1) / message.count
                for message in own
                if (message.cover, message.phase) == ("product", phase)
            )
            return self.overlap.tp * min(sent, seconds * (self.steps - 1) / self.steps)

        self._take(work, hidden, ahead, back)

    def _take(
        self, work: OpTimes, hidden: Callable[[Phase, float], float], ahead: float, back: float
    ) -> None:
        """Take from the messages of each pass what `hidden` says of it."""
        forward, backward = hidden("forward", ahead), hidden("backward", back)
        again = hidden("recompute", ahead)
        work.tp_forward -= forward
        work.tp_backward -= backward + again
        work.forward += self.overlap.drag * forward
        work.dgrad += self.overlap.drag * (backward + again)
