"""Tunings whose trials are computed: a truth for each layout, noise by trial, a clock by hand."""

import random
from math import exp

from mpctl.measure.tune.loop import TuneLimits, Tuning
from mpctl.measure.tune.state import TuneFolder
from mpctl.measure.tune.trial import TrialResult
from mpctl.plan.planning.layout_settings import layout_of
from mpctl.plan.search.request import read_request

START = 9.0


class Killed(BaseException):
    """The process was killed."""


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def small_request(ranks=2, **settings):
    sizes = {"cluster.nodes": 1, "cluster.gpus_per_node": ranks}
    return read_request("demo", {**sizes, **settings}, [], {})


class FakeTarget:
    """Makes trials. truth: seconds of a step by layout; noise: of a trial, drawn by the layout and
    how often it ran, so that a repeated tuning sees the same. results: by number of trial, from 0,
    in place of a measurement: a result, or an exception to be raised."""

    def __init__(self, truth, clock, *, noise=0.0, seed=0, results=None):
        self.truth, self.clock, self.noise, self.seed = truth, clock, noise, seed
        self.results = results or {}
        self.orders, self.counts = [], {}

    def __call__(self, order, watch):
        layout, number = layout_of(order.job), len(self.orders)
        self.orders.append(layout)
        found = self.results.get(number)
        if isinstance(found, BaseException):
            raise found
        count = self.counts[layout] = self.counts.get(layout, 0) + 1
        drawn = random.Random(f"{self.seed} {layout} {count}").gauss(0, self.noise)
        seconds = self.truth(layout) * exp(drawn)
        self.clock.now += START + order.steps * seconds
        return found or TrialResult("measured", (seconds,) * order.steps)


def tuning_of(path, request, target, *, seconds=300.0, trials=None, clock=None):
    limits, clock = TuneLimits(seconds, trials), clock or target.clock
    return Tuning(request, TuneFolder(path), target, limits, clock=clock)
