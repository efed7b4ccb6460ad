"""Assignment of checkpoint shards to ranks: the first replica of each distinct part writes it.

Ranks that differ only along certain axes hold the same part of a parameter; the first of them
writes it. For the parameters of dense layers these are cp and dp. Parameters that are split over
axes of another view of the same ranks (`Topology.view`), such as experts over ep, have replicas
along other axes, and so more ranks that write. A rank writes one shard, with all parameters of
which it is the first replica.

Ranks on which tp repeats a parameter all write it, so that each has to read only its shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpctl.core.topology import Topology
from mpctl.model.layout.job_layout import JobLayout
from mpctl.records.checkpoint.manifest import ShardFile


@dataclass(frozen=True)
class Replicas:
    """Location of the replicas of some parameters. topology: the ranks along the axes that split
    these parameters; axes: those that repeat them."""

    topology: Topology
    axes: tuple[str, ...] = ("cp", "dp")

    def is_first(self, rank: int) -> bool:
        """Whether a rank holds the first replica of its parts of these parameters.

        >>> Replicas(Topology.of({"tp": 2, "dp": 2})).is_first(1)
        True
        """
        return self.topology.group(rank, *self.axes)[0] == rank

    @property
    def writers(self) -> list[int]:
        return sorted(group[0] for group in self.topology.groups(*self.axes))


def layout_replicas(layout: JobLayout, topology: Topology | None = None) -> list[Replicas]:
    """The replicas of each view of a layout, the dense one first. topology: that of the layout, if
    it differs from the job's."""
    topology = topology or layout.topology
    groups = [view.replica_group for view in layout.other_views]
    others = ((topology.view_of(group), group) for group in groups)
    return [
        Replicas(topology, tuple(sorted(topology.kinds[layout.dense.replica_group]))),
        *(Replicas(seen, seen.kinds[group]) for seen, group in others),
    ]


def shard_files(views: Sequence[Replicas]) -> dict[int, ShardFile]:
    """The shard of each rank that writes one. views: of all parameters, the dense ones first.

    Ranks of the dense view come first, stage by stage; those that write only for other views
    follow. A shard has the coordinates of its rank along the axes of these views that do not repeat
    its content.

    >>> dense = Topology.of({"tp": 2, "dp": 2, "pp": 2})
    >>> {rank: shard.name for rank, shard in shard_files([Replicas(dense)]).items()}
    {0: 'shard-0', 1: 'shard-1', 4: 'shard-2', 5: 'shard-3'}
    """
    ranks = sorted(views[0].writers, key=lambda rank: (_coords(views[0], rank).get("pp", 0), rank))
    others = {rank for view in views[1:] for rank in view.writers}
    ranks += sorted(others - set(ranks))
    return {
        rank: ShardFile(name=f"shard-{number}", coords=coords)
        for number, (rank, coords) in enumerate(
            (rank, {k: v for view in views for k, v in _coords(view, rank).items()}) for rank in ranks
        )
    }


def _coords(view: Replicas, rank: int) -> dict[str, int]:
    coords, axes = view.topology.whole_coords(rank), view.topology.whole_sizes
    return {axis: coords[axis] for axis in axes if axis not in view.axes}
