"""Assign layers to pipeline stages and their chunks.

Layers go in order through virtual stages 0 .. pp*vpp-1, which placement.py puts on stages. The
first and the last stage may have different counts; when the embedding or the loss counts as a
layer, the end stage holds one layer fewer. With `stage_balance` "cost" the layers are split by
their cost (balance.py), so that their number need not be divisible by the number of stages;
`pipeline_layout` says it stage by stage (explicit.py). The planner and each worker call
`job_stages`, whose result depends on the job alone.

>>> stage_layers(24, pp=4, vpp=2)[1]          # stage 1: a block of the front, one of the back
[(3, 6), (15, 18)]
>>> stage_layers(30, pp=4, embedding_is_layer=True, loss_is_layer=True)
[[(0, 7)], [(7, 15)], [(15, 23)], [(23, 30)]]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from mpctl.core.errors import Offer
from mpctl.core.sharding import divisors
from mpctl.core.units import plural
from mpctl.model.pipeline.balance import balanced_counts
from mpctl.model.pipeline.explicit import find_layout, layout_problems
from mpctl.model.pipeline.filled import is_filled, job_cut
from mpctl.model.pipeline.placement import StagePlacement
from mpctl.spec.job import JobSpec

Span = tuple[int, int]


class UnevenLayersError(ValueError):
    """The layers cannot be split as the settings say; `offers` and `hint` say what is possible."""

    def __init__(self, message: str, hint: str = "", offers: tuple[Offer, ...] = ()) -> None:
        super().__init__(message)
        self.hint, self.offers = hint, offers


def stage_layers(
    layers: int,
    *,
    pp: int,
    vpp: int = 1,
    first: int | None = None,
    last: int | None = None,
    embedding_is_layer: bool = False,
    loss_is_layer: bool = False,
    is_v: bool = False,
) -> list[list[Span]]:
    """Half-open spans of layers by [stage][chunk]; raises UnevenLayersError.

    first, last: layers of the first and the last stage, where they differ from the others.
    embedding_is_layer, loss_is_layer: the end stage holds one layer fewer. is_v: virtual stages go
    over the stages and back.
    """
    blocks = pp * vpp
    if first is not None or last is not None:
        if embedding_is_layer or loss_is_layer:
            raise UnevenLayersError(
                "the end stages are given by number, and the embedding or the loss counts as a layer",
                "use one or the other: first_stage_layers and last_stage_layers already say it",
            )
        chunk = _with_ends(layers, pp, vpp, first, last)
        return spans_of([n for at in range(vpp) for n in (chunk[::-1] if is_v and at % 2 else chunk)], pp, is_v=is_v)
    total = layers + embedding_is_layer + loss_is_layer
    if total % blocks:
        raise _uneven(layers, total - layers, pp, vpp)
    counts = [total // blocks] * blocks
    counts[0] -= embedding_is_layer
    counts[-1] -= loss_is_layer
    return spans_of(counts, pp, is_v=is_v)


def spans_of(counts: Iterable[int], pp: int, *, is_v: bool = False) -> list[list[Span]]:
    """Spans of layers by [stage][chunk]. counts: number of layers of each virtual stage; is_v: these
    go over the stages and back."""
    stages: list[list[Span]] = [[] for _ in range(pp)]
    start, placement = 0, StagePlacement(pp, is_v=is_v)
    for virtual, count in enumerate(counts):
        stages[placement.place(virtual).stage].append((start, start + count))
        start += count
    return stages


def job_stages(job: JobSpec, layers: int) -> list[list[Span]]:
    """Half-open spans of a job's layers by [stage][chunk]; raises UnevenLayersError.

    layers: the number of layers of the model.
    """
    p, layout = job.parallel, find_layout(job)
    if layout is not None:
        if (problem := next(layout_problems(job, layout), None)) is not None:
            raise UnevenLayersError(f"pipeline_layout: {problem}", problem.hint)
        return spans_of([part.layers for part in layout.parts], p.pp)
    if p.stage_balance == "cost":
        return _balanced(job, layers)
    if job.model is not None and is_filled(job):
        return spans_of(job_cut(job.model, p.pp).counts, p.pp)
    return stage_layers(
        layers,
        pp=p.pp,
        vpp=p.vpp,
        first=p.first_stage_layers,
        last=p.last_stage_layers,
        embedding_is_layer=p.embedding_is_layer,
        loss_is_layer=p.loss_is_layer,
        is_v=StagePlacement.of(p).is_v,
    )


def _balanced(job: JobSpec, layers: int) -> list[list[Span]]:
    p, blocks = job.parallel, job.parallel.pp * job.parallel.vpp
    if p.first_stage_layers or p.last_stage_layers or p.embedding_is_layer or p.loss_is_layer:
        raise UnevenLayersError(
            "the stages are balanced by cost, and the layers of an end are given as well",
            "use parallel.stage_balance even, or leave first_stage_layers, last_stage_layers, "
            "embedding_is_layer and loss_is_layer out: the costs already say it",
        )
    if layers < blocks:
        raise UnevenLayersError(
            f"{plural(layers, 'layer')} cannot fill {_cut_text(p.pp, p.vpp)}", f"use {blocks} layers or more"
        )
    from mpctl.model.pipeline.costs import job_costs

    is_v = StagePlacement.of(p).is_v
    return spans_of(balanced_counts(job_costs(job), pp=p.pp, vpp=p.vpp, is_v=is_v), p.pp, is_v=is_v)


def _with_ends(layers: int, pp: int, vpp: int, first: int | None, last: int | None) -> list[int]:
    """Layers of a chunk of each stage if those of an end stage are specified."""
    given = [count for count in (first, last) if count is not None]
    inner, rest = pp - len(given), layers - sum(given)
    if inner < 0:
        raise UnevenLayersError(
            f"first and last stage are both given, and pp is {pp}", "use pp 2 or more, or give neither"
        )
    if rest < 0 or (inner == 0 and rest) or (inner and rest % (inner * vpp)):
        raise UnevenLayersError(
            f"{plural(layers, 'layer')} without the {sum(given)} of the end stages leave {rest}, "
            f"which cannot be split evenly into the other {_cut_text(inner, vpp)} of {pp}",
            "choose parallel.first_stage_layers and last_stage_layers so that the rest divides",
        )
    if any(count % vpp for count in given):
        raise UnevenLayersError(
            f"an end stage of {' and '.join(map(str, given))} layers has no {vpp} equal chunks",
            f"use multiples of {vpp}",
        )
    middle = [rest // (inner * vpp)] * inner if inner else []
    head = [] if first is None else [first // vpp]
    tail = [] if last is None else [last // vpp]
    return [*head, *middle, *tail]


def _uneven(layers: int, extra: int, pp: int, vpp: int) -> UnevenLayersError:
    counted = plural(layers, "layer") + (f" and {extra} counted as such" if extra else "")
    offers = tuple(_even_cuts(layers, extra, pp, vpp))
    message = f"{counted} cannot be split evenly into {_cut_text(pp, vpp)}"
    return UnevenLayersError(message, offers=offers)


def _cut_text(pp: int, vpp: int) -> str:
    return plural(pp, "stage") + (f" x {plural(vpp, 'chunk')}" if vpp > 1 else "")


def _even_cuts(layers: int, extra: int, pp: int, vpp: int) -> Iterator[Offer]:
    """Values of one setting at a time with which the layers can be split evenly, chunks first."""
    blocks, total = pp * vpp, layers + extra

    def is_filled(count: int, chunks: int) -> bool:
        """Whether an even split leaves an end stage a layer besides its embedding or loss."""
        return total % count == 0 and total // count >= (2 if extra and chunks == 1 else 1)

    if vpp > 1:
        chunks = [k // pp for k in divisors(total) if k % pp == 0 and is_filled(k, k // pp)]
        yield Offer("parallel.vpp", tuple(chunks), "vpp", near=vpp)
    sizes = [k // vpp for k in divisors(total) if k % vpp == 0 and is_filled(k, vpp)]
    yield Offer("parallel.pp", tuple(k for k in sizes if k > 1 or vpp == 1), "pp", near=pp)
    if not extra and layers >= blocks:
        yield Offer("parallel.stage_balance", ("cost",), "parallel.stage_balance")
    chunk = max(total // blocks, 2 if extra and vpp == 1 else 1)
    others = (chunk * blocks - extra, (chunk + 1) * blocks - extra)
    yield Offer("model.layers", others, "model.layers")


def stack_spans(spans: Iterable[Span], sizes: Sequence[int]) -> list[list[Span]]:
    """Map spans of layers that are numbered through several stacks to spans within each stack.

    spans: half-open, in the numbering of all stacks; sizes: layers of each stack.

    >>> stack_spans([(4, 10)], (6, 6))
    [[(4, 6)], [(0, 4)]]
    """
    cuts = list(spans)
    found = []
    for size, end in zip(sizes, accumulate(sizes), strict=True):
        own = [(max(a, end - size), min(b, end)) for a, b in cuts]
        found.append([(a - end + size, b - end + size) for a, b in own if a < b])
    return found
