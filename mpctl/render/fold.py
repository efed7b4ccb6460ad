"""Folds repetition: stages, nodes and groups that look alike become one row.

>>> fold(["a", "b", "b", "b", "c"])
[(0, 0), (1, 3), (4, 4)]
>>> members_text([*range(8), *range(64, 72), *range(128, 136)])
'[0-7,64-71,128-135]'
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from mpctl.core.topology import Topology

if TYPE_CHECKING:
    from mpctl.plan.planning.document import StackSpans

SHOWN, ENDS = 8, 2
LISTED_MEMBERS = 8  # ranks and ranges of a group that are written out
FOLDED_MEMBERS = 4  # of one of many groups
SHORT_RUN = 3  # consecutive ranks up to which each is written out


def fold(keys: Sequence[object]) -> list[tuple[int, int]]:
    """First and last index of each run of equal keys."""
    runs: list[tuple[int, int]] = []
    for index, key in enumerate(keys):
        if runs and keys[runs[-1][0]] == key:
            runs[-1] = (runs[-1][0], index)
        else:
            runs.append((index, index))
    return runs


def fold_ends(count: int, largest: int) -> list[tuple[int, int]]:
    """First and last of each row of a list of entries. Of more than SHOWN only the first ENDS, the last
    and the largest have a row of their own.

    >>> fold_ends(20, 7)
    [(0, 0), (1, 1), (2, 6), (7, 7), (8, 18), (19, 19)]
    """
    alone = range(count) if count <= SHOWN else {*range(ENDS), count - 1, largest}
    return fold([at if at in alone else -1 for at in range(count)])


def span_text(first: int, last: int) -> str:
    """`(2, 2)` -> `2`, `(2, 5)` -> `2-5`."""
    return str(first) if first == last else f"{first}-{last}"


def members_text(ranks: Sequence[int], *, whole: bool = False, most: int = LISTED_MEMBERS) -> str:
    """A group's ranks in brackets, consecutive ones as ranges: `[0-7,64]`. Of more than `most`
    ranges the first three and the last are written; whole: every rank, without ranges."""
    parts = list(map(str, ranks)) if whole else _runs(ranks)
    if not whole and len(parts) > most:
        parts = [*parts[:3], "...", parts[-1]]
    return f"[{','.join(parts)}]"


def _runs(ranks: Sequence[int]) -> list[str]:
    starts = [0, *(at for at in range(1, len(ranks)) if ranks[at] != ranks[at - 1] + 1)]
    texts: list[str] = []
    for start, stop in zip(starts, [*starts[1:], len(ranks)], strict=True):
        run = ranks[start:stop]
        texts += map(str, run) if len(run) <= SHORT_RUN else [span_text(run[0], run[-1])]
    return texts


def groups_text(groups: Sequence[Sequence[int]], width: int) -> str:
    """Write as many groups as fit in `width` characters, at least one. If some are left out, add the
    last one if it fits, and show the first and the last members of each."""
    shown = _fitting(groups, width, LISTED_MEMBERS)
    if len(shown) == len(groups):
        return " ".join(shown)
    last = f"... {members_text(groups[-1], most=FOLDED_MEMBERS)}"
    shown = _fitting(groups[:-1], width - len(last) - 1, FOLDED_MEMBERS)
    has_room = len(shown[0]) + 1 + len(last) <= width
    return " ".join([*shown, last if has_room else "..."])


def _fitting(groups: Sequence[Sequence[int]], width: int, most: int) -> list[str]:
    """The texts of as many groups as fit in the width, at least one. A world may have a
    million groups: no more are looked at."""
    shown: list[str] = []
    for group in groups:
        text = members_text(group, most=most)
        if shown and sum(map(len, shown)) + len(shown) + len(text) > width:
            break
        shown.append(text)
    return shown


def layers_text(spans: Iterable[Sequence[int]]) -> str:
    """Half-open spans as layers: `0-5 12-17`; of many at equal distances `0, 4, ... 76`; `none` of
    a stage that holds an end of the model alone; nothing of a job without a model."""
    given = list(spans)
    ends = [(start, stop - 1) for start, stop in given if stop > start]
    texts = [span_text(*span) for span in ends] or ["none"] * (len(given) > 0)
    steps = {(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(ends)}
    if len(texts) <= 3 or len(steps) > 1:
        return " ".join(texts)
    return f"{texts[0]}, {texts[1]}, ... {texts[-1]}"


def stage_layers_text(spans: Iterable[Sequence[int]], stacks: StackSpans | None) -> str:
    """The layers of a stage, `0-5`; of an encoder and a decoder `enc 4-5, dec 0-3`."""
    if not stacks:
        return layers_text(spans)
    parts = {"enc": stacks["encoder"], "dec": stacks["decoder"]}
    return ", ".join(f"{name} {layers_text(spans)}" for name, spans in parts.items() if spans)


def merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The spans in order, with those that touch joined: [(0, 2), (2, 4)] -> [(0, 4)]."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def nodes_are_alike(topology: Topology) -> bool:
    """Whether every node has the same layout: it has complete groups of its fastest axes and an
    equal part of the next."""
    per_node, width = topology.gpus_per_node, 1
    for axis in topology.order:
        following = width * topology.sizes[axis]
        if following >= per_node:
            return per_node % width == 0 and following % per_node == 0
        width = following
    return True
