"""Routing of all ranks in a step: the balance loss and the load of experts and ranks.

Each rank has a record of its own layers and tokens (train/layers/routing_log.py). After the last micro
batch the tokens of each expert are summed over all ranks in one message; losses and near ties are
summed with the step's status (step_record.py). So every rank has the same figures, and what follows
from them, the correction biases, needs no further message.

By hand, one layer of 4 experts over ep 2, tokens (3, 1, 2, 2): the mean is 2 an expert, 4 a rank;
expert load 3 / 2 = 1.5, rank load 4 / 4 = 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mpctl.records.rundir.rank_files import RoutingFigures
from mpctl.train.layers.routing_log import RoutingLog, RoutingTotals
from mpctl.train.transport.group import Group


@dataclass
class StepRouting:
    """The routing of one rank's training steps.

    log: the record of its routers, without layers where the model has no experts; world: all ranks;
    samples: of the global batch; ranks: among which the experts of a layer are divided (ep).
    keeps_counts: whether the next step depends on the tokens of the last one. totals: of the last
    step.
    """

    log: RoutingLog = field(default_factory=RoutingLog)
    world: Group = field(default_factory=Group)
    samples: int = 1
    ranks: int = 1
    keeps_counts: bool = False
    totals: RoutingTotals | None = None

    @property
    def is_used(self) -> bool:
        """Whether the model has layers with experts."""
        return bool(self.log.names)

    def begin(self, scale: float) -> None:
        """Begin a step. scale: the factor of its losses (fp16), which auxiliary losses have too."""
        if self.is_used:
            self.log.begin(scale / self.samples)

    def end(self) -> None:
        """End the step's micro batches; all ranks call it. On CUDA the host does not wait."""
        if self.is_used:
            self.totals = self.log.end(self.world)

    def apply(self) -> None:
        """Update the correction biases after a step that was not skipped."""
        if self.totals is not None:
            self.log.apply(self.totals)

    def state(self) -> dict[str, dict[str, list[float]] | dict[str, list[int]]]:
        """Return the fields of routing in the manifest of a checkpoint."""
        counts = self.log.last_counts() if self.keeps_counts else {}
        return {"router_bias": self.log.biases(), "router_counts": counts}

    def shares(self) -> list[Tensor]:
        """This rank's shares of the auxiliary loss and of the near ties, float64 on the device, to
        be summed over all ranks; none without experts."""
        if self.totals is None:
            return []
        return [self.totals.losses.sum() / self.samples, self.totals.near_ties.sum().double()]

    def loads(self) -> list[Tensor]:
        """The tokens of the fullest expert and of the fullest rank of ep over the mean, averaged
        over the layers: float64 on the device, equal on all ranks; none without experts."""
        if self.totals is None:
            return []
        counts = self.totals.counts.double()
        by_rank = counts.view(len(counts), self.ranks, -1).sum(-1)
        return [_fullest(counts), _fullest(by_rank)]

    def figures(self, sums: Sequence[float], known: Sequence[float]) -> RoutingFigures:
        """The step's fields of a StepRecord. sums: `shares` of all ranks together; known: `loads`;
        empty without experts."""
        if self.totals is None:
            return {}
        (loss, near), (expert, rank) = sums, known
        figures: RoutingFigures = {"expert_load": expert, "rank_load": rank, "near_ties": int(near)}
        if math.isfinite(loss):
            figures["aux_loss"] = loss
        return figures


def _fullest(counts: Tensor) -> Tensor:
    """The largest of each row [n, m] over its mean, averaged over the rows; 1 of rows of zeros."""
    total = counts.sum(1)
    largest = counts.amax(1) * counts.shape[1] / total
    return torch.where(total > 0, largest, 1.0).mean()
