"""Which stages of a pipeline take equally long: those that hold the same parts.

By hand, 8 equal layers on 4 stages with tied embeddings: the first, the last and the two between
them, which share a key; three keys.
"""

from __future__ import annotations

from collections.abc import Hashable

from mpctl.layout.job_layout import JobLayout


def stage_keys(layout: JobLayout) -> list[Hashable]:
    """What the seconds of each stage follow from, whatever its number: equal keys take as long."""
    keys: list[Hashable] = []
    shared = layout.shared_parameters
    for stage in range(len(layout.stages)):
        slices = layout.stage_slices(stage)
        ends = [id(end) for part in slices for end in part.ends]
        layers = [n for part in slices for count, flow in part.blocks for n in (count, id(flow))]
        names = [name for name, stages in shared.items() if stage in stages]
        keys.append((*ends, -1, *layers, *names, stage == layout.loss_stage))
    return keys
