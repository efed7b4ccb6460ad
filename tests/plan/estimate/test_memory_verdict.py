"""Whether recorded runs of nanotron are said to fit as they did: the gate on a seventh of them."""

from __future__ import annotations

from statistics import mean

import pytest

from mpctl.plan.rules.validate import find_errors
from mpctl.spec.cluster import ClusterSpec
from tests.verdicts import JudgedRun, balanced_accuracy, judged_runs

HEADROOM = ClusterSpec().headroom


@pytest.fixture(scope="module")
def runs() -> list[JudgedRun]:
    return judged_runs(every=7)


def test_what_nanotron_refuses_to_start_is_refused_and_nothing_that_ran(runs: list[JudgedRun]) -> None:
    refused = [run for run in runs if find_errors(run.job)]
    assert len(refused) > 10 and not any(run.ran for run in refused)


def test_runs_that_failed_for_memory_do_not_fit_and_others_do(runs: list[JudgedRun]) -> None:
    assert len(runs) > 200 and sum(not run.ran and run.has_cause for run in runs) > 60
    assert balanced_accuracy(runs, HEADROOM) >= 0.92
    # A third of the memory kept free judges more of them wrongly.
    assert balanced_accuracy(runs, HEADROOM) > balanced_accuracy(runs, 33)
    errors = [run.first_bytes / run.peak_bytes - 1 for run in runs if run.peak_bytes]
    assert mean(map(abs, errors)) < 0.14 and abs(mean(errors)) < 0.05
