"""The answer of `mpctl fit` as data: schema mpctl.fit/1. Seconds and bytes are those of `mpctl plan` for a row's
command."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.core.units import bytes_text, days_text
from mpctl.model.families import get_table
from mpctl.plan.fit.choice import FitChoice, advised, choices
from mpctl.plan.fit.devices import COUNTS, any_gpus
from mpctl.plan.fit.methods import TITLES
from mpctl.plan.fit.request import EPOCHS, FitRequest
from mpctl.plan.fit.ways_out import WayOut, ways_out
from mpctl.spec.gpus import device_names

FASTER = 1.1  # from which on a speed is worth a word
ABOUT = 1.02  # prices that differ by less are alike
CommandLine = Callable[[str, FitChoice], str]
"""The line of a verb (`plan`, `emit trl`) for a row."""


class FitEntry(TypedDict):
    """A row: a method under a sharding on its GPUs.

    lacking_bytes: by which it does not fit; reason: why it is refused, in words. step_seconds_low and _high: 9
    of 10 measured steps are between them. host_bytes: of the fullest host where states wait there, else 0. hours,
    price: of the data; null where it does not fit, or no price is known. micro_batches: of a step, on each replica.
    optimizer: in words; empty for the runtime's own.
    """

    method: str
    title: str
    sharding: str
    gpus: int
    device: str
    gpus_text: str
    fits: bool
    reason: str
    peak_bytes: int
    device_memory_bytes: int
    lacking_bytes: int
    memory: str
    host_bytes: int
    host_memory: str
    tokens_per_second: float | None
    step_seconds: float | None
    step_seconds_low: float | None
    step_seconds_high: float | None
    extrapolates: list[str]
    hours: float | None
    price: float | None
    optimizer: str
    micro_batch_size: int
    micro_batches: int
    recompute: str
    settings: dict[str, Any]
    command: str


class WayOutEntry(TypedDict):
    """A change in words, and the row that fits with it."""

    change: str
    row: FitEntry


class FitDataEntry(TypedDict):
    """The training data. text: in words; is_given: false where hours are of a unit of tokens; steps: of the
    whole training, packed; padded_steps: where each sample has a row of its own instead."""

    text: str
    is_given: bool
    samples: int | None
    epochs: int | None
    tokens: int | None
    mean_length: int | None
    steps: int
    padded_steps: int


class FitDocument(TypedDict):
    """Schema mpctl.fit/1: what `mpctl fit --json` prints.

    advice: what to do, in a sentence; answer: the row to use, null where nothing fits. rows: by method, the
    plainest sharding first; with `--gpus any` by method and number of GPUs. others: with it, devices that fit as
    well and have no row. unused_prices: devices with a price where the GPUs asked for have none. ways_out: where
    nothing fits, the nearest changes. commands: lines to type for the answer.
    """

    schema: Literal["mpctl.fit/1"]
    model: str
    parameters: int
    gpus: int | None
    assumed: str
    runtime: str
    seq_length: int
    length_text: str
    global_batch_size: int
    dtype: str
    headroom_percent: float
    rank: int
    targets: list[str]
    has_price: bool
    unused_prices: list[str]
    data: FitDataEntry
    advice: str
    answer: FitEntry | None
    rows: list[FitEntry]
    others: list[str]
    ways_out: list[WayOutEntry]
    commands: list[str]


@dataclass(frozen=True)
class FitAnswer:
    """Everything that was found for a request."""

    request: FitRequest
    rows: Sequence[FitChoice]
    answer: FitChoice | None
    ways: Sequence[WayOut] = ()
    others: Sequence[str] = ()


def answer_fit(request: FitRequest) -> FitAnswer:
    """Plan every row of a request, choose one, and look for ways out where none fits."""
    if request.gpus is None:
        found = any_gpus(request)
        return FitAnswer(request, found.rows, _best_of_any(found.rows), (), found.others)
    rows = choices(request)
    answer = advised(rows)
    return FitAnswer(request, rows, answer, () if answer else ways_out(request))


def _best_of_any(rows: Sequence[FitChoice]) -> FitChoice | None:
    """The cheapest row of adapters where prices are known, LoRA's if it costs about as much; else LoRA's fewest
    and smallest GPUs."""
    of_adapters = [one for one in rows if one.row.method != "full"]
    if any(one.price is not None for one in rows):
        cheapest = min(of_adapters or rows, key=lambda one: one.price or 0.0)
        plain = [one for one in of_adapters if one.row.method == "lora"]
        lora = min(plain, key=lambda one: one.price or 0.0, default=cheapest)
        return lora if (lora.price or 0) <= ABOUT * (cheapest.price or 0) else cheapest
    in_order = [one for one in of_adapters if one.row.method == "lora"] + of_adapters + list(rows)
    return in_order[0] if in_order else None


def advice_text(found: FitAnswer) -> str:
    """What to do, in a sentence: `Use QLoRA rank 16 on one RTX 4090: 11.2 of 24.0 GiB, ...`."""
    use = found.answer
    if use is None:
        return _refusal_text(found)
    if found.request.gpus is None:
        return _text_of_any(found)
    return "; ".join(
        [f"Use {_where_text(use)}: {_figures_text(use)} for {use.request.data.text}", *_others(found, use)]
    )


def _where_text(one: FitChoice) -> str:
    """`LoRA rank 16 on four A100-SXM4-80GB with FSDP`."""
    how = "" if one.gpus == 1 and not one.row.offloads else f" with {one.row.sharding}"
    return f"{one.title} on {one.place}{how}" + f", {one.row.optimizer}" * bool(one.row.optimizer)


def _figures_text(one: FitChoice) -> str:
    """`11.2 of 24.0 GiB, 3,100 tokens/s, 4.1 h, price 12.30`."""
    host = [f"{one.host_text} of host memory"] if one.host_text else []
    words = [
        one.memory_text,
        *host,
        f"{speed_text(one.row.tokens_per_second)} tokens/s",
        days_text((one.hours or 0) / 24),
    ]
    return ", ".join([*words, *([f"price {price_text(one.price)}"] if one.price is not None else [])])


def _text_of_any(found: FitAnswer) -> str:
    """The answer, which is what is typed, why it is, and the best row of each other method."""
    use = found.answer
    assert use is not None, "something fits"
    has_price = any(one.price is not None for one in found.rows)
    best = []
    for method in found.request.methods:
        if method != use.row.method and (own := [one for one in found.rows if one.row.method == method]):
            best.append(min(own, key=lambda one: one.price or 0.0) if has_price else own[0])
    why = _why_text(use, [one for one in found.rows if one.price is not None]) if has_price else "fewest GPUs"
    texts = (f"{_where_text(one)} ({_figures_text(one)})" for one in best)
    return "; ".join([f"Use {_where_text(use)}, {why}: {_figures_text(use)} for {found.request.data.text}", *texts])


def _why_text(use: FitChoice, priced: Sequence[FitChoice]) -> str:
    """Why this row of several with prices."""
    cheaper = {one.row.method for one in priced if (one.price or 0.0) < (use.price or 0.0)}
    if "qlora" in cheaper:
        return "which costs about as little as QLoRA"
    return "the cheapest adapters" if cheaper else "the cheapest"


def _others(found: FitAnswer, use: FitChoice) -> Iterator[str]:
    """Why not the method that trains more, and whether one that trains as much is faster."""
    before = {"qlora": "lora", "lora": "full"}.get(use.row.method)
    own = [one for one in found.rows if one.row.method == before and not one.row.reason]
    if before is not None and own:
        best = max(own, key=lambda one: (one.row.tokens_per_second, -one.row.bytes))
        name = "full fine-tuning" if before == "full" else TITLES[before]
        if best.row.fits:
            words = [best.row.sharding] * (best.row.sharding != use.row.sharding) + [best.row.optimizer]
            how = f" with {' and '.join(filter(None, words))}" if any(words) else ""
            how += f" and {best.host_text} of host memory" * bool(best.host_text)
            faster = " and is faster" * (best.row.tokens_per_second > FASTER * use.row.tokens_per_second)
            yield f"{name} fits too{how}{faster}: {speed_text(best.row.tokens_per_second)} tokens/s"
        elif best.row.host_reason:
            yield f"{name} does not fit: {best.row.host_reason}"
        else:
            yield f"{name} does not fit by {bytes_text(best.row.lacking_bytes)}" + " a GPU" * (use.gpus > 1)
    if use.row.method == "lora":
        speed = max((one.row.tokens_per_second for one in found.rows if one.row.method == "qlora"), default=0.0)
        if speed > FASTER * use.row.tokens_per_second:
            yield f"QLoRA is faster: {speed_text(speed)} tokens/s"


def _refusal_text(found: FitAnswer) -> str:
    if found.request.gpus is None:
        tried = "those with a --price" if found.request.prices else "any preset"
        return f"Nothing fits: {found.request.model} needs more than {COUNTS[-1]:,} GPUs of {tried}"
    planned = [one for one in found.rows if not one.row.reason and not one.row.host_reason]
    if not planned:
        first = found.rows[0].row
        return f"Nothing fits: {first.host_reason}" if first.host_reason else f"Nothing can be planned: {first.reason}"
    least = min(planned, key=lambda one: one.row.lacking_bytes)
    lacking = bytes_text(least.row.lacking_bytes)
    needs = f"{least.title} ({least.row.sharding}) needs {least.memory_text} on {least.place}"
    headroom = f"with {found.request.job.cluster.headroom:g} % headroom"
    return f"Nothing fits: {needs}, {lacking} too much {headroom}"


def speed_text(tokens_per_second: float) -> str:
    """Three digits of tokens a second: estimates have no more.

    >>> speed_text(3126.4)
    '3,130'
    """
    return f"{float(f'{tokens_per_second:.3g}'):,.0f}"


def price_text(amount: float | None) -> str:
    """`1,234` or `12.30`; empty where no price is known."""
    if amount is None:
        return ""
    return f"{amount:,.0f}" if amount >= 1000 else f"{amount:,.2f}"


def fit_document(found: FitAnswer, command: CommandLine, verbs: Sequence[str]) -> FitDocument:
    """The answer as JSON. command: the line to type; verbs: of the lines for the answer."""
    request, job = found.request, found.request.job
    adapter, model = job.training.adapter, job.model
    assert adapter is not None
    assert model is not None
    return {
        "schema": "mpctl.fit/1",
        "model": model.name or request.model,
        "parameters": get_table(model, tp=1).numel,
        "gpus": None if request.gpus is None else job.world_size,
        "assumed": "" if request.gpus is None else request.gpus.assumed,
        "runtime": job.training.runtime,
        "seq_length": request.seq_length,
        "length_text": request.length_text,
        "global_batch_size": job.training.global_batch_size or 1,
        "dtype": job.training.dtype,
        "headroom_percent": job.cluster.headroom,
        "rank": adapter.rank,
        "targets": adapter.targets,
        "has_price": any(one.price is not None for one in (*found.rows, *(way.choice for way in found.ways))),
        "unused_prices": [] if request.gpus is None else _unused_prices(request),
        "data": _data_entry(request),
        "advice": advice_text(found),
        "answer": _entry(found.answer, command) if found.answer else None,
        "rows": [_entry(one, command) for one in found.rows],
        "others": list(found.others),
        "ways_out": [{"change": way.change, "row": _entry(way.choice, command)} for way in found.ways],
        "commands": [command(verb, found.answer) for verb in verbs] if found.answer else [],
    }


def _unused_prices(request: FitRequest) -> list[str]:
    """The devices of --price where the GPUs asked for have none."""
    assert request.gpus is not None
    names = {} if request.gpus.settings["cluster"] in request.prices else request.prices
    return [device for device, preset in device_names().items() if preset in names]


def _data_entry(request: FitRequest) -> FitDataEntry:
    data, batch = request.data, request.job.training.global_batch_size or 1
    return {
        "text": data.text,
        "is_given": data.is_given,
        "samples": data.samples,
        "epochs": data.epochs or EPOCHS if data.samples else None,
        "tokens": data.tokens,
        "mean_length": data.mean_length,
        "steps": data.steps(request.seq_length, batch),
        "padded_steps": data.steps(request.seq_length, batch, is_packed=False),
    }


def _entry(one: FitChoice, command: CommandLine) -> FitEntry:
    row, time, device = one.row, one.row.time, one.row.job.cluster.device
    return {
        "method": row.method,
        "title": one.title,
        "sharding": row.sharding,
        "gpus": one.gpus,
        "device": one.device,
        "gpus_text": one.gpus_text,
        "fits": row.fits,
        "reason": row.reason,
        "peak_bytes": row.bytes,
        "device_memory_bytes": device.memory_bytes if device else 0,
        "lacking_bytes": row.lacking_bytes,
        "memory": one.memory_text,
        "host_bytes": row.host_bytes,
        "host_memory": one.host_text,
        "tokens_per_second": row.tokens_per_second if time else None,
        "step_seconds": time.total if time else None,
        "step_seconds_low": time.low if time else None,
        "step_seconds_high": time.high if time else None,
        "extrapolates": list(time.extrapolates) if time else [],
        "hours": one.hours,
        "price": one.price,
        "optimizer": row.optimizer,
        "micro_batch_size": row.job.training.micro_batch_size,
        "micro_batches": row.job.num_microbatches,
        "recompute": row.job.training.recompute,
        "settings": one.settings,
        "command": command("plan", one),
    }
