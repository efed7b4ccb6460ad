"""The answer of `mpctl fit`: what to use, every way to fine-tune, what to type."""

from __future__ import annotations

from collections.abc import Iterator

from mpctl.core.units import bytes_text, count_text, days_text, plural, seconds_text
from mpctl.plan.fit.document import FitDocument, FitEntry, price_text, speed_text
from mpctl.plan.fit.methods import TITLES
from mpctl.render.parts import Column, DataTable, Facts, Lines, Part, Section, Sentence
from mpctl.render.terminal import print_parts


def print_fit(document: FitDocument) -> None:
    """Print the answer on stdout."""
    print_parts(fit_parts(document))


def fit_parts(document: FitDocument) -> Iterator[Part]:
    """The advice, what it assumes, the rows, ways out, and the lines to type."""
    answer, ways = document["answer"], document["ways_out"]
    yield Sentence(f"{document['model']}: will it fit?", "title", on="page")
    yield Sentence(document["advice"], "passed" if answer else "failed")
    yield Section("fit", "Fit")
    yield Facts(list(_assumptions(document)))
    if document["rows"]:
        yield _table(document)
    yield from (Sentence(text, "note") for text in _notes(document))
    if ways:
        yield Facts([(way["change"], _way_text(way["row"], document)) for way in ways], "Nearest ways out")
        yield Lines("To plan them", [way["row"]["command"] for way in ways], are_commands=True)
    elif document["gpus"] and not answer:
        yield Sentence("no shorter rows, number of these GPUs or other GPU makes it fit", "hint")
    if document["commands"]:
        yield Lines("What to type", document["commands"], are_commands=True)


def _rows_title(document: FitDocument) -> str:
    if document["gpus"] is None:
        return "Fewest GPUs of powers of two, smallest first" + (
            "; then the cheapest number" if document["has_price"] else ""
        )
    return "Ways to fine-tune"


def _assumptions(document: FitDocument) -> Iterator[tuple[str, str]]:
    """Facts that all rows share."""
    data, batch = document["data"], document["global_batch_size"]
    yield "model", f"{document['model']}, {count_text(document['parameters'])} parameters, {document['dtype']}"
    if document["assumed"]:
        yield "GPUs", document["assumed"]
    rows = f"{plural(batch, 'row')} of {document['seq_length']:,} tokens a step ({document['length_text']})"
    yield "batch", f"{rows}; micro batch and recomputation by row"
    yield "adapters", f"rank {document['rank']} on {', '.join(document['targets'])}"
    yield (
        "data",
        _data_text(document)
        if data["is_given"]
        else (f"hours are of {data['text']}: name yours by --samples N --epochs E, or --tokens 50M"),
    )
    if unused := document["unused_prices"]:
        yield "price", f"given for {', '.join(unused)}, and none for these GPUs: --price HOURLY"
    elif not document["has_price"]:
        yield "price", "none is known: --price GPU=HOURLY, for example --price a100-80gb=1.8"
    yield "runtime", f"{document['runtime']}; headroom {document['headroom_percent']:g} %"


def _data_text(document: FitDocument) -> str:
    data = document["data"]
    text, steps, padded = data["text"], data["steps"], data["padded_steps"]
    if data["mean_length"] is None:
        rows = ", a row each" if data["samples"] is not None else ""
        return f"{text}{rows}: {plural(steps, 'step')}"
    packed = f"{text}, {data['mean_length']:,} tokens a sample, packed into rows: {plural(steps, 'step')}"
    return f"{packed}; each padded to a row, {padded:,} steps, {padded / steps:.1f} times as many"


def _notes(document: FitDocument) -> Iterator[str]:
    """Why rows are refused, what has no row, and how far a run may be from the answer."""
    for reason in dict.fromkeys(filter(None, (row["reason"] for row in document["rows"]))):
        yield f"refused: {reason}"
    if others := document["others"]:
        yield f"fits as well, on more or larger GPUs: {', '.join(others)}; --price GPU=HOURLY shows those it names"
    answer = document["answer"]
    if answer is None or not answer["step_seconds"]:
        return
    hours, seconds = answer["hours"] or 0, answer["step_seconds"]
    low, high = answer["step_seconds_low"] or seconds, answer["step_seconds_high"] or seconds
    span = f"{days_text(hours * low / seconds / 24)} to {days_text(hours * high / seconds / 24)}"
    one = "the answer" if document["gpus"] else f"{answer['title']} on {answer['gpus_text']}"
    yield f"9 of 10 runs of {one} take {span} ({seconds_text(seconds)} a step planned)"
    if answer["extrapolates"]:
        yield f"extrapolated: {'; '.join(answer['extrapolates'])}"


def _way_text(row: FitEntry, document: FitDocument) -> str:
    """`QLoRA, one GPU: 11.2 of 24.0 GiB, 3,130 tokens/s, 4.1 h`."""
    price = [f"price {price_text(row['price'])}"] if row["price"] is not None else []
    how = ", ".join([row["title"], row["sharding"], *filter(None, [row["optimizer"]])])
    cost = f"{speed_text(row['tokens_per_second'] or 0)} tokens/s, {days_text((row['hours'] or 0) / 24)}"
    return ", ".join([f"{how}: {row['memory']}", cost, *price]) + f" for {document['data']['text']}"


def _table(document: FitDocument) -> DataTable:
    """The rows; without a column whose cells are all alike."""
    is_any, rows = document["gpus"] is None, document["rows"]
    columns = [
        Column("method", lambda row: TITLES[row["method"]], left=True),
        *([Column("GPUs", "gpus_text", left=True)] if is_any else []),
        Column("sharding", "sharding", left=True),
        *([] if is_any else [Column("fits", _fits_text, left=True)]),
        Column("memory", lambda row: None if row["reason"] else _memory_text(row, is_any=is_any)),
        *([Column("host", "host_memory")] if any(row["host_memory"] for row in rows) else []),
        Column("tokens/s", "tokens_per_second", speed_text),
        Column("time", "hours", lambda hours: days_text(hours / 24)),
        *([Column("price", "price", price_text)] if document["has_price"] else []),
        Column("batch", lambda row: None if row["reason"] else f"{row['micro_batch_size']} x {row['micro_batches']}"),
        Column("recompute", lambda row: None if row["reason"] else row["recompute"], left=True),
        *([Column("optimizer", _optimizer_text, left=True)] if any(row["optimizer"] for row in rows) else []),
    ]
    return DataTable(_rows_title(document), columns, rows, whole=len(columns), is_stacked=False)


def _memory_text(row: FitEntry, *, is_any: bool) -> str:
    """Of any GPUs the need alone: their names say how much they have."""
    return bytes_text(row["peak_bytes"]) if is_any else row["memory"]


def _optimizer_text(row: FitEntry) -> str:
    """`8-bit, bf16` of `adamw-8bit, pure bf16`: the column is narrow."""
    return row["optimizer"].replace("adamw-", "").replace("8bit", "8-bit").replace("pure ", "")


def _fits_text(row: FitEntry) -> str:
    return "yes" if row["fits"] else "refused" if row["reason"] else "no"
