"""The figures of a plan with the formulas that gave them: `mpctl explain JOB [FIGURE ...]`.

A figure's name is a path, `communication.stage-0.tp`; the beginning of a path names all figures
below it. Those of memory and time come from estimate/, those of communication are computed here.

By hand, `communication.phi` of 4 samples of 512 tokens, hidden 1024, in bf16: 4 x 512 x 1024 x 2
= 4 MiB.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Literal

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.core.collectives import get_collective, sent_by_rank
from mpctl.core.errors import InputError, Issue
from mpctl.core.units import bytes_text
from mpctl.plan.estimate.communication import MessageCount, batch_sizes
from mpctl.plan.estimate.explain import Figure, explain_experts, explain_memory, explain_time
from mpctl.plan.estimate.job import Estimate
from mpctl.plan.estimate.layer_messages import BlockTraffic, PartTraffic
from mpctl.plan.planning.adapters import explain_adapters
from mpctl.plan.planning.plan import Plan
from mpctl.plan.planning.summary import TrainingEntry

FigureEntry = dict[str, str | float]  # the fields of estimate.figure.Figure


class ExplainDocument(TypedDict):
    """Schema mpctl.explain/2: figures with the formulas that gave them."""

    schema: Literal["mpctl.explain/2"]
    training: TrainingEntry
    figures: list[FigureEntry]


HINTED_NAMES = 8  # at most
SOURCES = {
    "2d": "arXiv 2104.05343, section 3",
    "2.5d": "arXiv 2105.14500, section 3",
    "3d": "arXiv 2105.14450, section 3",
}


def explain(plan: Plan, wanted: Sequence[str]) -> list[Figure]:
    """The wanted figures, by name or by the beginning of names; without names, all.

    Raises InputError for a name that no figure has, and for a plan without a model.
    """
    if plan.estimate is None:
        message, hint = "a plan without a model has no figures", "name a job with a model"
        raise InputError.of("nothing-to-explain", "FIGURE", message, hint)
    figures = list(all_figures(plan.estimate))
    if not wanted:
        return figures
    if issues := [issue for name in wanted for issue in _unknown(name, figures)]:
        raise InputError(issues)
    return [f for f in figures if any(_is_below(f.name, name) for name in wanted)]


def explain_document(figures: Sequence[Figure], training: TrainingEntry) -> ExplainDocument:
    """The figures of a job as JSON; training: how it is trained."""
    entries = [figure._asdict() for figure in figures]
    return {"schema": "mpctl.explain/2", "training": training, "figures": entries}


def all_figures(estimate: Estimate) -> Iterator[Figure]:
    """Every figure of an estimate: time, memory, communication, and of experts their load."""
    yield from explain_experts(estimate.layout)
    yield from explain_adapters(estimate.layout)
    yield from explain_time(estimate.layout)
    yield from explain_memory(estimate.layout)
    yield from communication_figures(estimate)


def _is_below(name: str, wanted: str) -> bool:
    return name == wanted or name.startswith(f"{wanted}.")


def _unknown(name: str, figures: Sequence[Figure]) -> Iterator[Issue]:
    if any(_is_below(figure.name, name) for figure in figures):
        return
    known = {figure.name for figure in figures}
    known |= {".".join(n.split(".")[:k]) for n in known for k in range(1, n.count(".") + 1)}
    near = get_close_matches(name, sorted(known), n=HINTED_NAMES, cutoff=0.4)
    tops = sorted({figure.name.split(".")[0] for figure in figures})
    hint = f"use {', '.join(near or tops)}; without a name all are printed"
    yield Issue("unknown-figure", "FIGURE", f"no figure is called {name!r}", hint)


def communication_figures(estimate: Estimate) -> Iterator[Figure]:
    """Bytes of one block's collectives over tp, and of each stage's messages of a step."""
    for block in estimate.blocks:
        has_others = len(estimate.blocks) > 1
        prefix = "communication" + (f".{block.stack.figure_name}" if has_others else "")
        yield _phi(estimate, block, prefix)
        yield from _block(block, prefix)
    for stage, messages in enumerate(estimate.messages):
        yield from _stage(estimate, f"communication.stage-{stage}", messages)


def _phi(estimate: Estimate, block: BlockTraffic, prefix: str) -> Figure:
    sizes, width = batch_sizes(estimate.layout), estimate.layout.job.training.value_bytes
    parts = (sizes["batch"], sizes[block.stack.seq], sizes["hidden"], width)
    return Figure(
        f"{prefix}.phi",
        block.whole.phi_bytes,
        "B",
        "micro batch x sequence / cp x hidden x bytes",
        " x ".join(map(str, parts)),
        "one phase of an all-reduce of the hidden states",
    )


def _block(block: BlockTraffic, prefix: str) -> Iterator[Figure]:
    if block.mode != "1d":
        yield from _grid_block(block, prefix)
        return
    whole = block.whole
    yield Figure(
        f"{prefix}.block.volume",
        whole.volume_bytes,
        "B",
        "phases of collectives over tp x phi",
        f"{whole.volume_phi:g} x {bytes_text(whole.phi_bytes)}",
        "arXiv 1909.08053, section 3; with sequence parallelism 2205.05198, section 4.2",
    )
    yield Figure(
        f"{prefix}.block.ring",
        whole.ring_bytes_per_rank,
        "B",
        "(t - 1) / t x volume",
        f"{block.tp - 1} / {block.tp} x {bytes_text(whole.volume_bytes)}",
        "a ring sends that part of each phase from every rank",
    )


def _grid_block(block: BlockTraffic, prefix: str) -> Iterator[Figure]:
    """Volume by layer, axis and kind, then the sums over them."""
    source, sums = SOURCES[block.mode], {"volume": "phases x bytes", "ring": "(n - 1) / n x volume"}
    for name, part in block.parts.items():
        for sent in part.by_kind():
            first = sent.messages[0]
            at = f"{prefix}.block.{name}.{first.axis}.{first.kind}"
            terms = " + ".join(f"{m.count} x {bytes_text(m.bytes)}" for m in sent.messages)
            phases = get_collective(first.kind).phases
            numbers = terms if phases == 1 else f"{phases} x ({terms})"
            yield Figure(f"{at}.volume", sent.volume_bytes, "B", sums["volume"], numbers, source)
            ranks = sent.ranks[first.axis]
            yield Figure(
                f"{at}.ring",
                sent.ring_bytes_per_rank,
                "B",
                sums["ring"],
                f"{ranks - 1} / {ranks} x {bytes_text(sent.volume_bytes)}",
                f"sent by each of the {ranks} ranks of a group of {first.axis}, on the average",
            )
    for name, formula in sums.items():
        values = [_amount(part, name) for part in block.parts.values()]
        yield Figure(
            f"{prefix}.block.{name}",
            _amount(block.whole, name),
            "B",
            f"{formula}, over {', '.join(block.parts)}",
            " + ".join(map(bytes_text, values)),
            source,
        )


def _amount(part: PartTraffic, name: str) -> int | float:
    return part.volume_bytes if name == "volume" else part.ring_bytes_per_rank


def _stage(estimate: Estimate, prefix: str, messages: Sequence[MessageCount]) -> Iterator[Figure]:
    ranks = estimate.layout.group_sizes
    for axis in dict.fromkeys(message.axis for message in messages):
        of_axis = [message for message in messages if message.axis == axis]
        total = sum(message.bytes * message.count for message in of_axis)
        terms = " + ".join(f"{m.count} x {bytes_text(m.bytes)}" for m in of_axis)
        yield Figure(f"{prefix}.{axis}", total, "B", "messages of a step x their bytes", terms)
        for message in of_axis:
            yield _message(f"{prefix}.{axis}", message, ranks[axis])


def _message(prefix: str, message: MessageCount, ranks: int) -> Figure:
    phases = get_collective(message.kind).phases
    sent = sent_by_rank(message.kind, message.bytes, ranks)
    what = message.what.replace(" ", "-")
    share = f" x {phases} x {ranks - 1} / {ranks}" if phases else ""
    return Figure(
        f"{prefix}.{message.kind}.{what}.{message.bytes}",
        sent * message.count,
        "B",
        "count x bytes" + (" x phases x (ranks - 1) / ranks" if phases else ""),
        f"{message.count} x {message.bytes}{share}",
        "sent by each rank in a step",
    )
