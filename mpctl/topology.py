"""The rank law: which rank sits where along every axis, by arithmetic alone.

Axes are listed fastest-varying first; with the default order (Megatron, arXiv 2104.04473)

    rank = tp + tp_size * (cp + cp_size * (dp + dp_size * pp)).

torchrun numbers ranks node by node, so node = rank // gpus_per_node. Groups come in Megatron's
order: by first rank, members ascending. Nothing here counts ranks one by one: a group whose members
are evenly spaced is a `range`.

>>> t = Topology.of({"tp": 2, "dp": 2, "pp": 4}, gpus_per_node=8)
>>> [list(group) for group in t.groups("tp")][:2], list(t.group(5, "pp"))
([[0, 1], [2, 3]], [1, 5, 9, 13])
>>> t.coords(13), t.node(13)
({'tp': 1, 'cp': 0, 'dp': 0, 'pp': 3}, 1)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from math import lcm, prod

from mpctl.axes import AXIS_NAMES, DEFAULT_ORDER, GROUP_KINDS, parse_order

Group = Sequence[int]


@dataclass(frozen=True)
class Topology:
    """sizes: ranks along each axis; order: axes fastest first; split_stage: where an encoder ends
    and a decoder begins, when one pipeline holds both (its first stage needs the embedding too)."""

    sizes: Mapping[str, int]
    order: tuple[str, ...]
    gpus_per_node: int
    split_stage: int | None = None

    @classmethod
    def of(
        cls,
        sizes: Mapping[str, int],
        *,
        order: str = DEFAULT_ORDER,
        gpus_per_node: int | None = None,
        split_stage: int | None = None,
    ) -> Topology:
        """Raises ValueError when the order is not one of the axes."""
        full = {axis: sizes.get(axis, 1) for axis in AXIS_NAMES}
        world = prod(full.values())
        return cls(full, parse_order(order, full), gpus_per_node or world, split_stage)

    @cached_property
    def world_size(self) -> int:
        return prod(self.sizes.values())

    @cached_property
    def strides(self) -> dict[str, int]:
        """Distance in ranks between neighbours along each axis, in the axes' order."""
        strides, span = {}, 1
        for axis in self.order:
            strides[axis] = span
            span *= self.sizes[axis]
        return strides

    @property
    def nodes(self) -> int:
        return -(-self.world_size // self.gpus_per_node)

    def coords(self, rank: int) -> dict[str, int]:
        return {axis: rank // self.strides[axis] % self.sizes[axis] for axis in AXIS_NAMES}

    def rank(self, **coords: int) -> int:
        """The rank at these coordinates; axes left out are 0."""
        return sum(self.strides[axis] * index for axis, index in coords.items())

    def node(self, rank: int) -> int:
        return rank // self.gpus_per_node

    def local_rank(self, rank: int) -> int:
        return rank % self.gpus_per_node

    def group_size(self, *axes: str) -> int:
        return prod(self.sizes[axis] for axis in axes)

    def group(self, rank: int, *axes: str) -> Group:
        """The ranks that differ from `rank` only along `axes`."""
        coords = self.coords(rank)
        base = rank - sum(coords[axis] * self.strides[axis] for axis in axes)
        return self._members(base, axes)

    def groups(self, *axes: str) -> list[Group]:
        """Every group over `axes`: all groups of a million ranks in tenths of a second."""
        if self.group_size(*axes) == 1:
            return list(zip(range(self.world_size)))
        bases = self._offsets([axis for axis in self.order if axis not in axes])
        spacing = self._spacing(axes)
        if spacing is not None:
            span = spacing * self.group_size(*axes)
            return list(map(range, bases, [base + span for base in bases], repeat(spacing)))
        offsets = self._offsets(axes)
        return [[base + offset for offset in offsets] for base in bases]

    def find_group(self, kind: str, rank: int) -> Group | None:
        """The group of a kind (`tp`, `mp`, `embedding`, ...) that `rank` is in, if it is in one:
        a middle stage is in no embedding group."""
        group = self._narrow(kind, self.group(rank, *GROUP_KINDS[kind]))
        return group if rank in group else None

    def kind_groups(self, kind: str) -> list[Group]:
        groups = self.groups(*GROUP_KINDS[kind])
        return groups if kind not in self._stages else [self._narrow(kind, g) for g in groups]

    def straddling(self, axis: str) -> tuple[list[Group], int]:
        """The first few groups of an axis that leave their node, and how many there are in all.

        Blocks and nodes repeat after lcm(block, node) ranks, so that one period is looked at.
        """
        reach = self.strides[axis] * (self.sizes[axis] - 1)
        block = self.strides[axis] * self.sizes[axis]
        if self.gpus_per_node % block == 0 or reach == 0:
            return [], 0
        period = min(lcm(block, self.gpus_per_node), self.world_size)
        bases = [
            start + inner
            for start in range(0, period, block)
            for inner in range(self.strides[axis])
            if self.node(start + inner) != self.node(start + inner + reach)
        ]
        periods, rest = divmod(self.world_size, period)  # a last node may be partly used
        count = len(bases) * periods + sum(base < rest for base in bases)
        starts = range(0, self.world_size, period)[:4]
        first = [start + base for start in starts for base in bases][: min(4, count)]
        return [self._members(base, (axis,)) for base in first], count

    @cached_property
    def _stages(self) -> dict[str, tuple[int, ...]]:
        """Which members of a pp group belong to the embedding kinds."""
        split = () if self.split_stage is None else (self.split_stage,)
        last = self.sizes["pp"] - 1
        return {
            "embedding": tuple(sorted({0, *split, last})),
            "position_embedding": tuple(sorted({0, *split})),
        }

    def _narrow(self, kind: str, group: Group) -> Group:
        stages = self._stages.get(kind)
        return group if stages is None else tuple(group[stage] for stage in stages)

    def _members(self, base: int, axes: Sequence[str]) -> Group:
        spacing = self._spacing(axes)
        if spacing is not None:
            return range(base, base + spacing * self.group_size(*axes), spacing)
        return [base + offset for offset in self._offsets(axes)]

    def _spacing(self, axes: Sequence[str]) -> int | None:
        """Distance between members if they are evenly spaced: one axis, or neighbours."""
        used = [axis for axis in self.order if axis in axes and self.sizes[axis] > 1]
        if not used:
            return 1
        whole = self.strides[used[0]] * self.group_size(*used)
        reach = self.strides[used[-1]] * self.sizes[used[-1]]
        return self.strides[used[0]] if whole == reach else None

    def _offsets(self, axes: Sequence[str]) -> list[int]:
        """Every combination of coordinates along `axes`, as rank offsets, ascending."""
        offsets = [0]
        for axis in self.order:
            if axis in axes and self.sizes[axis] > 1:
                steps = range(0, self.strides[axis] * self.sizes[axis], self.strides[axis])
                offsets = [step + offset for step in steps for offset in offsets]
        return offsets
