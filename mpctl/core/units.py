"""The only place where bytes, seconds and FLOP/s have prefixes.

Everywhere else bytes are ints, seconds floats, rates per second in base units.

>>> bytes_text(16_777_216), seconds_text(0.0421)
('16.0 MiB', '42.1 ms')
>>> count_text(8.3e9), count_text(1e18)
('8.3B', '1,000,000T')
>>> parse_measure("448 GB/s", BANDWIDTH), parse_measure("80 GiB", MEMORY)
(Decimal('448000000000'), Decimal('85899345920'))
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "mxfp8": 1, "nvfp4": 1}
# Bytes of an operand's element in dtypes that only products of linear layers have, with its scale:
# one byte for 32 elements of mxfp8, for 16 of nvfp4.
PRODUCT_BYTES = {"fp8": 1.0, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}


def bytes_text(amount: float) -> str:
    """`16777216` -> `16.0 MiB`: binary prefixes, one decimal."""
    for prefix in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(amount) < 1024 or prefix == "TiB":
            return f"{amount:.0f} B" if prefix == "B" else f"{amount:,.1f} {prefix}"
        amount /= 1024
    raise AssertionError("unreachable")


def part_text(part: float, whole: float) -> str:
    """`61.2 of 79.6 GiB`: a part of an amount of bytes; a shared unit is printed once."""
    texts = bytes_text(part), bytes_text(whole)
    unit = texts[1].split()[1]
    return f"{texts[0].removesuffix(f' {unit}')} of {texts[1]}"


def seconds_text(seconds: float) -> str:
    """`0.0421` -> `42.1 ms`; minutes and hours beyond 120 s."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def days_text(days: float) -> str:
    """`61.24` -> `61.2 days`; hours below two days, years from 10,000 days, so that a run and its
    band have one unit."""
    if days < 2:
        return seconds_text(days * 86_400)
    return f"{days:,.1f} days" if days < 10_000 else f"{days / 365.25:,.1f} years"


def energy_text(watt_hours: float) -> str:
    """`2.5e10` -> `25 GWh`."""
    for bound, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if watt_hours >= bound:
            return f"{watt_hours / bound:.3g} {prefix}Wh"
    return f"{watt_hours:.3g} Wh"


def count_text(amount: float) -> str:
    """`8_300_000_000` -> `8.3B`: the field's short form for parameters and tokens; `1,000,000T`
    beyond four digits."""
    for bound, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(amount) >= 1e4 * bound:
            return f"{amount / bound:,.0f}{suffix}"
        if abs(amount) >= bound:
            return f"{amount / bound:.4g}{suffix}"
    return f"{amount:.4g}"


MFU_CONVENTION = "attention counted in full"
ADAPTER_CONVENTION = f"{MFU_CONVENTION}, frozen products at 4N, adapters at 6N"
"""What MFU and HFU count: every pair of a query and a key, as Megatron-LM does, although a causal mask
hides half of them."""


def rate_text(per_second: float) -> str:
    """`312e12` -> `312.0 TFLOP/s`."""
    for bound, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G")):
        if per_second >= bound:
            return f"{per_second / bound:.1f} {prefix}FLOP/s"
    return f"{per_second / 1e6:.1f} MFLOP/s"


def plural(count: int, noun: str, several: str | None = None) -> str:
    """`plural(1, "node")` -> `1 node`, `plural(1024, "node")` -> `1,024 nodes`; several: a plural
    that is not the noun with an s, such as `batches`."""
    return f"{count:,} {noun if count == 1 else several or noun + 's'}"


def few_text(words: Sequence[str], *, most: int = 4) -> str:
    """Join the first `most` words, and say how many more there are.

    >>> few_text("abcdef")
    'a, b, c, d and 2 more'
    """
    more = f" and {len(words) - most:,} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def ranges_text(numbers: Iterable[int], *, most: int = 8) -> str:
    """`[0, 1, 2, 5]` -> `0-2, 5`: numbers in order, neighbours as a range. Beyond `most` ranges the
    rest is counted: `0, 2, 4 and 97 more`."""
    ordered = sorted(set(numbers))
    ranges: list[list[int]] = []
    for number in ordered:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    shown = ranges[:most]
    text = ", ".join("-".join(map(str, ends)) for ends in shown)
    more = len(ordered) - sum(ends[-1] - ends[0] + 1 for ends in shown)
    return f"{text} and {more:,} more" if more else text


def ranks_text(ranks: Iterable[int], *, most: int = 8) -> str:
    """`rank 3`, or `ranks 0-2, 5`; most: as in `ranges_text`."""
    numbers = set(ranks)
    return f"rank{'s' * (len(numbers) != 1)} {ranges_text(numbers, most=most)}"


