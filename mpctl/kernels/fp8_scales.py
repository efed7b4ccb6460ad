"""Delayed scaling: the scales of all fp8 operands of a model, from what earlier steps have seen.

A table has a row for each linear layer of the whole model and a column for X, W and dY. In a step
every cast raises the entry of its tensor to the largest element that it met. After the step the
entries are maximised over all ranks, in one message of 12 bytes a layer, and become the newest of
the last `length` ones; the largest of these gives the scale of the next step (Transformer Engine's
DelayedScaling with amax_compute_algo "max"; arXiv 2209.05433, section 3.2).

So the scale of a tensor is that of the whole tensor, over all micro batches, replicas, positions
and tensor-parallel ranks: it depends on no layout, bit for bit, and neither do the values that are
cast. Every rank knows all rows, so that any of them can save them, and a resumed run may cut its
stages otherwise. In the first step nothing is known: each tensor is scaled by its own largest
element.

An entry that is not finite, or 0, is replaced by the largest of the steps before: a step that is
skipped for an overflow must not leave a scale behind.

By hand, length 2, one layer whose X had 3.0, then 1.0, then 1.0: scales 128, 128, then 256.

Letters: n linear layers of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mpctl.kernels.fp8 import Operand, largest_exponents, operand_scales
from mpctl.kernels.fp8_operands import Fp8Operands, ScaleRow
from mpctl.transport.group import Group


class Fp8Scales:
    """The table of a model; `names` are those of its linear layers, on any rank in the same order,
    or none where nothing is scaled with a delay.

    history: [length, n, 3], the largest elements of the last steps; steps: how many of them there
    were, at most `length`.
    """

    def __init__(self, names: Sequence[str], length: int, device: torch.device) -> None:
        self.names, self.steps = tuple(names), 0
        shape = (len(names), len(Operand))
        self.history = torch.zeros(length, *shape, device=device)
        self.amax = torch.zeros(shape, device=device)
        self.scales = torch.ones(shape, device=device)
        self.inverses = torch.ones(shape, device=device)
        self.exponents = largest_exponents(device)
        self._bound: dict[str, Fp8Operands] = {}

    def bind(self, layers: Mapping[str, Fp8Operands]) -> None:
        """Let these layers, by name, read their scales here. Raises ValueError for a name that the
        table does not have."""
        if unknown := sorted(layers.keys() - set(self.names)):
            raise ValueError(f"linear layers without a row of scales: {', '.join(unknown)}")
        self._bound.update(layers)
        self._hand_out()

    def end_step(self, world: Group) -> None:
        """The step has been computed: agree with all ranks, which call together, on what was seen,
        and choose the scales of the next one. The host waits for nothing on CUDA."""
        if not self.names:
            return
        own = self.amax.nan_to_num_(nan=torch.inf, posinf=torch.inf)  # a maximum may lose a NaN
        seen = world.all_reduce(own, "max")
        newest = torch.where(torch.isfinite(seen) & (seen > 0), seen, self.history.amax(0))
        self.history.copy_(torch.cat((self.history[1:], newest[None])))
        self._choose(self.steps + 1)
        self.amax.zero_()

    def state(self) -> dict[str, list[list[float]]]:
        """What a checkpoint keeps: by layer the largest elements of X, W and dY of each step that
        is known, oldest first."""
        known = self.history[len(self.history) - self.steps :].transpose(0, 1).tolist()
        return dict(zip(self.names, known, strict=True))

    def load(self, state: Mapping[str, Sequence[Sequence[float]]]) -> None:
        """From a checkpoint. Layers that it does not have, and all where it is of another dtype,
        begin with the largest element of the first step; of a longer history the end counts."""
        length = len(self.history)
        kept = {name: list(rows)[-length:] for name, rows in state.items() if rows}
        if not self.names or not set(self.names) <= kept.keys():
            return
        steps = min(len(kept[name]) for name in self.names)
        known = [kept[name][-steps:] for name in self.names]
        values = torch.tensor(known, dtype=torch.float32).transpose(0, 1)
        self.history[length - steps :] = values.to(self.history.device)
        self._choose(steps)

    def _choose(self, steps: int) -> None:
        """Scales of the next step from the largest elements of the last `steps` ones. Layers keep
        reading the same memory, so that what is compiled or captured goes on."""
        largest = self.history.amax(0)
        self.scales.copy_(operand_scales(largest, self.exponents))
        torch.reciprocal(self.scales, out=self.inverses)
        was_known, self.steps = self.steps > 0, min(steps, len(self.history))
        if not was_known:
            self._hand_out()

    def _hand_out(self) -> None:
        rows = {name: row for row, name in enumerate(self.names)}
        for name, operands in self._bound.items():
            row = rows[name]
            known = (self.scales[row], self.inverses[row]) if self.steps else (None, None)
            operands.row = ScaleRow(self.amax[row], *known)
