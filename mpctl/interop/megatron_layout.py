"""Megatron-LM's flags of virtual stages and of the pipeline layout as settings of a job.

At most one of three says the chunks of a rank: their number, the layers in each, or the layout of
every part, `Et*3|(tt|)*6,tL` (E embedding, t layer, L loss, `|` between parts, part i on rank
i mod pp). A layout becomes the settings that cut the layers the same way, where there are any.

>>> layer_counts("Et*3|(tt|)*2,tL")
[3, 2, 2, 1]
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from mpctl.errors import InputError, Issue
from mpctl.interop.command_line import Flags
from mpctl.pipeline.stages import Span, UnevenLayersError, job_stages, spans_of
from mpctl.rules.layout import is_countable
from mpctl.spec.load import job_from_raw
from mpctl.units import plural

CHUNKS = "--num-virtual-stages-per-pipeline-rank"
LAYERS_A_CHUNK = "--num-layers-per-virtual-pipeline-stage"
LAYOUT = "--pipeline-model-parallel-layout"
_LONGEST = 100_000  # layers and parts of a layout


def pipeline_settings(
    flags: Flags, settings: Mapping[str, object]
) -> tuple[dict[str, object], list[Issue]]:
    """What the three flags say, given the other settings; and what is wrong with them."""
    given = [flag for flag in (CHUNKS, LAYERS_A_CHUNK, LAYOUT) if flag in flags]
    if len(given) > 1:
        message = f"is given beside {' and '.join(given[1:])}; Megatron-LM takes one of them"
        return {}, [Issue("megatron-flag", given[0], message, "leave the others out")]
    try:
        found = dict(_settings(flags, settings)) if given else {}
    except InputError as error:
        return {}, list(error.issues)
    return found, []


def _settings(flags: Flags, settings: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    if LAYOUT in flags:
        yield from _cut_as(flags[LAYOUT][0], settings).items()
        return
    flag = CHUNKS if CHUNKS in flags else LAYERS_A_CHUNK
    text = flags[flag][0]
    if not text.isdecimal() or int(text) < 1:
        raise _wrong(flag, f"{text!r} is not a number above 0")
    count = int(text)
    if flag == LAYERS_A_CHUNK:
        count = _chunks(count, settings)
    if count > 1:
        yield "parallel.vpp", count


def _chunks(per_chunk: int, settings: Mapping[str, object]) -> int:
    """Chunks a rank of so many layers each."""
    layers, pp = settings.get("model.layers"), settings.get("parallel.pp")
    if not isinstance(layers, int) or not isinstance(pp, int):
        raise _wrong(LAYERS_A_CHUNK, "says nothing without --num-layers", f"use {CHUNKS}")
    ends = ("parallel.embedding_is_layer", "parallel.loss_is_layer")
    layers += sum(bool(settings.get(end)) for end in ends)
    if layers % (pp * per_chunk):
        message = f"{per_chunk} x {pp} stages does not divide {plural(layers, 'layer')}"
        raise _wrong(LAYERS_A_CHUNK, message)
    return layers // (pp * per_chunk)


def layer_counts(text: str) -> list[int]:
    """Layers of each part of a layout. Raises InputError for other letters than E, t and L, for an
    embedding that is not the first or a loss that is not the last, and for one that is endless."""
    flat = text.replace(",", "")
    for pattern in (r"\(([^()]+)\)\*(\d{1,5})", r"([^()])\*(\d{1,5})"):
        parts = re.split(pattern, flat)
        size = sum(len(part) for part in parts[::3])
        size += sum(len(what) * int(n) for what, n in zip(parts[1::3], parts[2::3], strict=True))
        if size > _LONGEST:
            raise _wrong(LAYOUT, f"{text[:40]!r} has more than {_LONGEST:,} parts and layers")
        flat = re.sub(pattern, lambda found: found[1] * int(found[2]), flat)
    if not re.fullmatch(r"E[t|]*L", flat):
        message = f"{text[:60]!r} is not E, layers t and L in this order, with | between stages"
        raise _wrong(LAYOUT, message)
    return [part.count("t") for part in flat.split("|")]


def _cut_as(text: str, settings: Mapping[str, object]) -> dict[str, object]:
    """The settings that cut the layers as a layout does: evenly, by the ends, or by cost."""
    counts, pp = layer_counts(text), settings.get("parallel.pp")
    if not isinstance(pp, int) or len(counts) % pp:
        raise _wrong(LAYOUT, f"{len(counts)} parts cannot be dealt to {pp} stages")
    if settings.get("model.layers") not in (None, sum(counts)):
        raise _wrong(LAYOUT, f"has {sum(counts)} layers, --num-layers {settings['model.layers']}")
    vpp = len(counts) // pp
    for cut in _cuts(counts, pp, vpp):
        tried = {**settings, **cut, "parallel.vpp": vpp}
        if _stages(tried, sum(counts)) == spans_of(counts, pp):
            return {**cut, "parallel.vpp": vpp}
    message = f"{text[:60]!r} is a cut that no settings of a job give"
    raise _wrong(LAYOUT, message, "use equal parts, other ends, or what --emit megatron writes")


def _cuts(counts: list[int], pp: int, vpp: int) -> Iterator[dict[str, object]]:
    ends = "parallel.first_stage_layers", "parallel.last_stage_layers"
    yield {}
    for embedding, loss in ((True, True), (True, False), (False, True)):
        yield {"parallel.embedding_is_layer": embedding, "parallel.loss_is_layer": loss}
    first, last = sum(counts[::pp]), sum(counts[pp - 1 :: pp])
    yield {ends[0]: first}
    yield {ends[1]: last}
    yield {ends[0]: first, ends[1]: last}
    yield {"parallel.stage_balance": "cost"}


def _stages(settings: Mapping[str, object], layers: int) -> list[list[Span]] | None:
    """How settings cut the layers; None where they are none of a job, or cut nothing."""
    try:
        job = job_from_raw({}, dict(settings))
        if job.parallel.stage_balance == "cost" and not (job.model and is_countable(job.model)):
            return None
        return job_stages(job, layers)
    except (UnevenLayersError, InputError):
        return None


def _wrong(flag: str, message: str, hint: str = "") -> InputError:
    return InputError.of("megatron-flag", flag, message, hint)