def seconds_span_text(low: float, high: float) -> str:
    """`0.525` and `0.7793` -> `525 to 779 ms`: a span of time, the unit once, three digits of it.

    >>> seconds_span_text(0.93, 1.34)
    '0.93 to 1.34 s'
    """
    for unit, size in (("µs", 1e-6), ("ms", 1e-3), ("s", 1.0), ("min", 60.0)):
        if high < 1000 * size or unit == "min":
            break
    digits = 0 if high >= 100 * size else 1 if high >= 10 * size else 2
    return f"{low / size:.{digits}f} to {high / size:.{digits}f} {unit}"


def bytes_span_text(low: float, high: float) -> str:
    """`0.6-3.9 GiB`: a range of bytes under the prefix of its upper end."""
    if bytes_text(low) == bytes_text(high):
        return bytes_text(high)
    amount, prefix = bytes_text(high).split()
    scale = 1024 ** ("B", "KiB", "MiB", "GiB", "TiB").index(prefix)
    return f"{low / scale:,.{0 if prefix == 'B' else 1}f}-{amount} {prefix}"


@dataclass(frozen=True, eq=False)  # each is one of a kind
class Measure:
    """The quantity of a number. units: each unit's size in the base unit, which is `base`; example:
    a text as in a file."""

    name: str
    base: str
    example: str
    units: Mapping[str, Decimal]

    @property
    def pattern(self) -> str:
        """The regular expression of a number with a unit of this measure."""
        return rf"^{TIMES}{NUMBER} *({'|'.join(map(re.escape, self.units))})$"


NUMBER = r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]{1,2})?"
TIMES = "([0-9]{1,4} *[x×] *)?"  # of several alike: `8 x 400 Gb/s`
TEXT = re.compile(rf"{TIMES}({NUMBER}) *(\D.*)?", re.ASCII)
DECIMAL = {p: Decimal(1000) ** n for n, p in enumerate(("", "k", "M", "G", "T", "P", "E"))}
BINARY = {p: Decimal(1024) ** n for n, p in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi"), start=1)}
BYTES = {f"{prefix}B": size for prefix, size in (DECIMAL | BINARY).items()}
BITS = {f"{prefix}{unit}": size / 8 for unit in ("b/s", "bit/s", "bps") for prefix, size in DECIMAL.items()}
SECONDS = {"s": "1", "ms": "1e-3", "us": "1e-6", "µs": "1e-6", "μs": "1e-6", "ns": "1e-9", "min": "60", "h": "3600"}

MEMORY = Measure("memory", "bytes", "80 GiB", BYTES)
BANDWIDTH = Measure("a bandwidth", "bytes/s", "448 GB/s", {f"{unit}/s": n for unit, n in BYTES.items()} | BITS)
COMPUTE = Measure(
    "a rate of computing",
    "FLOP/s",
    "989 TFLOP/s",
    {f"{prefix}{unit}": n for unit in ("FLOP/s", "FLOPS") for prefix, n in DECIMAL.items()},
)
TOKENS = Measure(
    "a number of tokens",
    "tokens",
    "300B",
    {"": Decimal(1), "k": DECIMAL["k"], "M": DECIMAL["M"], "B": DECIMAL["G"], "T": DECIMAL["T"]},
)
TIME = Measure("a time", "seconds", "5 us", {unit: Decimal(n) for unit, n in SECONDS.items()})


class UnitError(ValueError):
    """Text that is not a number with a unit of the wanted measure. hint: the fix."""

    def __init__(self, message: str, wanted: Measure, near: str = "") -> None:
        super().__init__(message)
        self.hint = f'{near}use text such as "{wanted.example}", or a number of {wanted.base}'


def parse_measure(text: str, wanted: Measure) -> Decimal:
    """`"448 GB/s"` -> 448e9, exactly, in the base unit of the wanted measure; for several equal
    ones, such as the cards of a node, their sum: `"8 x 400 Gb/s"` -> 400e9.

    Raises UnitError for other text, and for a unit of another measure.
    """
    found = TEXT.fullmatch(text)
    if found is None:
        raise UnitError("it is not a number with a unit", wanted)
    number, unit = Decimal(found[2]), found[5] or ""
    if found[1]:
        number *= int(found[1].rstrip(" x×"))
    if unit in wanted.units:
        return number * wanted.units[unit]
    if not unit:
        raise UnitError("it has no unit", wanted)
    for other in (MEMORY, BANDWIDTH, COMPUTE, TIME):
        if unit in other.units:
            raise UnitError(f"it is {other.name}, and {wanted.name} is wanted", wanted)
    near = _near(unit, wanted)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise UnitError(f"{unit[:20]!r} is no unit of {wanted.name.removeprefix('a ')}", wanted, hint)


def _near(unit: str, wanted: Measure) -> list[str]:
    """The units of the measure that differ from this one only in case or in `ps` for `/s`. B means
    bytes: `GBps` is near GB/s, not Gbps, which is eight times less."""
    spelt = re.sub("ps$", "/s", unit, flags=re.IGNORECASE) if "B" in unit else unit
    near = [known for known in wanted.units if known.lower() == spelt.lower()]
    return [known for known in near if "B" in known and "B" in unit] or near
