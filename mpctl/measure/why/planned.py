"""The plan of the observed job, and of the same job with other settings or slower parts.

By hand, a step of 3 s of which 1 s is messages between nodes that nothing hides: with a network of
1/4 it takes 6 s, and a measured 4.5 s is explained by 1/2.5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import exp, log
from typing import Any, NamedTuple

from mpctl.core.axes import CP_GROUPS, FILLING
from mpctl.core.errors import InputError
from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.estimate.job import Estimate
from mpctl.plan.estimate.kernels import MissingFigure
from mpctl.plan.estimate.makespan import ChunkTimes
from mpctl.plan.estimate.network import MissingLink
from mpctl.plan.estimate.operator_times import OperatorTimer
from mpctl.plan.estimate.routing import expert_load
from mpctl.plan.estimate.step import QUANTILE, StepTime, part_of_group
from mpctl.plan.estimate.time import StepTimeModel, step_time_model
from mpctl.plan.planning.plan import make_plan
from mpctl.spec.job import JobSpec, changed_job

SecondsAt = Callable[[float], float]
"""Seconds of a step by the factor at which a part of it is slower."""
GRID = 12
"""Points at which a slower part is planned; between them seconds are interpolated."""


class Slowed(NamedTuple):
    """A part of the system at 1/k: seconds of a step at rising factors k, the first of which is 1."""

    factors: Sequence[float]
    seconds: Sequence[float]

    def at(self, factor: float) -> float:
        """Seconds of a step at a factor between the first and the last."""
        for (k, low), (more, high) in pairwise(zip(self.factors, self.seconds, strict=True)):
            if factor <= more * (1 + 1e-9):
                return low + (high - low) * log(factor / k) / log(more / k)
        return self.seconds[-1]

    def factor_of(self, seconds: float) -> float | None:
        """The factor at which a step takes so long; None where no factor does."""
        for (k, low), (more, high) in pairwise(zip(self.factors, self.seconds, strict=True)):
            if low <= seconds <= high and high > low:
                return exp(log(k) + (log(more) - log(k)) * (seconds - low) / (high - low))
        return None


def part_of(group: str) -> str:
    """The part of a step that messages over a group belong to, those of every micro batch included."""
    return "cp" if group in ("cp", *CP_GROUPS) else part_of_group(group)


@dataclass(frozen=True)
class Planned:
    """The plan of a job. layout: of the observed run."""

    layout: JobLayout

    @property
    def job(self) -> JobSpec:
        return self.layout.job

    @cached_property
    def estimate(self) -> Estimate:
        return Estimate(self.layout)

    @cached_property
    def model(self) -> StepTimeModel:
        """The times of the step, piece by piece. Raises InputError where no time can be stated."""
        try:
            return step_time_model(self.layout)
        except (MissingFigure, MissingLink) as missing:
            raise InputError.of("not-estimated", "cluster", str(missing)) from None

    @cached_property
    def time(self) -> StepTime:
        """Raises InputError where no time can be stated."""
        if isinstance(found := self.estimate.time, str):
            raise InputError.of("not-estimated", "cluster", found)
        return found

    @property
    def spread(self) -> float:
        """Standard deviation of the logarithm of a measured step over the plan."""
        return log(self.time.band.factor) / QUANTILE

    def with_settings(self, changes: Mapping[str, Any]) -> Planned | None:
        """The plan with other settings, by full name; None where they are not legal, or cannot be timed."""
        across = "parallel.allow_tp_across_nodes"  # as the run was made
        job = changed_job(self.job, {across: True, **changes}, frozenset({f"parallel.{FILLING}"}))
        if job is None:
            return None
        made = make_plan(job)
        if made.estimate is None or isinstance(made.estimate.time, str):
            return None
        return Planned(made.estimate.layout)

    @cached_property
    def unrecomputed(self) -> float:
        """Seconds of compute of the same step without recomputation, however much memory it takes."""
        if self.job.training.recompute == "none":
            return self.time.compute
        training = self.job.training.model_copy(update={"recompute": "none", "recompute_modules": []})
        try:
            without = step_time_model(JobLayout.of(self.job.model_copy(update={"training": training}))).step()
        except (MissingFigure, MissingLink, ValueError):
            return self.time.compute
        return min(without.compute, self.time.compute)

    @cached_property
    def sent(self) -> dict[str, float]:
        """Seconds of the messages of the busiest stage by part of the step, whether hidden or not."""
        network = self.model.operators.network
        found: dict[str, float] = {}
        for stage in self.estimate.messages:
            own: dict[str, float] = {}
            for message in stage:
                if message.kind == "send" or message.axis == "pp":
                    continue
                seconds = message.count * network.route(message.axis).collective(message.kind, message.bytes)
                part = part_of(message.axis)
                own[part] = own.get(part, 0.0) + network.system.factor * seconds
            for part, seconds in own.items():
                found[part] = max(found.get(part, 0.0), seconds)
        return found

    def slowed(self, at: SecondsAt, most: float) -> Slowed:
        """Plan the step with a part at 1/k, for factors k up to `most`."""
        factors = [most ** (n / (GRID - 1)) for n in range(GRID)]
        seconds: list[float] = []
        for factor in factors:
            seconds.append(max(at(factor), *seconds[-1:], 0.0))
        return Slowed(factors, seconds)

    def slower_kernels(self, factor: float) -> float:
        """Seconds of the step where kernels take so many times as long."""
        return self.model.slower(kernels=factor).seconds

    def slower_link(self, name: str) -> SecondsAt:
        """Seconds of the step where a link has so small a part of its bandwidth. name: inter_node or
        intra_node."""

        def at(factor: float) -> float:
            cluster = self.job.cluster
            link = getattr(cluster, name)
            slow = link.model_copy(update={"bandwidth": link.bandwidth / factor})
            layout = self.layout.with_cluster(cluster.model_copy(update={name: slow}))
            return step_time_model(layout, self.layout.profile, self.model.operators.network.system).seconds

        return at

    def slower_host(self, factor: float) -> float:
        """Seconds of the step where the host takes so many times as long to launch kernels."""
        own = self.model.operators
        speed = replace(own.speed, host=own.speed.host * factor)
        return StepTimeModel(self.layout, OperatorTimer(self.layout, speed, own.network, own.profile)).seconds

    def slower_stage(self, factor: float) -> float:
        """Seconds of the step where the last stage has so many times its work."""
        pipeline = self.model.pipeline
        last = [ChunkTimes(*(factor * seconds for seconds in chunk)) for chunk in pipeline.chunks[-1]]
        slow = pipeline._replace(chunks=[*pipeline.chunks[:-1], last])
        return self.model.seconds + max(slow.ends()) - max(pipeline.ends())

    def fuller_rank(self, factor: float) -> float:
        """Seconds of the step where the fullest rank of ep gets so many times its planned tokens."""
        load = factor * expert_load(self.layout).load
        training = self.job.training.model_copy(update={"moe_load": load})
        layout = JobLayout.of(self.job.model_copy(update={"training": training}))
        return step_time_model(layout, self.layout.profile, self.model.operators.network.system).seconds
