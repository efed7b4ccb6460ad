"""Rows and findings of any bench as tables: a column for each key, each figure in its unit.

The unit follows from the key, as reports name keys: `..seconds` are seconds, `..bytes` bytes,
`..efficiency`, `..share` and the like are shares of 1.

>>> cell("predicted_seconds", 0.012), cell("busbw", 1.5e9), cell("efficiency", 0.76)
('12.0 ms', '1.50 GB/s', '76.0 %')
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mpctl.bench.documents import number_of
from mpctl.bench.report import flat
from mpctl.render.html.frame import details, note, table
from mpctl.render.markup import Raw, el, join
from mpctl.units import bytes_text, count_text, plural, rate_text, seconds_text

MOST_ROWS, MOST_ITEMS, FEW = 1000, 200, 20
LEAST_ROWS = 4  # from which on what all have in common is told apart
SHARES = ("share", "efficiency", "mfu", "hfu", "share_of_peak", "coverage", "mape")
CHANGES = ("error", "worst", "bias")  # shares with a sign
RATES = ("algbw", "busbw", "bandwidth", "bytes_per_second")


def rows_table(caption: str, rows: Sequence[Mapping[str, object]]) -> Iterator[Raw]:
    """The rows as a table, with what all of them have in common in a line above it."""
    flats = [dict(flat(row)) for row in rows[:MOST_ROWS]]
    keys = [key for key in dict.fromkeys(key for row in flats for key in row) if key != "name"]
    common = {} if len(flats) < LEAST_ROWS else {
        key: flats[0].get(key) for key in keys if len({repr(row.get(key)) for row in flats}) == 1
    }  # fmt: skip
    told = [f"{words(key)} {cell(key, value)}" for key, value in common.items() if cell(key, value)]
    if told:
        yield note(f"In every row: {', '.join(told)}.")
    names = {key for key in keys if all(row.get(key) == row.get("name") for row in flats)}
    shown = [key for key in keys if key not in common and key not in names]
    body = [(row.get("name", ""), *(cell(key, row.get(key)) for key in shown)) for row in flats]
    yield table(caption, ("name", *map(words, shown)), body)
    if len(rows) > MOST_ROWS:
        yield note(f"The first {MOST_ROWS} of {plural(len(rows), 'row')}; report.csv has all.")


def findings_parts(findings: Mapping[str, object]) -> Iterator[Raw]:
    """Plain figures as a list, and a table or a list for each inner one."""
    plain = {key: value for key, value in findings.items() if not isinstance(value, dict | list)}
    if plain:
        yield _pairs("Findings", plain)
    for key, value in findings.items():
        if isinstance(value, dict) and value:
            yield from _inner(key, value)
        elif isinstance(value, list) and value:
            yield from _listed(key, value)


def _inner(key: str, value: Mapping[str, object]) -> Iterator[Raw]:
    tables = {name: inner for name, inner in value.items() if isinstance(inner, dict)}
    if len(tables) == len(value):
        yield from rows_table(words(key), [{"name": name, **own} for name, own in tables.items()])
    else:
        yield _pairs(words(key), dict(flat(value)))


def _listed(key: str, items: Sequence[object]) -> Iterator[Raw]:
    tables = [item for item in items if isinstance(item, dict)]
    if len(tables) == len(items):
        named = [item if "name" in item else {"name": at, **item}
                 for at, item in enumerate(tables, 1)]  # fmt: skip
        shown = rows_table(words(key), named)
        yield join(shown) if len(named) <= FEW else details(words(key), *shown)
    else:
        yield el("h3", words(key))
        yield el("ul", *(el("li", cell(key, item)) for item in items[:MOST_ITEMS]))


def _pairs(caption: str, pairs: Mapping[str, object]) -> Raw:
    rows = [(words(key), text) for key, value in pairs.items() if (text := cell(key, value))]
    return table(caption, ("", ""), rows, left=2)


def words(key: str) -> str:
    """`planned_sent_bytes` -> `planned sent bytes`."""
    return key.replace("_", " ")


def cell(key: str, value: object) -> str:
    """A value in words, in the unit that its key names."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return f"{plural(len(value), 'entry', 'entries')}" if value else ""
    number = number_of({key: value}, key)
    return str(value) if number is None else _figure(key.rsplit(".", 1)[-1], number)


def _figure(key: str, number: float) -> str:
    last = key.rsplit("_", 1)[-1]
    if key in RATES:
        return f"{number / 1e9:.3g} GB/s" if number < 1e9 else f"{number / 1e9:,.2f} GB/s"
    if key == "flops_per_second":
        return rate_text(number)
    if last in ("seconds", "latency") or key == "start" or key.startswith("seconds"):
        return seconds_text(number)
    if last == "bytes":
        return bytes_text(number)
    if last in CHANGES:
        return f"{number:+.1%}".replace("%", " %")
    if last in SHARES or key in SHARES:
        return f"{number:.1%}".replace("%", " %")
    if last == "flops":
        return count_text(number)
    is_whole = number == int(number) or abs(number) >= 1000
    return f"{number:,.0f}" if is_whole and abs(number) < 1e15 else f"{number:.4g}"
