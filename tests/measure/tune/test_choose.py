"""The law of the next trial and of the end, against systems whose truth is known."""

from __future__ import annotations

import random
from math import exp, log

import pytest

from mpctl.measure.tune.choose import Belief, Candidate, MeasuredLayout, alikeness, choose, choose_several, is_settled
from mpctl.measure.tune.pool import Pool
from mpctl.plan.planning.layout_settings import LayoutSettings
from tests.measure.tune.fakes import small_request

DP, TP = LayoutSettings(dp=4), LayoutSettings(tp=4)
PP = LayoutSettings(pp=4, micro_batch_size=1)


def plan(layout, seconds, spread=0.1, size=1):
    return Candidate(layout, seconds, spread, size)


def after(measured, *others):
    """The belief after these trials, by candidate."""
    return Belief([*measured, *others], [MeasuredLayout(one, seconds) for one, seconds in measured.items()])


def test_the_first_trial_is_the_plainest_of_the_fastest_by_plan():
    odd = plan(LayoutSettings(dp=4, zero=2, recompute="full"), 0.999)
    choice = choose(Belief([plan(TP, 1.2), odd, plan(DP, 1.0)], []))
    assert choice.candidate.layout == DP


def test_a_layout_without_a_chance_is_no_rival():
    best = plan(DP, 1.0)
    assert after({best: (1.0, 1.0)}, plan(TP, 2.0)).rivals == []
    assert len(after({best: (1.0, 1.0)}, plan(TP, 1.05)).rivals) == 1


def test_a_slow_measurement_rules_out_layouts_that_are_like_it():
    slow = plan(TP, 1.0)
    alike = plan(LayoutSettings(tp=4, sequence_parallel=True), 1.0)
    apart = plan(PP, 1.0)
    belief = after({plan(DP, 1.0): (1.0, 1.0), slow: (1.5, 1.5)}, alike, apart)
    chance = {belief.points[at].layout: belief.chance(at) for at in range(4)}
    assert chance[alike.layout] < 0.05 < chance[apart.layout]


def test_constants_that_two_layouts_share_carry_an_error_from_one_to_the_other():
    measured = plan(TP, 1.0)._replace(slopes=(0.2,))
    other = plan(PP, 1.0)._replace(slopes=(0.2,))
    without = plan(PP, 1.0)._replace(slopes=(0.0,))
    found = [after({plan(DP, 1.0)._replace(slopes=(0.0,)): (1.0,), measured: (1.3,)}, one) for one in (other, without)]
    shared, apart = (belief.means[2] for belief in found)
    assert shared > apart + 0.05


def test_the_first_trials_are_of_different_classes_then_the_best_is_repeated():
    alike = [plan(DP._replace(zero=1), 1.0), plan(DP._replace(recompute="full"), 1.0)]
    four = [plan(one, 1.0) for one in (DP, TP, PP, LayoutSettings(cp=4))]
    trials = dict(zip(four, ((1.0,), (1.05,), (1.02,), (1.04,)), strict=True))
    for count in range(1, 4):
        known = {one: trials[one] for one in four[:count]}
        assert choose(after(known, *alike, *four[count:])).candidate in four[count:]
    assert choose(after(trials, *alike)).candidate.layout == DP


def test_it_is_settled_when_the_lead_is_beyond_noise_and_was_repeated():
    best, second = plan(DP, 1.0), plan(TP, 1.0)
    assert not is_settled(after({best: (1.0,), second: (1.3,)}))
    assert is_settled(after({best: (1.0, 1.0), second: (1.3,)}))
    assert choose(after({best: (1.0, 1.0), second: (1.3,)})) is None


def test_two_that_are_close_are_measured_in_turn():
    first, second = plan(DP, 1.0), plan(TP, 1.0)
    trials = {first: (1.0, 1.04), second: (1.01,)}
    assert choose(after(trials)).candidate.layout == TP
    trials[second] = (1.01, 1.02, 1.03)
    assert choose(after(trials)).candidate.layout == DP


