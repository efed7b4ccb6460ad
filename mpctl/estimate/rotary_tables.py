"""Bytes of the tables of rotary positions, which a rank keeps from its first step on.

The layers of a rank share one table a law of angles (kernels/rotary.py, RotaryTables): layers with
a window may have a base of their own, and then there are two. Each is cosines and sines of half of
the turned columns, in float32, for the positions that the rank holds.

By hand, 2048 positions of heads of 128: 2048 x 2 x 64 x 4 = 1 MiB, of however many layers.
"""

from __future__ import annotations

from mpctl.estimate.activation_shapes import ActivationShapes
from mpctl.layout.job_layout import JobLayout
from mpctl.spec.model import ModelSpec


def rotary_table_bytes(layout: JobLayout, stage: int, shapes: ActivationShapes) -> int:
    """Bytes of the tables that a rank of this stage keeps; 0 where no layer of it has any, and for
    other software, whose tables are not planned."""
    model = layout.model
    if not shapes.kernels.keeps_tables or model.position != "rotary":
        return 0
    layers = (layer for part in layout.stage_slices(stage) for layer in part.layers)
    laws = {_law(model, layer) for layer in layers}
    turned = int(model.head_size * model.rotary_fraction)
    return len(laws) * shapes.seq * turned * max(4, shapes.value)


def _law(model: ModelSpec, layer: int) -> tuple[float, bool]:
    """What the angles of a layer follow from: a base, and whether it is stretched."""
    own = model.window_rotary_base
    if own is None or model.window_of(layer) is None:
        return model.rotary_base, model.rotary_scaling is not None
    return own, False
