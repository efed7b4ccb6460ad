"""What layouts of a search have in common, by which they are bounded and timed together."""

from __future__ import annotations

from typing import NamedTuple

from mpctl.planning.layout_settings import LayoutSettings
from mpctl.spec.parallel import ScheduleName
from mpctl.tensor_grid import TensorGrid

AXES = ("tp", "cp", "dp", "pp")
DEFAULT_ORDER = "-".join(AXES)


class LayerKey(NamedTuple):
    """What the seconds of a layer follow from, whatever the pipeline."""

    tp: int
    cp: int
    micro_batch_size: int
    sequence_parallel: bool
    recompute: str
    tensor_mode: str = "1d"
    tensor_depth: int | None = None

    @property
    def grid(self) -> TensorGrid:
        """The tensor-parallel ranks as a grid."""
        splits = self.sequence_parallel
        return TensorGrid.of(self.tensor_mode, self.tp, self.tensor_depth, sequence_parallel=splits)


class AxesKey(NamedTuple):
    """A layer key with the sizes of the other axes; microbatches: of a replica in one step."""

    layer: LayerKey
    dp: int
    pp: int
    microbatches: int


class LayoutFamily(NamedTuple):
    """Layouts that differ in MEMBER_SETTINGS only: axes and pipeline are the same."""

    axes: AxesKey
    vpp: int
    schedule: ScheduleName
    stage_balance: str

    @property
    def plain(self) -> LayoutSettings:
        """The family's layout without ZeRO; its order is left empty."""
        layer, dp, pp, _ = self.axes
        return LayoutSettings(
            layer.tp, layer.cp, dp, pp, self.vpp, self.schedule, self.stage_balance,
            layer.micro_batch_size, layer.recompute, layer.sequence_parallel, 0, "",
            layer.tensor_mode, layer.tensor_depth,
        )  # fmt: skip

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Sizes of tp, cp, dp and pp."""
        return self.axes.layer.tp, self.axes.layer.cp, self.axes.dp, self.axes.pp

    @property
    def replicas(self) -> int:
        """Ranks over which gradients are reduced and ZeRO shards."""
        return self.axes.dp * self.axes.layer.cp
