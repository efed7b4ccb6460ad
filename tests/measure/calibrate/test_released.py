"""No source of published runs is planned worse than at the last release, by the part that is cheap to plan;
`make accuracy` judges all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.published import mlperf6_rows
from tests.released import POINT, Planned, Source, quick_runs, read_released, sources_of, worse


@pytest.mark.quick(1)
def test_no_source_is_worse_than_at_the_release() -> None:
    assert list(worse(read_released(), sources_of(map(Planned.of, quick_runs())))) == []


def test_a_source_that_is_more_than_a_point_worse_is_named() -> None:
    before = read_released()
    own = before["mlperf6"]
    near, far = (replace(own, error=own.error + POINT + more) for more in (-0.1, 0.1))
    assert list(worse(before, {"mlperf6": near})) == []
    (line,) = worse(before, {"mlperf6": far})
    assert line == f"mlperf6: {far.error:.1f} % off, {own.error:.1f} % at the release"
    assert len(list(worse(before, {"mlperf6": replace(own, rows=own.rows + 1), "new": own}))) == 2


def test_a_source_s_error_counts_both_signs() -> None:
    assert Source.of([(0.1, True), (-0.3, False)]) == Source(rows=2, error=20.0, bias=-10.0, inside=50.0)


def test_rows_of_mlperf_6_name_their_sources() -> None:
    rows = mlperf6_rows()
    assert len({row["id"] for row in rows}) == len(rows) == 19
    assert all("training_results_v6.0" in row["source"] and row["details"]["how"] for row in rows)
