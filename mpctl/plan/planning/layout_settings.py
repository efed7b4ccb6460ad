"""The settings of a job that make up its layout, as one value, and in words.

A layout is everything that may differ between two ways to run one job: axis sizes, their order, how
the pipeline is cut and run, micro batch, recomputation, sequence parallelism, ZeRO, tensor mode. A
search compares layouts by these values; a plan that does not fit names changes of them.

>>> layout = LayoutSettings(tp=8, dp=32, pp=16, vpp=6, recompute="full")
>>> layout_text(layout)
'tp 8 dp 32 pp 16 vpp 6, micro batch 1, recompute full'
>>> changed_settings(layout, layout._replace(tp=4, dp=64, recompute="none"))
{'parallel.tp': 4, 'training.recompute': 'none'}
>>> sorted([layout._replace(zero_size=4), layout])[0] == layout  # what is not set comes first
True
>>> layout_text(layout._replace(tensor_mode="2.5d", tensor_depth=2, recompute="none"))
'tp 8 (2.5d, depth 2) dp 32 pp 16 vpp 6, micro batch 1'
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from mpctl.core.axes import AXES, AXIS_NAMES, DEFAULT_ORDER, FILLING
from mpctl.core.tensor_grid import TensorGrid, grid_axes
from mpctl.core.units import bytes_text, seconds_text
from mpctl.spec.job import JobSpec
from mpctl.spec.parallel import ScheduleName

SettingValue = int | str | bool | None
TRAINING = ("micro_batch_size", "recompute", "moe_overlap")  # settings of [training]; the others: [parallel]


class _Fields(NamedTuple):
    """The fields as type checkers know them: the sizes of the axes come first."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1
    schedule: ScheduleName = "1f1b"
    stage_balance: str = "even"
    micro_batch_size: int = 1
    recompute: str = "none"
    sequence_parallel: bool = False
    zero: int = 0
    zero_size: int | None = None
    order: str = DEFAULT_ORDER
    tensor_mode: str = "1d"
    tensor_depth: int | None = None
    cp_comm: str | None = None
    cp_a2a_size: int | None = None
    pipeline_layout: str | None = None
    moe_overlap: bool = False


if not TYPE_CHECKING:  # the axes are those of AXES
    _DEFAULTS = dict.fromkeys(AXIS_NAMES, 1) | _Fields._field_defaults
    _NAMES = (*AXIS_NAMES, *(name for name in _Fields._fields if name not in AXIS_NAMES))
    _Fields = namedtuple("_Fields", _NAMES, defaults=[_DEFAULTS[name] for name in _NAMES])


class LayoutSettings(_Fields):
    """The settings of a layout under their names in a job file; dp follows from the other axes.
    tensor_depth: d of 2.5d, filled in where the job does not state it; None in the other tensor
    modes."""

    __slots__ = ()

    def __lt__(self, other: tuple[Any, ...]) -> bool:
        return _in_order(self) < _in_order(other)

    def __le__(self, other: tuple[Any, ...]) -> bool:
        return _in_order(self) <= _in_order(other)

    def __gt__(self, other: tuple[Any, ...]) -> bool:
        return _in_order(self) > _in_order(other)

    def __ge__(self, other: tuple[Any, ...]) -> bool:
        return _in_order(self) >= _in_order(other)

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks along every axis."""
        values: tuple[Any, ...] = self  # sizes come first
        return dict(zip(AXIS_NAMES, values, strict=False))

    def with_sizes(self, sizes: Mapping[str, int]) -> LayoutSettings:
        """The same layout with these sizes of axes."""
        values: dict[str, Any] = {**sizes}
        return self._replace(**values)

    @property
    def replicas(self) -> int:
        """Ranks over which gradients are reduced and, without zero_size, ZeRO shards: dp x cp."""
        return self.dp * self.cp

    @property
    def copies(self) -> int:
        """How often ZeRO's shares of dense parameters exist; 1 where zero_size does not divide the
        replicas, which a rule refuses."""
        size = self.zero_size if self.zero else None
        return self.replicas // size if size and self.replicas % size == 0 else 1

    @property
    def rank_sizes(self) -> tuple[int, ...]:
        """The sizes along every axis of both views: fields that determine where ranks are placed,
        with the order."""
        sizes: tuple[Any, ...] = self[: len(AXIS_NAMES)]
        return (*sizes, self.ep, self.etp)

    @property
    def edp(self) -> int:
        """Ranks that hold the same experts and reduce their gradients together; they fill what ep
        and etp leave of tp, cp and dp."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    @property
    def expert_sizes(self) -> dict[str, int]:
        """Ranks along the axes of the experts' view."""
        return {"etp": self.etp, "ep": self.ep, "edp": self.edp, "pp": self.pp}

    @property
    def grid(self) -> TensorGrid:
        """The tensor-parallel ranks as a grid."""
        splits = self.sequence_parallel
        return TensorGrid.of(self.tensor_mode, self.tp, self.tensor_depth, sequence_parallel=splits)

    @property
    def layer_key(self) -> tuple[Any, ...]:
        """The fields that determine the seconds of a layer; the pipeline's are not among them."""
        key: tuple[Any, ...] = _OF_LAYER(self)
        return key