def test_only_a_candidate_is_repeated():
    gone = plan(DP, 1.0)
    belief = Belief([plan(TP, 1.05)], [MeasuredLayout(gone, (1.0,))])
    assert choose(belief).candidate.layout == TP


def test_several_at_once_are_of_different_classes():
    near = [plan(DP._replace(zero=zero), 1.0 + zero / 1000) for zero in range(3)]
    chosen = choose_several(Belief([*near, plan(TP, 1.02), plan(PP, 1.02)], []), 3)
    assert {one.candidate.layout.tp for one in chosen} == {1, 4}
    assert len({one.candidate.layout for one in chosen}) == 3


def test_plans_that_are_far_off_widen_their_spread():
    trials = {DP: 1.0, TP: 1.6, PP: 0.6, LayoutSettings(cp=4): 1.9}
    wild = [MeasuredLayout(plan(one, 1.0, 0.05), (seconds,)) for one, seconds in trials.items()]
    calm = [one._replace(seconds=(1.0 + at / 1000,)) for at, one in enumerate(wild)]
    assert Belief.of([], wild).scale > Belief.of([], calm).scale == 1


def test_alikeness_falls_with_every_setting_that_differs():
    further = DP._replace(dp=2, tp=2)
    assert 1 > alikeness(DP, further) > alikeness(DP, further._replace(schedule="zero-bubble"))


# ---------------------------------------------------------------- against a known truth


@pytest.fixture(scope="module")
def candidates():
    """Those of the job demo on four ranks, without the slopes."""
    pool = Pool(small_request(4).space())
    return [Candidate(p.layout, p.seconds, 0.1, p.bytes) for p in pool.search()]


def true_seconds(candidates, seed, error):
    """Step times whose plans are off by errors of single settings, of ways to split, and of
    layouts."""
    drawn = random.Random(seed)
    of_value: dict[object, float] = {}

    def effect(key, size):
        return of_value.setdefault(key, drawn.gauss(0, size))

    def off(layout):
        names = ("tp", "pp", "cp", "schedule", "micro_batch_size", "zero", "recompute")
        singles = sum(effect((name, getattr(layout, name)), error / 2.2) for name in names)
        return 0.3 + singles + effect((layout.tp, layout.pp, layout.cp), error / 2)

    return {c.layout: c.seconds * exp(off(c.layout) + drawn.gauss(0, 0.01)) for c in candidates}


def found(candidates, truth, *, noise, trials, seed):
    """The layout that so many trials find, and how many were made."""
    drawn, by_layout = random.Random(seed), {c.layout: c for c in candidates}
    times: dict[LayoutSettings, list[float]] = {}
    for _ in range(trials):
        belief = Belief.of(candidates, [MeasuredLayout(by_layout[one], tuple(own)) for one, own in times.items()])
        choice = choose(belief)
        if choice is None:
            break
        layout = choice.candidate.layout
        times.setdefault(layout, []).append(truth[layout] * exp(drawn.gauss(0, noise)))
    return belief.points[belief.best].layout, sum(map(len, times.values()))


@pytest.mark.slow
def test_few_trials_find_a_layout_within_three_percent_of_the_best(candidates):
    regrets = []
    for seed in range(6):
        truth = true_seconds(candidates, seed, 0.05)
        best, trials = found(candidates, truth, noise=0.02, trials=16, seed=seed)
        regrets.append(truth[best] / min(truth.values()) - 1)
        assert trials < len(candidates) / 10
    assert sorted(regrets)[-2] <= 0.03, regrets
    assert max(regrets) <= 0.05, regrets


def test_a_plan_that_is_right_needs_few_trials(candidates):
    truth = {c.layout: c.seconds for c in candidates}
    best, _ = found(candidates, truth, noise=0.01, trials=6, seed=0)
    assert log(truth[best] / min(truth.values())) < 0.01
