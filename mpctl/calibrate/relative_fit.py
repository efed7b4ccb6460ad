"""Figures behind measured seconds that are sums of terms: the least relative error, none below 0.

    minimise  sum_i ((sum_j a_ij x_j) / t_i - 1)^2,  x_j >= 0

Relative, because a message of 1 KiB is to be as right in its percents as one of 64 MiB. Where a
figure would be below 0 it is 0. The x_j are at most a few: every choice of those that are not 0 is
tried, and the best of which none is below 0 is the solution; of equal ones that with the fewest.

By hand, messages of 1 and 3 MB in 3 and 5 ms, terms (bytes, 1): 1 ns a byte and 2 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from mpctl.calibrate.fit import solve_definite

TOLERANCE = 1e-9  # squared relative error of a measurement that one more figure must take away
Terms = Sequence[Sequence[float]]


def fit_relative(terms: Terms, seconds: Sequence[float]) -> list[float]:
    """The figures x, one a column of `terms`.

    terms: for each measurement, by what each figure is multiplied; seconds: measured, above 0.

    >>> [round(x, 9) for x in fit_relative([[1e6, 1], [3e6, 1]], [3e-3, 5e-3])]
    [1e-09, 0.002]
    """
    rows = [[a / t for a in row] for row, t in zip(terms, seconds, strict=True)]
    columns = len(rows[0])
    told = [j for j in range(columns) if any(row[j] for row in rows)]
    best, least = [0.0] * columns, float(len(rows))
    for count in range(1, len(told) + 1):
        for chosen in combinations(told, count):
            found = _least_squares(rows, chosen)
            cost = _cost(rows, found)
            if min(found) >= 0 and cost < least - TOLERANCE * len(rows):
                best, least = found, cost
    return best


def _least_squares(rows: Terms, chosen: Sequence[int]) -> list[float]:
    """The figures where only the chosen ones are not 0; each column is scaled to a length of 1."""
    length = {j: sum(row[j] ** 2 for row in rows) ** 0.5 for j in chosen}
    scaled = [[row[j] / length[j] for j in chosen] for row in rows]
    size = range(len(chosen))
    matrix = [[sum(row[i] * row[j] for row in scaled) for j in size] for i in size]
    right = [sum(row[i] for row in scaled) for i in size]
    found = [0.0] * len(rows[0])
    for j, x in zip(chosen, solve_definite(matrix, right, 1e-9), strict=True):
        found[j] = x / length[j]
    return found


def _cost(rows: Terms, figures: Sequence[float]) -> float:
    """The sum of squared relative errors. rows: terms, each divided by its measured seconds."""
    return sum((sum(a * x for a, x in zip(row, figures, strict=True)) - 1) ** 2 for row in rows)
