"""Merges of byte-pair encoding learned on words that are cut into pieces already.

Sennrich et al., arXiv 1508.07909, algorithm 1: join the most frequent pair of neighbours, count
again, repeat. Counts are kept up to date instead: a merge changes the pairs of just the words that
hold it, and a heap with lazy deletion names the next one. Ties go to the smaller ids, so the same
words give the same merges. By hand: a b c seven times and x b c twice; b c (9) is joined first,
then a bc (7), then x bc (2); a b, with 7 before that, is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise

Pair = tuple[int, int]
LEAST_COUNT = 2  # a pair that occurs once is a copy of its text, no piece of the language


class PairCounts:
    """Adjacent pairs of all words: how often each occurs, and in which words."""

    def __init__(self, words: Mapping[tuple[int, ...], int]) -> None:
        self._words = [list(word) for word in words]
        self._weights = list(words.values())
        self._counts: dict[Pair, int] = {}
        self._places: dict[Pair, set[int]] = {}
        for number in range(len(self._words)):
            self._add(number)
        self._heap = [(-count, pair) for pair, count in self._counts.items()]
        heapify(self._heap)

    def pop(self) -> tuple[Pair, int] | None:
        """The most frequent pair and its count, once; None when all that is left is rare."""
        while self._heap:
            negative, pair = heappop(self._heap)
            count = self._counts.get(pair, 0)
            if count == -negative:
                return (pair, count) if count >= LEAST_COUNT else None
            # Its count fell since; one that rose has an entry of its own in front of this one.
            if LEAST_COUNT <= count < -negative:
                heappush(self._heap, (-count, pair))
        return None

    def merge(self, pair: Pair, made: int) -> None:
        """Join `pair` into `made` wherever it occurs, from left to right."""
        risen: set[Pair] = set()
        for number in sorted(self._places.get(pair, ())):
            self._remove(number)
            self._words[number] = joined(self._words[number], pair, made)
            risen |= self._add(number)
        for new in risen:
            heappush(self._heap, (-self._counts[new], new))

    def _add(self, number: int) -> set[Pair]:
        word, weight = self._words[number], self._weights[number]
        for pair in pairwise(word):
            self._counts[pair] = self._counts.get(pair, 0) + weight
            self._places.setdefault(pair, set()).add(number)
        return set(pairwise(word))

    def _remove(self, number: int) -> None:
        for pair in pairwise(self._words[number]):
            self._counts[pair] -= self._weights[number]
            self._places[pair].discard(number)
            if not self._counts[pair]:
                del self._counts[pair]


def joined(word: Sequence[int], pair: Pair, made: int) -> list[int]:
    """
    >>> joined([1, 1, 1, 2], (1, 1), 9)
    [9, 1, 2]
    """
    result: list[int] = []
    skip = False
    for left, right in pairwise([*word, -1]):
        if skip:
            skip = False
        elif skip := (left, right) == pair:
            result.append(made)
        else:
            result.append(left)
    return result


def learn_merges(
    words: Mapping[tuple[int, ...], int], join: Callable[[int, int], int | None]
) -> Iterator[tuple[Pair, int]]:
    """(pair, what it becomes), best first, until the pairs are rare or the caller has enough.

    words: pieces of each word -> how often it occurs. `join` names what a pair becomes, None where
    it has to stay apart.
    """
    pairs = PairCounts(words)
    while (best := pairs.pop()) is not None:
        pair, _ = best
        made = join(*pair)
        if made is not None:
            pairs.merge(pair, made)
            yield pair, made
