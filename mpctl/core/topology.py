"""The rank law: the coordinate of every rank along every axis, by arithmetic alone.

Axes are listed fastest-varying first; with the default order (Megatron, arXiv 2104.04473)

    rank = tp + tp_size * (cp + cp_size * (dp + dp_size * pp)).

torchrun numbers ranks node by node, so node = rank // gpus_per_node. Groups come in Megatron's
order: by first rank, members ascending. Nothing here counts ranks one by one: a group whose members
are evenly spaced is a `range`.

An axis may be factored into several, whose groups are inside its groups (`factored`): tp as a grid
of rows and columns for tensor parallelism in two dimensions. The same ranks may be numbered along
other axes as well (`view`): Megatron's experts, with ep and edp where the dense layers have cp and
dp. A topology that is joined with such a view (`joined`) has the groups of both.

>>> t = Topology.of({"tp": 2, "dp": 2, "pp": 4}, gpus_per_node=8)
>>> [list(group) for group in t.groups("tp")][:2], list(t.group(5, "pp"))
([[0, 1], [2, 3]], [1, 5, 9, 13])
>>> t.coords(13), t.node(13)
({'tp': 1, 'cp': 0, 'dp': 0, 'pp': 3}, 1)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import repeat
from math import lcm, prod

from mpctl.core.axes import AXES, DEFAULT_ORDER, UNIONS, Axis, group_kinds, order_hint, parse_order
from mpctl.core.errors import InputError, Issue
from mpctl.core.units import plural

Group = Sequence[int]
WORLD = "world"  # the group of all ranks; not a group kind, as there is only one


@dataclass(frozen=True)
class Topology:
    """The coordinates of every rank of a world along every axis.

    sizes: number of ranks along each axis. order: the axes, fastest-varying first. gpus_per_node:
    ranks on each node. split_stage: the pipeline stage at which an encoder ends and a decoder
    begins, where one pipeline holds both (its first stage needs the embedding too). unions: names
    for several axes together, such as mp = tp x pp; the name of a union may be used wherever an
    axis is expected. parts: for factored axes, the axes that they were split into. views: the same
    ranks along other axes, whose groups it has too.
    """

    sizes: Mapping[str, int]
    order: tuple[str, ...]
    gpus_per_node: int
    split_stage: int | None = None
    unions: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: UNIONS)
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    views: tuple[Topology, ...] = ()

    @classmethod
    def of(
        cls,
        sizes: Mapping[str, int],
        *,
        order: str = DEFAULT_ORDER,
        gpus_per_node: int | None = None,
        split_stage: int | None = None,
        axes: Iterable[Axis] | None = None,
    ) -> Topology:
        """The topology of these sizes, 1 for axes left out; one node where gpus_per_node is absent.
        axes: all axes, by default tp, cp, dp and pp.

        Raises InputError for an unknown axis, a size below 1, and an invalid order.
        """
        _require_table(sizes)
        full = {axis.name: sizes.get(axis.name, 1) for axis in axes or AXES}
        issues = [_unknown("axis", name, full) for name in sizes if name not in full]
        given = sizes if gpus_per_node is None else {**sizes, "gpus_per_node": gpus_per_node}
        parsed = _read_order(order, full, [*issues, *_bad_sizes(given)])
        stages = full.get("pp", 1)
        if split_stage is not None and not (isinstance(split_stage, int) and 0 <= split_stage < stages):
            raise InputError.of(
                "no-such-stage",
                "split_stage",
                f"{split_stage} is none of {plural(stages, 'stage')}",
                f"use 0 to {stages - 1}",
            )
        return cls(full, parsed, gpus_per_node or prod(full.values()), split_stage)

    def factored(
        self, axis: str, parts: Mapping[str, int], unions: Mapping[str, tuple[str, ...]] | None = None
    ) -> Topology:
        """The same ranks with one axis split into several, the fastest-varying first.

        unions: names for several of the new axes together.

        The groups of `axis` stay unchanged. Raises InputError for an unknown axis, and where the
        sizes of the parts do not multiply to the size of the axis.

        >>> grid = Topology.of({"tp": 4, "dp": 2}).factored("tp", {"col": 2, "row": 2})
        >>> [list(group) for group in grid.groups("row")]
        [[0, 2], [1, 3], [4, 6], [5, 7]]
        >>> list(grid.group(6, "tp")), grid.coords(6)["row"], grid.coords(6)["col"]
        ([4, 5, 6, 7], 1, 0)
        """
        if not isinstance(axis, str) or axis not in self.sizes:
            raise InputError([_unknown("axis", axis, self.sizes)])
        _require_product(parts, self.sizes[axis], f"{axis} is {self.sizes[axis]}")
        sizes: dict[str, int] = {}
        for name, size in self.sizes.items():
            sizes |= parts if name == axis else {name: size}
        order = [part for name in self.order for part in (parts if name == axis else (name,))]
        named = (
            {axis: tuple(parts)}
            | dict(unions or {})
            | {
                name: tuple(p for part in members for p in (parts if part == axis else (part,)))
                for name, members in self.unions.items()
            }
        )
        became = {**self.parts, axis: tuple(parts)}
        return replace(self, sizes=sizes, order=tuple(order), unions=named, parts=became)

    def view(
        self, sizes: Mapping[str, int], *, order: str, unions: Mapping[str, tuple[str, ...]] | None = None
    ) -> Topology:
        """The same ranks along other axes, whose sizes multiply to the world size. unions: names
        for several of these axes together. Unions of axes that both have with the same groups, such
        as those of embeddings over pp, stay.

        Raises InputError where the sizes do not multiply to it, or where the order does not name
        these axes.

        >>> dense = Topology.of({"tp": 2, "dp": 8})
        >>> experts = dense.view({"ep": 8, "edp": 2}, order="ep-edp")
        >>> [list(group) for group in experts.groups("edp")][:2]
        [[0, 8], [1, 9]]
        """
        world = plural(self.world_size, "rank")
        _require_product(sizes, self.world_size, f"the world has {world}")
        parsed = _read_order(order, sizes)
        seen = Topology(dict(sizes), parsed, self.gpus_per_node, unions={})
        shared = {axis for axis in sizes if self._extent(axis) == seen._extent(axis)}
        kept = {name: axes for name, axes in self.unions.items() if shared.issuperset(axes)}
        split = self.split_stage if "pp" in shared else None
        return replace(seen, unions={**(unions or {}), **kept}, split_stage=split)

    def joined(self, view: Topology) -> Topology:
        """The same topology with the groups of a view as well. Coordinates are along this
        topology's axes; for a name that both have, its groups are used.

        >>> both = Topology.of({"tp": 2, "dp": 8})
        >>> both = both.joined(both.view({"ep": 8, "edp": 2}, order="ep-edp"))
        >>> list(both.kinds), list(both.group(9, "edp")), list(both.group(9, "tp"))
        (['tp', 'cp', 'dp', 'pp', 'dp_cp', 'mp', 'embedding', 'position_embedding', 'ep', 'edp'], \
[1, 9], [8, 9])
        """
        return replace(self, views=(*self.views, view))

    def view_of(self, *names: str) -> Topology:
        """The numbering of the ranks that has these axes or kinds of groups: this one, or one of
        its views."""
        views = (v for v in self.views if any(n not in self._own_kinds for n in names))
        return next((v for v in views if all(name in v.kinds for name in names)), self)

    def _extent(self, axis: str) -> tuple[int, int] | None:
        """Size and stride of an axis, which determine its groups; None for an unknown axis."""
        return (self.sizes[axis], self.strides[axis]) if axis in self.sizes else None

    @cached_property
    def kinds(self) -> dict[str, tuple[str, ...]]:
        """Every group kind: each axis by itself, one that was factored before its parts, then the
        unions of several, then those that only the views have."""
        others = {name: axes for view in self.views for name, axes in view.kinds.items()}
        return self._own_kinds | {n: axes for n, axes in others.items() if n not in self._own_kinds}

    @cached_property
    def _own_kinds(self) -> dict[str, tuple[str, ...]]:
        whole = {axis: self.unions[axis] for axis in self.parts}
        return whole | group_kinds(self.sizes, self.unions)

    @cached_property
    def whole_sizes(self) -> dict[str, int]:
        """Ranks along each axis before factoring: `tp` for a grid of tp ranks."""
        return {axis: self.group_size(axis) for axis in self._wholes(self.sizes)}

    @property
    def whole_order(self) -> tuple[str, ...]:
        """The order of these axes, fastest-varying first."""
        return self._wholes(self.order)

    def _wholes(self, axes: Iterable[str]) -> tuple[str, ...]:
        whole = {part: axis for axis, parts in self.parts.items() for part in parts}
        return tuple(dict.fromkeys(whole.get(axis, axis) for axis in axes))

    @cached_property
    def world_size(self) -> int:
        """Number of ranks."""
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
        """Number of nodes that the ranks fill; the last one may be filled in part."""
        return -(-self.world_size // self.gpus_per_node)

    def coords(self, rank: int) -> dict[str, int]:
        """Coordinate of a rank along every axis, in the order of `sizes`."""
        self._require_rank(rank)
        return {axis: rank // self.strides[axis] % size for axis, size in self.sizes.items()}

    def whole_coords(self, rank: int) -> dict[str, int]:
        """Coordinate of a rank along every axis, a factored axis coming before its parts, then
        along those that only the views have.

        >>> grid = Topology.of({"tp": 4, "dp": 2}).factored("tp", {"col": 2, "row": 2})
        >>> grid.whole_coords(6)
        {'tp': 2, 'col': 0, 'row': 1, 'cp': 0, 'dp': 1, 'pp': 0}
        """
        coords, found = self.coords(rank), dict[str, int]()
        for axis in self.whole_sizes:
            if axis in self.parts:
                found[axis] = self.group(rank, axis).index(rank)
            found |= {part: coords[part] for part in self.parts.get(axis, (axis,))}
        for view in self.views:
            found |= {axis: at for axis, at in view.coords(rank).items() if axis not in found}
        return found

    def rank(self, **coords: int) -> int:
        """The rank at these coordinates; axes left out are 0. Raises InputError for an unknown axis
        and for a coordinate beyond its size."""
        for axis, index in coords.items():
            if axis not in self.sizes:
                raise InputError([_unknown("axis", axis, self.sizes)])
            if not 0 <= index < self.sizes[axis]:
                size = self.sizes[axis]
                raise InputError.of(
                    "no-such-coordinate", axis, f"{index} is not below its size of {size}", f"use 0 to {size - 1}"
                )
        return sum(self.strides[axis] * index for axis, index in coords.items())

    def node(self, rank: int) -> int:
        """Number of the node that a rank runs on."""
        self._require_rank(rank)
        return rank // self.gpus_per_node

    def local_rank(self, rank: int) -> int:
        """Number of a rank on its node, from 0."""
        self._require_rank(rank)
        return rank % self.gpus_per_node

    def group_size(self, *axes: str) -> int:
        """Number of ranks in one group over these axes or unions of axes."""
        seen = self.view_of(*axes)
        return seen._size(seen._single(axes))

    def group(self, rank: int, *axes: str) -> Group:
        """The ranks that differ from `rank` only along `axes`."""
        seen = self.view_of(*axes)
        single, coords = seen._single(axes), seen.coords(rank)
        base = rank - sum(coords[axis] * seen.strides[axis] for axis in single)
        return seen._members(base, single)

    def groups(self, *axes: str) -> list[Group]:
        """Every group over `axes`: all groups of a million ranks in tenths of a second."""
        if (seen := self.view_of(*axes)) is not self:
            return seen.groups(*axes)
        axes = self._single(axes)
        if self._size(axes) == 1:
            return list(zip(range(self.world_size)))
        bases = self._offsets([axis for axis in self.order if axis not in axes])
        spacing = self._spacing(axes)
        if spacing is not None:
            span = spacing * self._size(axes)
            return list(map(range, bases, [base + span for base in bases], repeat(spacing)))
        offsets = self._offsets(axes)
        return [[base + offset for offset in offsets] for base in bases]

    def find_group(self, kind: str, rank: int) -> Group | None:
        """The group of a kind (`tp`, `mp`, `embedding`, ...) that `rank` is in, if it is in one:
        a middle stage is in no embedding group."""
        self._require_kind(kind)
        group = self._narrow(kind, self.group(rank, kind))
        return group if rank in group else None

    def kind_groups(self, kind: str) -> list[Group]:
        """Every group of a kind, by first rank."""
        self._require_kind(kind)
        groups = self.groups(kind)
        return groups if kind not in self._stages else [self._narrow(kind, g) for g in groups]

    def straddling(self, axis: str, network: int | None = None) -> tuple[list[Group], int]:
        """The first few groups of an axis or a union that leave their node, and how many there are
        in all. network: ranks of one network, instead of those of a node.

        Blocks and nodes repeat after lcm(block, node) ranks, so that one period is examined.
        """
        if (seen := self.view_of(axis)) is not self:
            return seen.straddling(axis, network)
        size, axes = network or self.gpus_per_node, self._single((axis,))
        used = [name for name in self.order if name in axes and self.sizes[name] > 1]
        reach = sum(self.strides[name] * (self.sizes[name] - 1) for name in used)
        block = self.strides[used[-1]] * self.sizes[used[-1]] if used else 1
        if size % block == 0 or reach == 0:
            return [], 0
        inside = [name for name in self.order if name not in axes and self.strides[name] < block]
        starts_inside = self._offsets(inside)
        period = min(lcm(block, size), self.world_size)
        bases = [
            start + inner
            for start in range(0, period, block)
            for inner in starts_inside
            if (start + inner) // size != (start + inner + reach) // size
        ]
        periods, rest = divmod(self.world_size, period)  # a last node may be partly used
        count = len(bases) * periods + sum(base < rest for base in bases)
        starts = range(0, self.world_size, period)[:4]
        first = [start + base for start in starts for base in bases][: min(4, count)]
        return [self._members(base, axes) for base in first], count

    @cached_property
    def _stages(self) -> dict[str, tuple[int, ...]]:
        """Members of a pp group in each embedding kind, by position; empty without a pipeline."""
        if "pp" not in self._own_kinds:
            return {}
        split = () if self.split_stage is None else (self.split_stage,)
        last = self.group_size("pp") - 1
        return {"embedding": tuple(sorted({0, *split, last})), "position_embedding": tuple(sorted({0, *split}))}

    def _narrow(self, kind: str, group: Group) -> Group:
        stages = self._stages.get(kind)
        return group if stages is None else tuple(group[stage] for stage in stages)

    def _size(self, axes: Sequence[str]) -> int:
        return prod([self.sizes[axis] for axis in axes])

    def _single(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        for axis in axes:
            if not isinstance(axis, str) or axis not in self.sizes:
                break
        else:
            return axes
        if axes == (WORLD,):
            return self.order
        if unknown := [axis for axis in axes if not isinstance(axis, str) or axis not in self._own_kinds]:
            raise InputError(_unknown("group", name, self.kinds) for name in unknown)
        members = (self.unions.get(axis, (axis,)) for axis in axes)
        return tuple(dict.fromkeys(name for names in members for name in names))

    def _require_kind(self, kind: str) -> None:
        if not isinstance(kind, str) or kind not in self.kinds:
            raise InputError([_unknown("group", kind, self.kinds)])

    def _require_rank(self, rank: int) -> None:
        if not hasattr(rank, "__index__") or not 0 <= rank < self.world_size:
            world = plural(self.world_size, "rank")
            raise InputError.of(
                "no-such-rank",
                "rank",
                f"{rank} is not a rank of this world of {world}",
                f"use 0 to {self.world_size - 1}",
            )

    def _members(self, base: int, axes: Sequence[str]) -> Group:
        spacing = self._spacing(axes)
        if spacing is not None:
            return range(base, base + spacing * self._size(axes), spacing)
        return [base + offset for offset in self._offsets(axes)]

    def _spacing(self, axes: Sequence[str]) -> int | None:
        """Distance between members if they are evenly spaced: one axis, or neighbours."""
        used = [axis for axis in self.order if axis in axes and self.sizes[axis] > 1]
        if not used:
            return 1
        whole = self.strides[used[0]] * self._size(used)
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


def _unknown(noun: str, name: object, known: Collection[str]) -> Issue:
    from difflib import get_close_matches  # only where something is wrong

    near = get_close_matches(str(name), known, n=1)
    guess = f"did you mean {near[0]}? " if near else ""
    return Issue(f"unknown-{noun}", str(name), f"no {noun} is called {name!r}", f"{guess}use {', '.join(known)}")


def _require_table(sizes: object) -> None:
    """Raises InputError where sizes are no table of axes."""
    if not isinstance(sizes, Mapping):
        raise InputError.of("bad-size", "sizes", f"{sizes!r} is no table", 'write {"tp": 2, "dp": 4}')


def _bad_sizes(sizes: Mapping[str, int]) -> Iterator[Issue]:
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            yield Issue("bad-size", name, f"{size!r} is no number of ranks", "use 1 or more")


def _read_order(order: str, sizes: Mapping[str, int], issues: Iterable[Issue] = ()) -> tuple[str, ...]:
    """The axes of an order. Raises InputError with these issues and those of the order."""
    found = list(issues)
    try:
        parsed = parse_order(order, sizes, sizes)
    except ValueError as error:
        found.append(Issue("axis-order", "order", str(error), order_hint(sizes)))
        raise InputError(found) from None
    if found:
        raise InputError(found)
    return parsed


def _require_product(sizes: Mapping[str, int], wanted: int, whole: str) -> None:
    """Raises InputError where sizes are invalid, or do not multiply to `wanted`."""
    _require_table(sizes)
    issues = list(_bad_sizes(sizes))
    if not issues and prod(sizes.values()) != wanted:
        text = " x ".join(f"{name} {size}" for name, size in sizes.items())
        message = f"{text} is {prod(sizes.values())}, and {whole}"
        issues = [Issue("sizes-fill", "sizes", message, f"use sizes that multiply to {wanted}")]
    if issues:
        raise InputError(issues)
