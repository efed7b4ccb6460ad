"""Which rank a loss or gradient that is not finite came from.

The sums over replicas and stages carry one rank's NaN or infinity to all others. Only when such a
sum is not finite, and so the same on every rank, do the ranks look closer: they compute the step
once more, from the same samples and the same noise, and each looks at its own gradients before they
are summed. A healthy step pays nothing for this.

All ranks learn what each one found. The rank that is blamed records its failure at once, the others
a moment later, so that the launcher does not end it before its record is on disk.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mpctl.runtime.mesh import Mesh
from mpctl.runtime.step_guard import StepRefused
from mpctl.runtime.zero.gradients import BucketGradients

TEXT_BYTES = 200
ECHO_SECONDS = 2.0
NOTHING, PARAMETER, LOSS, GRADIENT = 0, 1, 2, 3


class NotFinite(StepRefused):
    """A sum over the ranks is not finite; is_echo: it came from another rank."""


@dataclass
class GradientInspector:
    """Finds what is not finite on one rank. names: the name of each of its parameters;
    bad_gradients: names of those whose gradient is not finite."""

    names: Mapping[Tensor, str]
    bad_gradients: list[str] = field(default_factory=list)

    def look(self, store: BucketGradients) -> None:
        """Called with each bucket before it is summed, in the order of backward."""
        if store.full is None or self.bad_gradients:
            return
        pairs = zip(store.shard.parameters, store.shard.views(store.full), strict=True)
        self.bad_gradients += [self.names[p] for p, view in pairs if not _is_finite(view)]

    def evidence(self, loss: float) -> tuple[int, str]:
        """What is wrong on this rank, the likeliest cause first."""
        bad = [name for p, name in self.names.items() if _has_memory(p) and not _is_finite(p)]
        if bad:
            return PARAMETER, f"its parameter {bad[0]} is not finite"
        named = self.bad_gradients
        gradient = f"its gradient of {named[0]} is not finite" if named else ""
        if not math.isfinite(loss):
            return LOSS, f"its loss is {loss}" + (f", and {gradient}" if gradient else "")
        return (GRADIENT, gradient) if gradient else (NOTHING, "")


def locate_nonfinite(
    what: str, mesh: Mesh, evidence: tuple[int, str], *, rollback: int | None = None
) -> NotFinite:
    """The failure that this rank is to raise; every rank calls it together.

    what: `the gradient norm of step 3 is nan`. rollback: of StepRefused.
    """
    by_rank = _share_evidence(mesh, evidence)
    ranked = sorted(
        (_order(mesh, rank, kind), rank) for rank, (kind, _) in enumerate(by_rank) if kind
    )
    if not ranked:
        none = "of each rank by itself, loss and gradients are finite when computed once more"
        return NotFinite(f"{what}: {none}", is_echo=False, rollback=rollback)
    rank = ranked[0][1]
    if rank != mesh.rank:
        time.sleep(ECHO_SECONDS)
    words = f"{what}: first on rank {rank}, {by_rank[rank][1]}"
    return NotFinite(words, is_echo=rank != mesh.rank, rollback=rollback)


def _order(mesh: Mesh, rank: int, kind: int) -> tuple[int, int]:
    """Parameters before losses before gradients; gradients of the last stage first, since backward
    hands them on to the stages before."""
    return kind, -mesh.topology.coords(rank)["pp"]


def _share_evidence(mesh: Mesh, evidence: tuple[int, str]) -> list[tuple[int, str]]:
    """Every rank's evidence, by rank: a byte for its kind, then its text, each in a row."""
    kind, text = evidence
    row = bytes([kind]) + text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
    table = torch.zeros(mesh.world.size, len(row), dtype=torch.float32)
    table[mesh.rank] = torch.tensor(list(row), dtype=torch.float32)
    rows = mesh.world.all_reduce(table.to(mesh.device)).to(torch.uint8).tolist()
    return [(r[0], bytes(r[1:]).rstrip(b"\0").decode(errors="replace")) for r in rows]


def _has_memory(tensor: Tensor) -> bool:
    """Whether the values are here: between layers, ZeRO 3 keeps none."""
    return tensor.untyped_storage().nbytes() >= tensor.nbytes


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())
