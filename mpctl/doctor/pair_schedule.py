"""Which hosts are measured with each other in which round, as in a tournament (the circle method).

n hosts (one more when n is odd, which pauses) need n - 1 rounds, in which every host meets every
other one once. In each round a host measures with one partner only, so that no two tests share its
network card. By hand, 4 hosts: 0-3 1-2, 1-3 2-0, 2-3 0-1.
"""

from __future__ import annotations

MOST_ROUNDS = 15


def all_rounds(hosts: int) -> list[list[tuple[int, int]]]:
    """Every pair of `hosts` hosts exactly once, (smaller, larger), by round."""
    seats = hosts + hosts % 2
    if hosts < 2:
        return []
    return [[pair for pair in _round(seats, turn) if pair[1] < hosts] for turn in range(seats - 1)]


def sampled_rounds(hosts: int, most: int = MOST_ROUNDS) -> list[list[tuple[int, int]]]:
    """At most `most` of the rounds, spread evenly: every host is measured with about as many
    others.

    Only these rounds are built, so that 4,096 hosts take no longer than 16.
    """
    seats = hosts + hosts % 2
    if hosts < 2:
        return []
    count = min(most, seats - 1)
    turns = [number * (seats - 1) // count for number in range(count)]
    return [[pair for pair in _round(seats, turn) if pair[1] < hosts] for turn in turns]


def partners(rounds: list[list[tuple[int, int]]], host: int) -> list[int]:
    """The partners of a host, in order of rounds."""
    found = ((a, b) for pairs in rounds for a, b in pairs if host in (a, b))
    return [b if a == host else a for a, b in found]


def _round(seats: int, turn: int) -> list[tuple[int, int]]:
    """The last seat stays, the others turn: it meets `turn`, and turn + i meets turn - i."""
    circle = seats - 1
    pairs = [(turn, circle)]
    for step in range(1, seats // 2):
        a, b = (turn + step) % circle, (turn - step) % circle
        pairs.append((min(a, b), max(a, b)))
    return pairs
