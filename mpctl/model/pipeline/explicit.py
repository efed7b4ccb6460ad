"""An explicit pipeline layout, held to its job: what every virtual stage has by `parallel.pipeline_layout`.

Part i of the layout (spec/layout_text.py) is chunk i // pp of stage i mod pp, as in interleaving. A
stage may have one layer, several, the embedding alone, the loss alone, or nothing: it then hands on
what it receives. Layers of multi-token prediction run with the loss, or in a part before it, which sends
their results on with the hidden states.

By hand, 61 layers and one that predicts: `Et*3|(tt|)*29,m|L` on 16 stages of 2 chunks. Stage 14 has
layers 29 and 30 and, in chunk 1, the prediction; stage 15 layers 31 and 32 and, in chunk 1, the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mpctl.core.sharding import divisors
from mpctl.core.units import plural
from mpctl.spec.job import JobSpec
from mpctl.spec.layout_text import LayoutPart, LayoutProblem, PipelineLayout, parse_layout

Span = tuple[int, int]
EXCLUDED = ("first_stage_layers", "last_stage_layers", "embedding_is_layer", "loss_is_layer")
"""Settings of [parallel] that cut the layers in another way."""


def find_layout(job: JobSpec) -> PipelineLayout | None:
    """The job's explicit layout; None where it has none."""
    text = job.parallel.pipeline_layout
    return None if text is None else parse_layout(text)


def separates_prediction(job: JobSpec) -> bool:
    """Whether layers of multi-token prediction run in another virtual stage than the loss."""
    layout = find_layout(job)
    return layout is not None and layout.separates_prediction and not layout.problems


def layout_parts(stages: Sequence[Sequence[Span]], predictions: int = 0) -> list[LayoutPart]:
    """The parts of stages by [stage][chunk], with embedding and loss at the ends, and that many layers of
    multi-token prediction before the loss."""
    counts = [stop - start for chunk in zip(*stages, strict=True) for start, stop in chunk]
    parts = [LayoutPart(layers=count) for count in counts]
    parts[0] = parts[0]._replace(embedding=True)
    parts[-1] = parts[-1]._replace(predictions=predictions, loss=True)
    return parts


def layout_problems(job: JobSpec, layout: PipelineLayout) -> Iterator[LayoutProblem]:
    """Everything because of which a job cannot be cut as its layout says."""
    p, model = job.parallel, job.model
    given = [key for key in EXCLUDED if getattr(p, key)] + ["stage_balance"] * (p.stage_balance != "even")
    if given:
        named = ", ".join(f"{key} {getattr(p, key)}" for key in given)
        yield LayoutProblem(f"the layers are cut by a layout and by {named}", f"leave {', '.join(given)} out")
    yield from layout.problems
    if layout.problems:
        return
    yield from _size_problems(layout, p.pp, p.vpp)
    if model is None:
        return
    if model.decoder_layers is not None:
        yield LayoutProblem(f"{model.family} has an encoder, whose layers have no letter", "leave pipeline_layout out")
    elif layout.layers != model.layers:
        message = f"{plural(layout.layers, 'layer')} t, and the model has {model.layers}"
        yield LayoutProblem(message, _more(layout, model.layers))
    if layout.predictions != model.mtp_layers:
        message = f"{plural(layout.predictions, 'layer')} m, and the model has {model.mtp_layers} that predict further"
        yield LayoutProblem(message, f"write {model.mtp_layers} m behind the last t, or set model.mtp_layers")


def _more(layout: PipelineLayout, layers: int) -> str:
    lacking = layers - layout.layers
    change = f"add {lacking} t" if lacking > 0 else f"remove {-lacking} t"
    return f"{change}, or set model.layers {layout.layers}"


def _size_problems(layout: PipelineLayout, pp: int, vpp: int) -> Iterator[LayoutProblem]:
    """pp and vpp fit the parts; multi-token prediction is in the last chunk of its rank."""
    parts = len(layout.parts)
    if parts % pp:
        sizes = ", ".join(map(str, divisors(parts)))
        yield LayoutProblem(f"{plural(parts, 'part')} cannot be dealt to pp {pp} stages", f"use pp {sizes}")
        return
    if parts != pp * vpp:
        yield LayoutProblem(
            f"{plural(parts, 'part')} over pp {pp} are {plural(parts // pp, 'chunk')} a stage, and vpp is {vpp}",
            f"use vpp {parts // pp}, or leave it out",
        )
    for number in layout.prediction_parts:
        if number < parts - pp:
            message = f"m is in part {number}: chunk {number // pp} of stage {number % pp}, "
            message += f"which has {plural(parts // pp - 1 - number // pp, 'more chunk')}"
            yield LayoutProblem(message, f"move m to one of the last {plural(pp, 'part')}")
