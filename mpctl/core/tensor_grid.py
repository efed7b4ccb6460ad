"""The grid of the tensor-parallel ranks: which of its axes cut activations and weights.

The t ranks of a tensor-parallel group are one row of ranks (1d) or a grid. A rank's share of a
tensor follows from its coordinates on the axes of the grid, and every axis of a tensor's dimension
cuts it into equal blocks. Axes, the fastest-varying first, with q = sqrt(t/d) or l = t^(1/3):

    mode  axes of the grid          samples      hidden     features     samples
                                    (outside)                            (inside)
    1d    tp t                      -            -          tp           -
    2d    col q, row q              row          col        col          row
    2.5d  col q, row q, depth d     depth, row   col        col          depth, row
    3d    weight l, input l,        input,       output     input        output,
          output l                  weight                               weight

*Outside* is between the layers, *inside* is where a layer's matrices are split: after a
column-parallel and before a row-parallel product. *Features* are heads, MLP columns and vocabulary.
A matrix from hidden to features, its transpose, and the word table are cut so:

    mode  hidden -> features           features -> hidden           table [v, h]
    1d    features tp                  features tp                  v tp
    2d    hidden row, features col     features row, hidden col     v row, h col
    2.5d  as 2d, equal at each depth
    3d    hidden (output, weight),     features (input, weight),    v (input, weight),
          features input               hidden output                h output

so that a rank holds 1/t of them (2.5d: 1/q^2). Sources: Megatron-LM (arXiv 1909.08053) for 1d;
Optimus (2104.05343) for 2d; Tesseract (2105.14500) for 2.5d; 2105.14450 for 3d, whose axes are
named for what is exchanged along them in a product from outside to inside: the parts of its input,
of its weight, and of its output.

>>> grid = TensorGrid.of("3d", 8)
>>> grid.axes, grid.coords(6)
({'weight': 2, 'input': 2, 'output': 2}, {'weight': 0, 'input': 1, 'output': 1})
>>> grid.weight_axes(("ffn", "hidden"))
(('input',), ('output', 'weight'))
>>> [grid.block(8, axes, grid.coords(6)) for axes in grid.weight_axes(("ffn", "hidden"))]
[range(4, 8), range(4, 6)]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import isqrt, prod
from typing import NamedTuple

Axes = tuple[str, ...]
WeightAxes = tuple[Axes, ...]

FEATURES = frozenset({"heads", "kv_heads", "ffn", "shared_ffn", "vocab", "projected"})
MODES = ("1d", "2d", "2.5d", "3d")


class _Cuts(NamedTuple):
    """Axes that cut each dimension; of several axes of one dimension the first cuts it first.

    outer_samples, inner_samples: axes that cut the samples of a micro batch outside and inside.
    hidden, features: axes that cut the hidden states outside and the features inside. up, down: of
    a matrix from hidden to features, (hidden, features), and back, (features, hidden). table: of
    the word table, (vocabulary, hidden).
    """

    outer_samples: Axes
    inner_samples: Axes
    hidden: Axes
    features: Axes
    up: tuple[Axes, Axes]
    down: tuple[Axes, Axes]
    table: tuple[Axes, Axes]


_TP, _ROW, _COL = ("tp",), ("row",), ("col",)
_INPUT, _OUTPUT = ("input",), ("output",)
_SQUARE = (_ROW, _COL)
_CUTS = {
    "1d": _Cuts((), (), (), _TP, up=((), _TP), down=(_TP, ()), table=(_TP, ())),
    "2d": _Cuts(_ROW, _ROW, _COL, _COL, up=_SQUARE, down=_SQUARE, table=_SQUARE),
    "2.5d": _Cuts(("depth", "row"), ("depth", "row"), _COL, _COL, up=_SQUARE, down=_SQUARE, table=_SQUARE),
    "3d": _Cuts(
        ("input", "weight"),
        ("output", "weight"),
        _OUTPUT,
        _INPUT,
        up=(("output", "weight"), _INPUT),
        down=(("input", "weight"), _OUTPUT),
        table=(("input", "weight"), _OUTPUT),
    ),
}


def grid_axes(mode: str, tp: int, depth: int | None = None) -> dict[str, int] | None:
    """The axes of the grid of `tp` ranks with their sizes, the fastest-varying first; None where
    `tp` ranks form no grid of the mode.

    depth: d of 2.5d; None is the least d for which d q^2 = tp with q >= 2.

    >>> grid_axes("2.5d", 12), grid_axes("2d", 6), grid_axes("1d", 6)
    ({'col': 2, 'row': 2, 'depth': 3}, None, {'tp': 6})
    """
    if mode == "1d":
        return {"tp": tp}
    if mode == "3d":
        side = round(tp ** (1 / 3))
        is_cube = side**3 == tp and side > 1
        return {"weight": side, "input": side, "output": side} if is_cube else None
    if mode == "2d":
        side = isqrt(tp)
        return {"col": side, "row": side} if side**2 == tp and side > 1 else None
    top = isqrt(tp // (depth or 1))
    sides = (top,) if depth else range(top, 1, -1)
    for side in sides:  # the largest has the least depth
        d = depth or tp // side**2
        if d * side**2 == tp and side > 1:
            return {"col": side, "row": side, "depth": d}
    return None


def grid_depths(tp: int) -> list[int]:
    """The depths of 2.5d to compare: those with d <= q, as in Tesseract (arXiv 2105.14500), else
    the least; none where `tp` ranks form no grid.

    >>> grid_depths(64), grid_depths(12), grid_depths(6)
    ([1, 4], [3], [])
    """
    depths = [d for d in range(1, isqrt(tp) + 1) if d**3 <= tp and grid_axes("2.5d", tp, d)]
    least = grid_axes("2.5d", tp)
    return depths or ([least["depth"]] if least else [])


class RankGrid:
    """Ranks that together hold one copy of a stage's parameters of one view, along axes that cut
    these parameters (sharding.View). axes: sizes, the fastest-varying first."""

    axes: Mapping[str, int]

    @cached_property
    def size(self) -> int:
        """Ranks of the group."""
        return prod(self.axes.values())

    def parts(self, axes: Axes) -> int:
        """Ranks along these axes together."""
        return prod(self.axes[axis] for axis in axes)

    def coords(self, rank: int) -> dict[str, int]:
        """The coordinates of the group's rank `rank`, by axis."""
        coords, rest = {}, rank
        for axis, size in self.axes.items():
            rest, coords[axis] = divmod(rest, size)
        return coords

    def block(self, size: int, axes: Axes, coords: Mapping[str, int]) -> range:
        """The block of `range(size)` that a rank at these coordinates keeps of a dimension that the
        axes cut, the first one first. Raises ValueError where their parts do not divide it."""
        parts, index = 1, 0
        for axis in axes:
            parts, index = parts * self.axes[axis], index * self.axes[axis] + coords[axis]
        if size % parts:
            raise ValueError(f"{size} is not divisible by {parts}")
        return range(size // parts * index, size // parts * (index + 1))

    def weight_axes(self, dims: tuple[str, ...]) -> WeightAxes:
        """The axes that cut each dimension of a parameter with these named dimensions."""
        raise NotImplementedError

    def weight_parts(self, dims: tuple[str, ...]) -> int:
        """Into how many parts a parameter is cut; each is held by `size / parts` ranks."""
        parts = self._parts_of.get(dims)
        if parts is None:
            parts = self._parts_of[dims] = prod(map(self.parts, self.weight_axes(dims)))
        return parts

    @cached_property
    def _parts_of(self) -> dict[tuple[str, ...], int]:
        return {}

    def partial_kind(self, dims: tuple[str, ...]) -> str:
        """The kind of group (`groups`) over which the gradient of a parameter is a partial sum
        after backward; empty where it is complete."""
        return ""


@dataclass(frozen=True)
class DimGrid(RankGrid):
    """A grid on which one axis cuts a dimension, whatever the parameter. axis_of_dim: which one.

    >>> experts = DimGrid({"etp": 2, "ep": 4}, {"experts": "ep", "expert_ffn": "etp"})
    >>> experts.weight_parts(("experts", "expert_ffn", "hidden")), experts.weight_parts(("hidden",))
    (8, 1)
    """

    axes: Mapping[str, int] = field(hash=False)
    axis_of_dim: Mapping[str, str] = field(hash=False)

    def weight_axes(self, dims: tuple[str, ...]) -> WeightAxes:
        """See RankGrid."""
        return tuple((self.axis_of_dim[dim],) if dim in self.axis_of_dim else () for dim in dims)

    def partial_kind(self, dims: tuple[str, ...]) -> str:
        """See RankGrid. For a factor of an adapter: over the axis of its base that does not cut it."""
        whole = [axis for axis, size in self.axes.items() if size > 1 and (axis,) not in self.weight_axes(dims)]
        return "-".join(whole) if "rank" in dims else ""


@dataclass(frozen=True)
class TensorGrid(RankGrid):
    """The tensor-parallel ranks of one group, whose mode decides which axes cut a dimension. axes:
    sizes, the fastest-varying first. sequence_parallel: in 1d only; the sequence is cut over tp
    outside (arXiv 2205.05198)."""

    mode: str = "1d"
    axes: Mapping[str, int] = field(default_factory=lambda: {"tp": 1}, hash=False)
    sequence_parallel: bool = False

    @classmethod
    @lru_cache(maxsize=256)  # the layouts of a search share grids
    def of(cls, mode: str, tp: int, depth: int | None = None, *, sequence_parallel: bool = False) -> TensorGrid:
        """The grid of `tp` ranks. Raises ValueError where they form none of this mode."""
        axes = grid_axes(mode, tp, depth)
        if axes is None:
            raise ValueError(f"{tp} ranks are no grid of tensor_mode {mode}")
        return cls(mode, axes, sequence_parallel)

    @property
    def _cuts(self) -> _Cuts:
        return _CUTS[self.mode]

    @property
    def hidden_axes(self) -> Axes:
        """Axes that cut the hidden states between layers."""
        return self._cuts.hidden

    @property
    def feature_axes(self) -> Axes:
        """Axes that cut heads, MLP columns and vocabulary of activations."""
        return self._cuts.features

    def sample_axes(self, *, inside: bool = False) -> Axes:
        """Axes that cut the samples of a micro batch, the first cuts first."""
        return self._cuts.inner_samples if inside else self._cuts.outer_samples

    @cached_property
    def sample_parts(self) -> int:
        """Into how many parts the samples of a micro batch are cut, outside and inside alike."""
        return self.parts(self._cuts.outer_samples)

    @cached_property
    def hidden_parts(self) -> int:
        """Into how many parts the hidden states are cut between layers."""
        return self.parts(self._cuts.hidden)

    @cached_property
    def feature_parts(self) -> int:
        """Into how many parts heads, MLP columns and vocabulary of activations are cut."""
        return self.parts(self._cuts.features)

    def weight_axes(self, dims: tuple[str, ...]) -> WeightAxes:
        """The axes that cut each dimension of a parameter with these named dimensions.

        Matrices are [out, in], as torch has them; `("vocab", "hidden")` is the word table, and a
        separate head is cut like it. Vectors and position tables are cut as the activations that
        they are added to or multiplied with; their other dimensions are not cut.
        """
        cuts, last = self._cuts, dims[-1]
        if len(dims) == 2 and dims[0] == "vocab":
            return cuts.table
        if len(dims) == 2 and dims[0] in FEATURES and last in ("hidden", "joined"):
            return cuts.up[::-1]
        if len(dims) == 2 and dims[0] == "hidden" and last in FEATURES:
            return cuts.down[::-1]
        return tuple(self._vector_axes(dim) for dim in dims)

    def _vector_axes(self, dim: str) -> Axes:
        if dim == "hidden":
            return self._cuts.hidden
        return self._cuts.features if dim in FEATURES else ()

    def partial_kind(self, dims: tuple[str, ...]) -> str:
        """See RankGrid. For a vector: over the axes that cut the samples of the activations that it
        is applied to. For a matrix: over depth. For parameters that 1d does not split, with
        sequence parallelism: over tp."""
        if self.mode == "1d":
            is_whole = not any(self.weight_axes(dims))
            if dims[-1] == "head_size" or dims[0] == "summed_rank":  # each rank has different heads
                return "tp" if self.size > 1 else ""
            return "tp" if self.sequence_parallel and is_whole and self.size > 1 else ""
        is_matrix = len(dims) == 2 and (dims[0] in FEATURES or dims[-1] in FEATURES)
        if is_matrix:
            return self.kind_of(tuple(axis for axis in ("depth",) if axis in self.axes))
        return self.kind_of(self.sample_axes(inside=dims[-1] in FEATURES))

    def kind_of(self, axes: Axes) -> str:
        """The name of the group over these axes, those of size 1 left out: `row`, `row-depth`."""
        return "-".join(axis for axis in self.axes if axis in axes and self.axes[axis] > 1)

    @cached_property
    def groups(self) -> dict[str, Axes]:
        """The groups that a rank needs in addition to that of all tp ranks, by name: those of each
        axis and those over several axes that cut samples."""
        if self.mode == "1d":
            return {}
        kinds: dict[str, Axes] = {axis: (axis,) for axis, size in self.axes.items() if size > 1}
        for is_inside in (False, True):
            axes = tuple(a for a in self.axes if a in self.sample_axes(inside=is_inside))
            kinds.setdefault(self.kind_of(axes), axes)
        return kinds
