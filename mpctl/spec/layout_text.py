"""What every virtual stage of a pipeline has, in Megatron's words: parsed, checked, written.

The grammar is that of --pipeline-model-parallel-layout (Megatron-LM,
core/transformer/pipeline_parallel_layer_layout.py). E is the embedding, t a layer, m a layer of
multi-token prediction, L output head and loss; `|` ends a virtual stage; `x*3` repeats a letter or a
bar, `(..)*3` a group, without groups inside it; commas are for the eye. Part i is chunk i // pp of
stage i mod pp. This module knows the text; model/pipeline/explicit.py holds it to a job.

>>> [part.text for part in parse_layout("Et*3|(tt|)*2,m|L").parts]
['Ettt', 'tt', 'tt', 'm', 'L']
>>> write_layout(parse_layout("Et*4|(t*4|)*14tmL").parts)
'E(t*4|)*15tmL'
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

MOST_ITEMS = 20_000
"""Letters and bars of an expanded layout."""

_REPEAT = re.compile(r",*\*(\d*)")


class LayoutPart(NamedTuple):
    """What a virtual stage has: whether the embedding, layers, layers of multi-token prediction, whether
    output head and loss."""

    embedding: bool = False
    layers: int = 0
    predictions: int = 0
    loss: bool = False

    @property
    def text(self) -> str:
        """Its letters in the order of the data."""
        return "E" * self.embedding + "t" * self.layers + "m" * self.predictions + "L" * self.loss


class LayoutProblem(NamedTuple):
    """What is wrong with a layout, and a way out. at: the place in the text, from 1; 0 where it is none."""

    message: str
    hint: str
    at: int = 0

    def __str__(self) -> str:
        return f"position {self.at}: {self.message}" if self.at else self.message


class PipelineLayout(NamedTuple):
    """The parts of a layout in the order of the data; part i is chunk i // pp of stage i mod pp.

    problems: errors of the text; the parts are then what could be read.
    """

    parts: tuple[LayoutPart, ...]
    problems: tuple[LayoutProblem, ...] = ()

    @property
    def layers(self) -> int:
        """Layers of all parts."""
        return sum(part.layers for part in self.parts)

    @property
    def predictions(self) -> int:
        """Layers of multi-token prediction of all parts."""
        return sum(part.predictions for part in self.parts)

    @property
    def prediction_parts(self) -> list[int]:
        """Numbers of the parts that have layers of multi-token prediction."""
        return [number for number, part in enumerate(self.parts) if part.predictions]

    @property
    def separates_prediction(self) -> bool:
        """Whether layers of multi-token prediction are in another part than the loss."""
        return any(part.predictions and not part.loss for part in self.parts)


def stage_sizes(text: str, given: Mapping[str, object]) -> dict[str, int]:
    """The pp and vpp of a layout that are not among those given, if the number of its parts has them.

    >>> stage_sizes("Et|t|t|tL", {}), stage_sizes("Et|t|t|tL", {"pp": 2}), stage_sizes("Et|tL", {"pp": 4})
    ({'pp': 4, 'vpp': 1}, {'vpp': 2}, {})
    """
    parts, pp, vpp = len(parse_layout(text).parts), given.get("pp"), given.get("vpp")
    if pp is None and vpp is None:
        return {"pp": max(1, parts), "vpp": 1}
    known = vpp if pp is None else pp
    if (pp is None) == (vpp is None) or not isinstance(known, int) or known < 1 or parts % known:
        return {}
    return {"vpp" if vpp is None else "pp": parts // known}


def shortest(text: str) -> str:
    """The shortest text of the same layout; a text with errors unchanged."""
    layout = parse_layout(text)
    return text if layout.problems else write_layout(layout.parts)


class _Letters(NamedTuple):
    """A letter or bar, and its place in the text."""

    letter: str
    at: int


@lru_cache(maxsize=256)
def parse_layout(text: str) -> PipelineLayout:
    """Read a layout with all its errors."""
    problems: list[LayoutProblem] = []
    items = _LetterReader(text, problems).items()
    if len(items) > MOST_ITEMS:
        message = f"{len(items):,} letters and bars when expanded, above {MOST_ITEMS:,}"
        return PipelineLayout((), (*problems, LayoutProblem(message, "use smaller repeats")))
    problems += _order_problems(items)
    words = "".join(item.letter for item in items).split("|")
    parts = (LayoutPart("E" in word, word.count("t"), word.count("m"), "L" in word) for word in words)
    return PipelineLayout(tuple(parts), tuple(sorted(problems, key=lambda problem: problem.at)))


class _LetterReader:
    """Expands a text; what cannot be read is reported and skipped."""

    def __init__(self, text: str, problems: list[LayoutProblem]) -> None:
        self.text, self.at, self.problems = text, 0, problems

    def items(self) -> list[_Letters]:
        """Letters and bars of the whole text."""
        found, group, opened, inner = list[_Letters](), list[_Letters](), 0, 0
        while self.at < len(self.text):
            letter, place = self.text[self.at], self.at + 1
            self.at += 1
            read = group if opened else found
            if letter in "EtmL|":
                read += [_Letters(letter, place)] * self._repeat(len(found) + len(group))
            elif letter == "(" and opened:
                self._wrong(place, f"a group inside the one of position {opened}", "write the inner group out")
                inner += 1
            elif letter == ")" and inner:
                self._repeat(0)
                inner -= 1
            elif letter == "(":
                opened, group = place, []
            elif letter == ")" and opened:
                found += self._repeated(group, len(found))
                opened, group = 0, []
            elif letter == ")":
                self._wrong(place, "`)` without `(`", "leave it out, or open the group")
            elif letter == "*":
                self._wrong(place, "`*` follows no letter, bar or group", "repeat one of these: t*4, |*2, (tt|)*3")
                while self.text[self.at : self.at + 1].isdecimal():
                    self.at += 1
            elif letter != ",":
                self._wrong(place, f"{letter!r} is no item", "use E, t, m, L, |, groups ( ) and repeats *N")
        if opened:
            self._wrong(opened, "`(` without `)`", "close the group and repeat it: (tt|)*3")
            found += group
        return found

    def _repeated(self, group: list[_Letters], before: int) -> list[_Letters]:
        place = self.at
        if self.text[place : place + 1] != "*":
            self._wrong(place, "the group is not repeated", "write (..)*N, or leave the brackets out")
            return group
        return group * min(self._repeat(before), MOST_ITEMS // max(1, len(group)) + 1)

    def _repeat(self, before: int) -> int:
        """Read `*N` where it stands here; N, at most what makes the layout too long."""
        match = _REPEAT.match(self.text, self.at)
        if match is None:
            return 1
        place, self.at = self.at + 1, match.end()
        if not match[1]:
            self._wrong(place, "`*` without a number", "say how often: *4")
            return 1
        return min(int(match[1][:9]), max(0, MOST_ITEMS + 1 - before))

    def _wrong(self, at: int, message: str, hint: str) -> None:
        self.problems.append(LayoutProblem(message, hint, at))


def _order_problems(items: list[_Letters]) -> Iterator[LayoutProblem]:
    """E first and once, L last and once, no layer behind multi-token prediction, that in one part."""
    letters = [item.letter for item in items]
    for letter, name, end, where in (("E", "embedding", 0, "first"), ("L", "loss", -1, "last")):
        count = letters.count(letter)
        if count != 1:
            message = f"{count} times {letter}, the {name}, which a pipeline has once"
            yield LayoutProblem(message, f"write one {letter}, as the {where} letter")
        elif letters[end] != letter:
            place = items[letters.index(letter)].at
            yield LayoutProblem(f"{letter}, the {name}, is not {where}", f"move it to the {where} place", place)
    if "t" not in letters:
        yield LayoutProblem("no layer t", "write a t for each layer of the model")
    if "m" in letters:
        first = letters.index("m")
        behind = next((item for item in items[first:] if item.letter == "t"), None)
        if behind is not None:
            message = f"a layer t behind multi-token prediction m of position {items[first].at}"
            yield LayoutProblem(message, "move m behind the last t", behind.at)
        last = len(letters) - 1 - letters[::-1].index("m")
        if "|" in letters[first:last]:
            hint = f"move them to the stage of the one at position {items[first].at}"
            yield LayoutProblem("layers m of multi-token prediction are in several stages", hint, items[last].at)


def write_layout(parts: Iterable[LayoutPart]) -> str:
    """The shortest text of a layout; of equally short ones that with the fewest groups, then repeats.

    >>> write_layout([LayoutPart(True), LayoutPart(layers=2), LayoutPart(layers=2), LayoutPart(loss=True)])
    'E|tt|tt|L'
    """
    flat = "|".join(part.text for part in parts)
    best: list[tuple[int, int, str]] = [(0, 0, "")] * (len(flat) + 1)
    for start in range(len(flat) - 1, -1, -1):
        found = ((head, best[stop]) for stop, head in _heads(flat, start))
        best[start] = min(
            (len(head) + size, items + (100 if head[0] == "(" else 1), head + rest)
            for head, (size, items, rest) in found
        )
    return best[0][2]


def _heads(flat: str, start: int) -> Iterator[tuple[int, str]]:
    """Ends and texts of the items that may begin at a place: a letter, its repeats, groups."""
    length = _run(flat, start)
    yield start + 1, flat[start]
    for count in range(2, length + 1):
        yield start + count, f"{flat[start]}*{count}"
    for size in range(2, (len(flat) - start) // 2 + 1):
        what, count = flat[start : start + size], 1
        while flat.startswith(what, start + count * size):
            count += 1
            yield start + count * size, f"({repeated(what)})*{count}"


def _run(flat: str, start: int) -> int:
    """Equal letters from a place on."""
    return len(flat) - start - len(flat[start:].lstrip(flat[start]))


@lru_cache(maxsize=4096)
def repeated(flat: str) -> str:
    """A text without groups, repeats of three and more letters as `x*N`."""
    return re.sub(r"(.)\1{2,}", lambda run: f"{run[1]}*{len(run[0])}", flat)
