"""Why a search found nothing, and what would change that: each way out is one that was tried.

By hand: 30.1 GiB of a GPU's 40 at the least memory of any layout fit with 24 % headroom, not with
40 %, so that a headroom of 24 is offered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import floor

from mpctl.errors import DoesNotFit, InputError
from mpctl.planning.layout_settings import layout_text
from mpctl.rules.check import listed
from mpctl.search.find import Progress, find_layouts
from mpctl.search.nearest import too_few_gpus
from mpctl.search.request import SearchRequest
from mpctl.search.space import SearchSpace
from mpctl.units import bytes_text, plural


def nothing_fits(
    request: SearchRequest, counts: Sequence[int], on_progress: Progress
) -> InputError:
    """The error where nothing was found: whether any layout is legal, and what may make one fit."""
    where = f"{' or '.join(f'{count:,}' for count in counts)} {'GPU' if counts == [1] else 'GPUs'}"
    for gpus in reversed(counts):
        space = request.space(None if gpus == request.job.world_size else gpus)
        if next(space.layouts(), None) is not None:
            none = f"none of {plural(_legal(space), 'legal layout')} fits the memory of {where}"
            message = f"{none} with {space.job.cluster.headroom:g} % headroom"
            return DoesNotFit.of("nothing-fits", "cluster", message, _hint(space, on_progress))
    hint = "change --fix and --max-*, the number of GPUs, or training.global_batch_size"
    if hindering := listed([_shown(request, name) for name in _hindering(request, counts)]):
        where += f" with what is fixed; without {hindering} there is one"
    return InputError.of("no-layout", "parallel", f"no legal layout fills {where}", hint)


def _hint(space: SearchSpace, on_progress: Progress) -> str:
    """What may make a layout of the space fit: less headroom where that is enough, more GPUs, and
    what was fixed."""
    given = [f"{name} {value}" for name, value in {**space.fixed, **_limits(space)}.items()]
    ways = [way for way in (_less_headroom(space, on_progress),) if way]
    ways += [too_few_gpus(space.job) or "use more GPUs, or a smaller model"]
    ways += [f"change what is fixed: {', '.join(given)}"] * bool(given)
    ways += ["training.dtype bf16"] * (space.job.training.dtype in ("fp32", "fp64"))
    return "; or ".join(ways)


def _limits(space: SearchSpace) -> dict[str, str]:
    return {name: f"up to {most}" for name, most in space.largest.items()}


def _less_headroom(space: SearchSpace, on_progress: Progress) -> str:
    """The headroom with which the layout of least memory fits, in whole percent; empty where that
    is none."""
    cluster = space.job.cluster
    if cluster.device is None or cluster.headroom < 1:
        return ""
    whole = cluster.model_copy(update={"headroom": 0.0})
    wider = replace(space, job=space.job.model_copy(update={"cluster": whole}))
    found = find_layouts(wider, top=1, budgets=1, objective="memory", on_progress=on_progress)
    if not found.best:
        return ""
    best = found.best[0]
    headroom = floor(100 * (1 - best.bytes / cluster.device.memory_bytes))
    return (
        f"with cluster.headroom {headroom} one fits: {layout_text(best.layout)}, "
        f"{bytes_text(best.bytes)} of {bytes_text(cluster.device.memory_bytes)}"
    )


def _hindering(request: SearchRequest, counts: Sequence[int]) -> Iterator[str]:
    """Fixed fields of a layout of which each, left open, makes some layout legal."""
    for name in request.fixed:
        others = {key: value for key, value in request.fixed.items() if key != name}
        spaces = (replace(request, fixed=others).space(gpus) for gpus in counts)
        if any(next(space.layouts(), None) is not None for space in spaces):
            yield name


def _shown(request: SearchRequest, name: str) -> str:
    return f"{name} {request.fixed[name]}"


def _legal(space: SearchSpace) -> int:
    return sum(1 for _ in space.layouts())
