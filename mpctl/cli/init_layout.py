"""The layout that `mpctl init` writes: the one that a short search suggests, else a simple one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mpctl.core.axes import AXIS_NAMES, DEFAULT_ORDER
from mpctl.core.errors import DoesNotFit, InputError
from mpctl.core.units import bytes_text, seconds_text
from mpctl.plan.planning.layout_settings import LayoutSettings, layout_of, layout_text
from mpctl.plan.planning.plan import load_plan
from mpctl.plan.search.request import SearchRequest, read_request
from mpctl.plan.search.result import answer_search
from mpctl.spec.figure_sources import FigureSource, figure_sources

PATIENCE = 4.0  # seconds that a search may take
SIMPLE_PP = (1, 2, 4, 8, 16)  # stages of the layouts that need no search
WRITTEN = ("tp", "dp", "pp", "micro_batch_size", "recompute")
"""Settings that a job file always has; others are left out where they have the values of PLAIN."""
PLAIN = {key: value for key, value in LayoutSettings()._asdict().items() if key not in WRITTEN}


class ChosenLayout(NamedTuple):
    """settings: those of the layout by full name; why: how it was chosen, in a sentence; figures_from: the
    user's presets behind it."""

    settings: dict[str, Any]
    why: str
    figures_from: Sequence[FigureSource] = ()


class _TooLongError(Exception):
    """The search has used its time."""


def choose_layout(settings: Mapping[str, Any], patience: float = PATIENCE) -> ChosenLayout:
    """The layout for a job with these settings, which leave only the layout open. patience: seconds
    that a search may take.

    Raises DoesNotFit where no layout fits the devices, InputError where none is legal, and
    KeyboardInterrupt after Ctrl-C.
    """
    request = read_request(None, settings, [], {})
    try:
        chosen = _searched(request, patience)
    except _TooLongError:
        chosen = _simple(settings, f"the search was given up after {patience:g} s")
    except DoesNotFit:
        raise
    except InputError as error:  # such as a cluster without bandwidths: no time can be estimated
        chosen = _simple(settings, error.issues[0].message)
    return chosen._replace(figures_from=figure_sources(request.job, request.presets))


def _searched(request: SearchRequest, patience: float) -> ChosenLayout:
    end = time.monotonic() + patience

    def watch(stage: str, done: int, total: int) -> None:
        if time.monotonic() > end:
            raise _TooLongError

    counts = [request.job.world_size]
    result = answer_search(request, counts, top=1, objective="tokens", exhaustive=False, on_progress=watch)
    if not result.is_complete:  # Ctrl-C ended the search
        raise KeyboardInterrupt
    chosen = result.suggested
    assert chosen is not None, "a search of the fastest suggests one"
    layout = _with_plain_order(chosen.layout)
    cost = f" ({result.suggestion})" if result.suggestion else ""
    why = (
        f"{layout_text(layout)}: what `mpctl search` suggests{cost}, "
        f"{seconds_text(chosen.time.total)} a step and {bytes_text(chosen.bytes)} of "
        f"{bytes_text(chosen.device_memory)} on the fullest GPU, by estimate"
    )
    return ChosenLayout(_written(layout), why)


def _with_plain_order(layout: LayoutSettings) -> LayoutSettings:
    """The layout in the default order of axes if that gives the same ranks: axes of size 1 may be
    anywhere."""
    here, plain = (
        [axis for axis in order.split("-") if getattr(layout, axis, 1) > 1] for order in (layout.order, DEFAULT_ORDER)
    )
    return layout._replace(order=DEFAULT_ORDER) if here == plain else layout


def _simple(settings: Mapping[str, Any], reason: str) -> ChosenLayout:
    """The first of some simple layouts that is legal and fits: few stages, a large tp. If there is
    none, raises the error of the first candidate."""
    against: InputError | None = None
    for layout in _candidates(settings):
        try:
            plan = load_plan(None, {**settings, **layout})
        except InputError as error:
            against = against or error
            continue
        if plan.fits is not False:
            chosen = layout_of(plan.job)
            return ChosenLayout(_written(chosen), f"{layout_text(chosen)}: simple, since {reason}")
        against = DoesNotFit.of(
            "does-not-fit", "cluster", "no simple layout fits the devices", "use more nodes, or a smaller model"
        )
    assert against is not None, "there is a candidate"
    raise against


def _candidates(settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    per_node = int(settings["cluster.gpus_per_node"])
    for zero in (0, 1):
        for pp in SIMPLE_PP:
            for tp in range(per_node, 0, -1):
                if per_node % tp == 0:
                    layout = {"parallel.tp": tp, "parallel.pp": pp, "parallel.zero": zero}
                    yield {**layout, "training.recompute": "full"}


def _written(layout: LayoutSettings) -> dict[str, Any]:
    """The settings of a layout to write in a job file: the main ones, and those not at default."""
    values = layout._asdict()
    values = {name: v for name, v in values.items() if name not in PLAIN or v != PLAIN[name]}
    micro, recompute = values.pop("micro_batch_size"), values.pop("recompute")
    if layout.pp == 1:
        values.pop("schedule", None)
    names = [name for name in AXIS_NAMES if name in values]
    ordered = {f"parallel.{name}": values.pop(name) for name in names}
    ordered |= {f"parallel.{name}": value for name, value in values.items()}
    return {**ordered, "training.micro_batch_size": micro, "training.recompute": recompute}