_OF_LAYER = itemgetter(
    *(number for number, axis in enumerate(AXES) if axis.in_layer),
    *map(
        LayoutSettings._fields.index,
        ("ep", "etp", "micro_batch_size", "sequence_parallel", "recompute", "tensor_mode", "tensor_depth"),
    ),
    *map(LayoutSettings._fields.index, ("cp_comm", "cp_a2a_size")),
)


class NearbyLayout(NamedTuple):
    """A layout that fits the devices, close to one that does not.

    changes: the settings in which it differs, `{"parallel.tp": 4}`; peak_bytes: on the device of
    the fullest rank.
    """

    changes: dict[str, SettingValue]
    step_seconds: float
    peak_bytes: int

    @property
    def text(self) -> str:
        """`tp 4, recompute full (2.10 s a step, 71.3 GiB)`."""
        step = seconds_text(self.step_seconds)
        return f"{changes_text(self.changes)} ({step} a step, {bytes_text(self.peak_bytes)})"


def _in_order(settings: tuple[Any, ...]) -> tuple[tuple[bool, Any], ...]:
    """Sort key of layouts: None comes before every value, because it does not compare with numbers."""
    return tuple((value is not None, value) for value in settings)


def layout_of(job: JobSpec) -> LayoutSettings:
    """The layout of a complete job."""
    parallel = set(LayoutSettings._fields) - set(TRAINING)
    values: dict[str, Any] = {**job.parallel.model_dump(include=parallel), **job.sizes}
    values |= {key: getattr(job.training, key) for key in TRAINING}
    return LayoutSettings(**{**values, "tensor_depth": _depth(job)})


def _depth(job: JobSpec) -> int | None:
    """The depth of the job's grid; where its tp forms no grid, the depth that the job states."""
    p = job.parallel
    if p.tensor_mode != "2.5d":
        return None
    axes = grid_axes(p.tensor_mode, p.tp, p.tensor_depth)
    return axes["depth"] if axes else p.tensor_depth


def layout_text(layout: LayoutSettings) -> str:
    """`tp 8 dp 32 pp 16 vpp 6, micro batch 1, recompute full`: all settings that are not 1, none or
    off."""
    axes = {**layout.sizes, "ep": layout.ep, "etp": layout.etp, "vpp": layout.vpp}
    settings = [
        (layout.schedule not in ("1f1b", "interleaved"), layout.schedule),
        (layout.stage_balance != "even", "stages by cost"),
        (layout.pipeline_layout is not None, f"layout {layout.pipeline_layout}"),
        (True, f"micro batch {layout.micro_batch_size}"),
        (layout.recompute != "none", f"recompute {layout.recompute}"),
        (layout.sequence_parallel, "sequence parallel"),
        (layout.zero > 0, f"zero {layout.zero}" + f" over {layout.zero_size}" * (layout.copies > 1)),
        (
            layout.cp_comm is not None,
            f"cp by {layout.cp_comm}" + f" of {layout.cp_a2a_size}" * bool(layout.cp_a2a_size),
        ),
        (layout.moe_overlap, "moe overlap"),
        (layout.order != DEFAULT_ORDER, f"order {layout.order}"),
    ]
    mode = tensor_mode_text(layout)
    texts = (f"{axis} {size}{mode * (axis == 'tp')}" for axis, size in axes.items() if size > 1)
    sizes = " ".join(texts)
    return ", ".join([sizes or "one rank", *(text for is_shown, text in settings if is_shown)])


def tensor_mode_text(layout: LayoutSettings) -> str:
    """The text after the size of tp: ` (2d)`, ` (2.5d, depth 2)`; nothing for 1d."""
    if layout.tensor_mode == "1d":
        return ""
    depth = f", depth {layout.tensor_depth}" if layout.tensor_depth else ""
    return f" ({layout.tensor_mode}{depth})"


def changed_settings(here: LayoutSettings, there: LayoutSettings) -> dict[str, SettingValue]:
    """The settings of a job that turn one layout into another: `{"parallel.tp": 4}`.

    dp is not among them: it follows from the other axes. A tensor mode without a depth has the
    value None, which removes the setting.
    """
    values = there._asdict()
    return {
        setting_name(name): value for name, value in values.items() if name != FILLING and value != getattr(here, name)
    }


def setting_name(name: str) -> str:
    """The full name of a layout's field in a job: `tp` -> `parallel.tp`."""
    table = "training" if name in TRAINING else "parallel"
    return f"{table}.{name}"


def changes_text(changes: Mapping[str, SettingValue]) -> str:
    """`tp 4, recompute full` of the settings in which a layout differs."""
    return ", ".join(setting_text(name, value) for name, value in changes.items())


def setting_text(name: str, value: SettingValue) -> str:
    """`training.micro_batch_size` and 2 -> `micro batch size 2`; true and false as on and off."""
    words = name.split(".")[-1].replace("_", " ")
    if value is None:
        return f"no {words}"
    shown = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
    return f"{words} {shown}"
