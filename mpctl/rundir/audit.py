"""What an audit of a step says of a rank: kernels, bytes and seconds by module and pass.

A row is one module, layers merged (`layers.*.attention.qkv`), in one pass. Its figures are of one
time that it runs: one layer and one micro batch, or once a step. By hand, 2 layers and 3 micro
batches: a row of `layers.*.mlp` stands for `times` = 6 of them.
"""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

Pass = Literal["forward", "backward", "recompute", "step"]
PASSES: tuple[Pass, ...] = ("forward", "backward", "recompute", "step")
"""step: what is done once a step, outside of the passes of micro batches."""


class AuditFigures(TypedDict):
    """launches: kernels started; bytes: what they read and wrote; least_bytes: each tensor that
    comes in from elsewhere read once and each that is needed later written once; flops: of matrix
    products and attention; seconds: on the job's device, and least_seconds: of one kernel a product
    and least_bytes; None where the device's speed is not known."""

    launches: float
    bytes: float
    least_bytes: float
    flops: float
    seconds: float | None
    least_seconds: float | None


class AuditRow(AuditFigures):
    """A module in a pass. times: how many such a step has; operations: launches by operation of
    torch, the most first."""

    module: str
    phase: Pass
    times: float
    operations: dict[str, float]


class AuditTotal(AuditFigures):
    """All rows of one kind of layer (`layers.*`), or of what lies outside of layers, in one pass:
    one layer of one micro batch, or all that a step does there."""

    part: str
    phase: Pass


class StepAudit(TypedDict):
    """An audit of one rank's step. rows: what loses most first; totals: a layer of each kind, and
    the rest of the step; unknown: operations of torch of which it is not known how many kernels
    they are, counted as one each; assumption: what the seconds are made of."""

    rows: list[AuditRow]
    totals: list[AuditTotal]
    unknown: list[str]
    assumption: str
