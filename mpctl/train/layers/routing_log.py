"""Record of a model's routers in a step, with biases and fractions for the next: `RoutingLog`.

Correction biases and fractions follow from integers, the numbers of tokens by layer and expert,
which are summed exactly over all ranks in one message a step: neither depends on the layout.

    correction bias   after a step b_i += rate sign(mean c - c_i), where c_i tokens went to expert
                      i (arXiv 2408.15664, algorithm 1). By hand, rate .5: counts (5, 1, 3), mean 3,
                      add (-.5, .5, 0).
    fractions         f_i = c_i / sum c of the last step, for a balance loss over the global batch
                      (arXiv 2501.11873), whose f must be known before the first backward of a
                      step; 1/E before the first one, when such a loss has no gradient

The log is a table with a row for each layer with experts of the full model, as `Fp8Scales` is: any
rank can save it, and a resumed run may have other stages. Auxiliary losses enter by their gradients
(`routing.with_loss`) where their layer is, times `scale`.

>>> log = RoutingLog(["layers.0.mlp"], experts=3, bias_rate=0.5)
>>> log.begin(scale=1.0)
>>> counted = log.row("layers.0.mlp").counts.add_(torch.tensor([5, 1, 3]))
>>> log.apply(log.end(Group()))
>>> log.biases()
{'layers.0.mlp': [-0.5, 0.5, 0.0]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpctl.train.transport.group import Group


class RoutingRow(NamedTuple):
    """The record of one layer, in memory that stays the same.

    bias: float32 [E], added to scores when experts are chosen. fractions: float64 [E], of the last
    step. counts: int64 [E], near_ties: int64, losses: float64 [2] (balance, z), summed over a step.
    """

    bias: Tensor
    fractions: Tensor
    counts: Tensor
    near_ties: Tensor
    losses: Tensor


class RoutingTotals(NamedTuple):
    """A step's record, on the device, by layer in the order of `RoutingLog.names`.

    counts: int64 [n, E], tokens of all ranks by expert. near_ties: int64 [n], tokens of this rank
    whose choice rounding could change. losses: float64 [n, 2], balance and z with their
    coefficients, summed over the samples and positions of this rank: summed over all ranks, and
    divided by the samples of a step, they are the auxiliary losses of the step.
    """

    counts: Tensor
    near_ties: Tensor
    losses: Tensor


class RoutingLog:
    """The record of a rank. names: layers with experts of the full model, such as `layers.3.mlp`,
    in the same order on every rank; without any, rows are made when a layer asks for one, and
    nothing is sent. experts: E. bias_rate: of the correction biases' update; None if routers have
    none.

    scale: factor of the gradients of auxiliary losses, which are sums over samples. is_training:
    between `begin` and `end`; outside, as in an evaluation, nothing is recorded and auxiliary
    losses are not computed.
    """

    def __init__(
        self,
        names: Sequence[str] = (),
        experts: int = 1,
        *,
        bias_rate: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.names, self.bias_rate, self.scale = tuple(names), bias_rate, 0.0
        self.is_training = False
        self._table = _RoutingTable.of((len(names), experts), device)
        self._last = torch.zeros_like(self._table.counts)
        self._alone: dict[str, RoutingRow] = {}

    def row(self, name: str, experts: int | None = None, device: torch.device | str | None = None) -> RoutingRow:
        """The row of a layer. experts, device: of a row that is made on demand. Raises ValueError
        for a layer that is not in the table."""
        if name in self.names:
            return RoutingRow(*(tensor[self.names.index(name)] for tensor in self._table))
        if name not in self._alone:
            if self.names or experts is None:
                raise ValueError(f"{name} is not among the layers with experts of this log")
            table = _RoutingTable.of((1, experts), device)
            self._alone[name] = RoutingRow(*(tensor[0] for tensor in table))
        return self._alone[name]

    def begin(self, scale: float) -> None:
        """Begin a training step. scale: 1 / samples of the global batch, times the loss scale of
        fp16."""
        self.scale, self.is_training = scale, True
        for row in (self._table, *self._alone.values()):
            for record in (row.counts, row.near_ties, row.losses):
                record.zero_()

    def end(self, world: Group) -> RoutingTotals:
        """End the micro batches of a step: sum the counts over all ranks, which call it together,
        in one message of 8 E bytes a layer. The host does not wait for the device."""
        self.is_training, table = False, self._table
        counts = table.counts.clone()
        if self.names:
            counts = world.all_reduce(counts)
        return RoutingTotals(counts, table.near_ties.clone(), table.losses.clone())

    def apply(self, totals: RoutingTotals) -> None:
        """Update biases and fractions after a step; not called for one that is skipped."""
        counts = totals.counts
        if self.bias_rate is not None:
            # mean - c has the sign of sum - E c, in integers
            lacking = counts.sum(-1, keepdim=True) - counts.shape[1] * counts
            self._table.bias.add_(lacking.sign(), alpha=self.bias_rate)
        self._last.copy_(counts)
        self._choose_fractions()

    def biases(self) -> dict[str, list[float]]:
        """The correction biases by layer, for a checkpoint; empty if routers have none."""
        if self.bias_rate is None:
            return {}
        return dict(zip(self.names, self._table.bias.tolist(), strict=True))

    def last_counts(self) -> dict[str, list[int]]:
        """Tokens of the last applied step by layer and expert, for a checkpoint."""
        return dict(zip(self.names, self._last.tolist(), strict=True))

    def load(
        self, biases: Mapping[str, Sequence[float]], last_counts: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        """Restore from a checkpoint. A layer that is not in it stays as it is. Raises ValueError
        for another number of experts."""
        for own, saved in ((self._table.bias, biases), (self._last, last_counts or {})):
            for i, name in enumerate(self.names):
                if name not in saved:
                    continue
                if len(saved[name]) != own.shape[1]:
                    raise ValueError(f"{name}: a state of {len(saved[name])} experts for {own.shape[1]}")
                own[i] = torch.tensor(saved[name], dtype=own.dtype, device=own.device)
        self._choose_fractions()

    def _choose_fractions(self) -> None:
        total = self._last.sum(-1, keepdim=True)
        even = 1 / self._last.shape[1]
        self._table.fractions.copy_(torch.where(total > 0, self._last.double() / total, even))


class _RoutingTable(RoutingRow):
    """Rows of several layers, [n, ..] each."""

    @classmethod
    def of(cls, shape: tuple[int, int], device: torch.device | str | None) -> _RoutingTable:
        layers, experts = shape
        return cls(
            bias=torch.zeros(shape, dtype=torch.float32, device=device),
            fractions=torch.full(shape, 1 / experts, dtype=torch.float64, device=device),
            counts=torch.zeros(shape, dtype=torch.int64, device=device),
            near_ties=torch.zeros(layers, dtype=torch.int64, device=device),
            losses=torch.zeros(layers, 2, dtype=torch.float64, device=device),
        )
