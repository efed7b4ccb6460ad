"""The layouts that a search chose, with their figures, and in words what sets them apart.

Seconds and bytes are those of `mpctl plan` for the same layout. Cost is counted in GPU-hours per
token: two layouts on the same number of GPUs cost the same if they are as fast, and more GPUs cost
more wherever they do not make the step faster in proportion.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mpctl.estimate.time import StepTime
from mpctl.estimate.verdict import fit_text
from mpctl.planning.layout_settings import (
    LayoutSettings,
    changed_settings,
    layout_of,
    layout_text,
    setting_text,
)
from mpctl.planning.plan import make_plan
from mpctl.search.evaluate import LayoutEvaluator
from mpctl.search.ideas import EvaluatedLayout
from mpctl.spec.job import JobSpec
from mpctl.units import bytes_text, seconds_text

SHOWN_PARTS = 3
SHOWN_SHARE = 0.002  # of a step: a part that differs by less is not named
BILLION = 1e9


@dataclass(frozen=True, repr=False)
class LayoutReport:
    """A layout with its figures.

    job: the job under this layout; time: of its step; bytes: on the device of the fullest rank;
    price: of a GPU-hour, where it is known; alike: layouts of the same tp, pp and tensor mode that
    are about as fast and less plain (search/ideas.py).
    """

    job: JobSpec
    layout: LayoutSettings
    time: StepTime
    bytes: int
    price: float | None = None
    alike: tuple[EvaluatedLayout, ...] = ()

    def __repr__(self) -> str:
        seconds = seconds_text(self.time.total)
        return f"LayoutReport({layout_text(self.layout)}: {seconds} a step, {self.verdict})"

    @property
    def device_memory(self) -> int:
        """Bytes of memory that a device has."""
        assert self.job.cluster.device is not None, "a search is of a device"
        return self.job.cluster.device.memory_bytes

    @property
    def fits(self) -> bool:
        """Whether the fullest rank fits its device and leaves the headroom free."""
        return self.bytes <= (self.job.cluster.usable_bytes or 0)

    @property
    def verdict(self) -> str:
        """Whether it fits, and by how much, in words."""
        return fit_text(self.job.cluster, self.bytes, "the fullest rank")

    @property
    def alike_text(self) -> str:
        """`and 3 more within 0.2 %`: how far the steps of those alike are from this one's at most;
        empty where there is none."""
        if not self.alike:
            return ""
        most = max(abs(one.seconds / self.time.total - 1) for one in self.alike)
        return f"and {len(self.alike)} more within {100 * max(most, 0.001):.1f} %"

    @property
    def tokens_per_second(self) -> float:
        """Tokens that all GPUs together train on in a second."""
        model, batch = self.job.model, self.job.training.global_batch_size or 1
        assert model is not None, "a search is of a model"
        return batch * model.tokens_per_sample / self.time.total

    @property
    def gpu_hours_per_billion(self) -> float:
        """GPU-hours that a billion tokens take."""
        return self.job.world_size * BILLION / self.tokens_per_second / 3600

    @property
    def price_per_billion(self) -> float | None:
        """What a billion tokens cost, where the price of a GPU-hour is known."""
        return None if self.price is None else self.price * self.gpu_hours_per_billion


def layout_reports(
    evaluator: LayoutEvaluator, found: Iterable[EvaluatedLayout], price: float | None = None
) -> list[LayoutReport]:
    """The layouts that a search found, each with its job and the parts of its step."""
    reports = []
    for point in found:
        time = evaluator.step_time(point.layout)
        assert time is not None, "it was timed before"
        job = evaluator.space.job_of(point.layout)
        reports.append(LayoutReport(job, point.layout, time, point.bytes, price))
    return reports


def given_report(evaluator: LayoutEvaluator, price: float | None = None) -> LayoutReport | None:
    """The layout of the job as given; None where its step cannot be estimated."""
    plan = make_plan(evaluator.space.job)
    if plan.estimate is None or isinstance(plan.estimate.time, str):
        return None
    size = plan.estimate.fullest_stage.device_bytes
    return LayoutReport(plan.job, layout_of(plan.job), plan.estimate.time, size, price)


def reasons(best: LayoutReport, others: Iterable[LayoutReport]) -> Iterator[str]:
    """A sentence for each other layout: how much slower, in which parts, what memory it saves."""
    for other in others:
        yield f"with {_settings(best, other) or 'the same settings'}: {_difference(best, other)}"


def given_reason(best: LayoutReport, given: LayoutReport) -> str:
    """How the layout of the job as given compares with the best one, as a sentence."""
    settings = _settings(best, given)
    if not settings:
        return "the job as given has this layout"
    if not given.fits:
        return f"the job as given ({settings}) {given.verdict}"
    return f"the job as given ({settings}): {_difference(best, given)}"


def _settings(best: LayoutReport, other: LayoutReport) -> str:
    """The settings in which another layout differs, in words."""
    settings = changed_settings(best.layout, other.layout)
    return ", ".join(setting_text(name, value) for name, value in settings.items())


def _difference(best: LayoutReport, other: LayoutReport) -> str:
    slower = other.time.total - best.time.total
    share = abs(slower) / best.time.total
    return (
        f"{seconds_text(abs(slower))} ({share:.1%}) {'slower' if slower >= 0 else 'faster'}"
        f"{_parts(best.time, other.time)}{_memory(best.bytes, other.bytes)}"
    )


def _parts(best: StepTime, other: StepTime) -> str:
    """The parts that differ most, signed."""
    theirs = other.parts()
    differences = [(theirs[name] - seconds, name) for name, seconds in best.parts().items()]
    differences.sort(key=lambda pair: -abs(pair[0]))
    least = SHOWN_SHARE * best.total
    shown = [(d, name) for d, name in differences[:SHOWN_PARTS] if abs(d) > least]
    words = (f"{name} {'+' if d > 0 else '−'}{seconds_text(abs(d))}" for d, name in shown)
    return f" ({', '.join(words)})" if shown else ""


def _memory(best: int, other: int) -> str:
    if abs(other - best) < 0.02 * best:
        return ""
    word = "less" if other < best else "more"
    return f", {bytes_text(abs(other - best))} {word} memory"
