"""A row of `mpctl fit`: the best settings of one method under one sharding, as `mpctl plan` would have them.

Chosen are recomputation, micro batch and, across nodes, the ranks that ZeRO divides over: of all that fit
the fastest, or the smallest micro batch within CLOSE of it. Where nothing fits, the settings of least memory.
A row that splits the model is the layout that `mpctl search` suggests.

By hand, micro batches of 1, 2 and 4 at 10.0, 10.9 and 11.0 thousand tokens/s: 2 is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

from mpctl.core.axes import FILLING
from mpctl.core.sharding import divisors
from mpctl.plan.estimate.host_memory import host_bytes, state_bytes
from mpctl.plan.estimate.step import StepTime
from mpctl.plan.fit.methods import (
    METHODS,
    MethodName,
    Sharding,
    optimizer_text,
    optimizers,
    parallel_text,
    shardings,
    with_method,
    with_training,
)
from mpctl.plan.planning.layout_settings import LayoutSettings, changed_settings, layout_of
from mpctl.plan.rules.model import host_memory_check
from mpctl.plan.rules.validate import find_errors
from mpctl.plan.search.evaluate import LayoutEvaluator
from mpctl.plan.search.find import find_layouts
from mpctl.plan.search.plain import RECOMPUTE
from mpctl.plan.search.space import SearchSpace
from mpctl.spec.job import JobSpec
from mpctl.spec.runtime import RuntimeProfile, get_profile

CLOSE = 0.02  # times that differ by less: the smaller micro batch is taken
GAIN = 0.005  # a doubled micro batch that gains less is the last one tried
LARGEST_MICRO_BATCH = 64
UNTIMED = "fits, but the cluster states no bandwidth between its GPUs: set cluster.intra_node and inter_node"


@dataclass(frozen=True)
class FitRow:
    """A method under a sharding. bytes: of the fullest rank's device; time: of a step, None where it does not
    fit; settings: those of [parallel] and [training] that make it, over the request's; reason: why it cannot
    be planned, in words; host_bytes: of a node, where states wait on the host; host_reason: why they do not fit
    there."""

    method: MethodName
    sharding: str
    optimizer: str
    job: JobSpec
    settings: Mapping[str, Any]
    bytes: int = 0
    time: StepTime | None = None
    reason: str = ""
    host_bytes: int = 0
    host_reason: str = ""

    @property
    def fits(self) -> bool:
        """Whether it fits its devices, leaves their headroom free, and fits the hosts that are known."""
        return self.time is not None

    @property
    def offloads(self) -> bool:
        """Whether states wait in host memory."""
        return self.job.training.offload_optimizer or self.job.training.offload_parameters

    @property
    def lacking_bytes(self) -> int:
        """Bytes by which it does not fit."""
        return max(0, self.bytes - (self.job.cluster.usable_bytes or 0))

    @property
    def tokens_per_second(self) -> float:
        """Tokens that all GPUs together train on in a second; 0 where it does not fit."""
        model, batch = self.job.model, self.job.training.global_batch_size
        assert model is not None
        return 0.0 if self.time is None else (batch or 0) * model.tokens_per_sample / self.time.total


class _Point(NamedTuple):
    """A layout that fits, with its seconds a step."""

    seconds: float
    layout: LayoutSettings


@dataclass
class FitEvaluator:
    """Rows of one job on its GPUs. job: complete, with LoRA's adapter. given: settings that the user chose."""

    job: JobSpec
    given: Mapping[str, Any]
    known: dict[tuple[object, ...], LayoutEvaluator] = field(default_factory=dict)

    @property
    def profile(self) -> RuntimeProfile:
        """The runtime's figures."""
        return get_profile(self.job.training.runtime)

    def rows(self, methods: Iterable[MethodName] = METHODS, *, offload: bool = True) -> Iterator[FitRow]:
        """Yield the rows of these methods, the plainest sharding first. offload: also those of host memory,
        where nothing else fits and they save bytes of the device."""
        for method in methods:
            own = [self.row(method, one) for one in self._shardings() if not one.settings]
            if (self._splits or not any(row.fits for row in own)) and (split := self._split_row(method)) is not None:
                own += [split] if is_better(split, own) else []
            yield from own
            if offload and not any(row.fits for row in own):
                least = min(row.bytes for row in own)
                on_host = (self.row(method, one) for one in self._shardings() if one.settings and self._allows(one))
                yield from (row for row in on_host if row.bytes < least and not row.reason)

    def _allows(self, sharding: Sharding) -> bool:
        """Whether the settings that the user chose leave a sharding's own as they are."""
        return all(self.given.get(key, value) == value for key, value in sharding.settings.items())

    def _shardings(self) -> Iterable[Sharding]:
        return shardings(self.profile.searched or self.profile.runs, self.job.world_size)

    def row(self, method: MethodName, sharding: Sharding) -> FitRow:
        """Return the row of a method and a sharding: the first optimizer with which it fits, else that of
        fewest bytes."""
        row = None
        for optimizer in optimizers(method, self.given):
            evaluator = self._evaluator(method, {**sharding.settings, **optimizer})
            found = self._row(evaluator, method, sharding, optimizer)
            if row is None or (not found.reason and (row.reason or found.fits or found.bytes < row.bytes)):
                row = found
            if row.fits:
                break
        assert row is not None, "the runtime's own optimizer is always tried"
        return row

    def least_bytes(self, method: MethodName) -> int | None:
        """Return the least bytes of a rank under any sharding on the devices alone; None where none is legal."""
        sizes = []
        for sharding in self._shardings():
            if not sharding.settings:
                *_, smallest = optimizers(method, self.given)
                evaluator = self._evaluator(method, smallest)
                sizes += [evaluator.device_bytes(layout) for layout in self._families(evaluator, sharding)]
        return min(sizes, default=None)

    def _evaluator(self, method: MethodName, settings: Mapping[str, Any]) -> LayoutEvaluator:
        key = (method, *sorted(settings.items()))
        if key not in self.known:
            job = with_training(with_method(self.job, method), settings)
            self.known[key] = LayoutEvaluator(SearchSpace(job))
        return self.known[key]

    def _row(
        self, evaluator: LayoutEvaluator, method: MethodName, sharding: Sharding, optimizer: Mapping[str, Any]
    ) -> FitRow:
        """The best of the layouts of a sharding: all recomputations, micro batches and groups of ZeRO."""
        points, least = list[_Point](), None
        for family in self._families(evaluator, sharding):
            if least is None and (reason := refusal(evaluator, family)):
                job = evaluator.space.job_of(family)
                return FitRow(method, sharding.name, optimizer_text(optimizer), job, {}, reason=reason)
            before = inf
            for micro in self._micro_batches:
                layout = family._replace(micro_batch_size=micro)
                size = evaluator.device_bytes(layout)
                least = min(least or (size, layout), (size, layout))
                seconds = evaluator.step_seconds(layout) if size <= evaluator.usable_memory else None
                if seconds is None:
                    break
                points.append(_Point(seconds, layout))
                if seconds > before * (1 - GAIN):
                    break
                before = seconds
        assert least is not None, "a micro batch of 1 is always tried"
        chosen = choose(points) if points else least[1]
        return self._made(evaluator, method, sharding.name, {**sharding.settings, **optimizer}, chosen)

    def _made(
        self,
        evaluator: LayoutEvaluator,
        method: MethodName,
        sharding: str,
        settings: Mapping[str, Any],
        layout: LayoutSettings,
    ) -> FitRow:
        size = evaluator.device_bytes(layout)
        time = evaluator.step_time(layout) if size <= evaluator.usable_memory else None
        job = evaluator.space.job_of(layout)
        adapter = {} if method == "full" else {"training.adapter.kind": method}
        changed = changed_settings(layout_of(self.job), layout)
        name = sharding if not layout.zero_size else "HSDP" if sharding == "FSDP" else f"{sharding}, in each node"
        reason = "" if time is not None or size > evaluator.usable_memory else UNTIMED
        host, lacks = self._host(evaluator, layout, job)
        return FitRow(
            method,
            name,
            optimizer_text(settings),
            job,
            {**adapter, **settings, **changed},
            size,
            None if lacks else time,
            reason,
            host,
            lacks,
        )

    @staticmethod
    def _host(evaluator: LayoutEvaluator, layout: LayoutSettings, job: JobSpec) -> tuple[int, str]:
        """Bytes of the fullest host where states wait there, else 0; why they do not fit it, if they do not."""
        job_layout = evaluator.job_layout(layout)
        if not state_bytes(job_layout):
            return 0, ""
        size = host_bytes(job_layout, min(job.cluster.gpus_per_node or job.world_size, job.world_size))
        check = host_memory_check(job, size)
        return size, check.issue.message if check is not None and check.status != "ok" else ""

    def _families(self, evaluator: LayoutEvaluator, sharding: Sharding) -> Iterator[LayoutSettings]:
        """The layouts of a sharding with a micro batch of 1, those that recompute least first."""
        plain = LayoutSettings(zero=sharding.zero).with_sizes({FILLING: self.job.world_size})
        for recompute in sorted(evaluator.space.runs.recompute, key=lambda name: RECOMPUTE[name]):
            for size in evaluator.space.zero_sizes(plain):
                yield plain._replace(recompute=recompute, zero_size=size)

    @cached_property
    def _micro_batches(self) -> list[int]:
        world = self.job.world_size
        sizes = divisors((self.job.training.global_batch_size or world) // world)
        return [size for size in sizes if size <= LARGEST_MICRO_BATCH]

    @property
    def _splits(self) -> bool:
        """Whether users of the runtime split models."""
        runs, unusual = self.profile.searched or self.profile.runs, self.profile.plain.unusual
        return (runs.tensor and "tp" not in unusual) or (runs.pipeline and "pp" not in unusual)

    def _split_row(self, method: MethodName) -> FitRow | None:
        """The layout that a search suggests: the plainest of those that estimates cannot tell from the fastest.
        None where nothing fits, or where it splits neither the model nor its samples and a plain row is as good."""
        runs = self.profile.searched or self.profile.runs
        if self.job.world_size == 1 or not (runs.tensor or runs.pipeline or runs.context or runs.experts):
            return None
        evaluator = self._evaluator(method, next(iter(optimizers(method, self.given))))
        found = find_layouts(evaluator.space, top=1, budgets=1, evaluator=evaluator).suggested
        if found is None or not (name := parallel_text(found.layout)):
            return None
        zero = found.layout.zero
        return self._made(evaluator, method, f"{name}, ZeRO {zero}" if zero else name, {}, found.layout)


def choose(points: Iterable[_Point]) -> LayoutSettings:
    """Return the layout to take of those that fit: the smallest micro batch within CLOSE of the fastest."""
    every = sorted(points)
    near = [point for point in every if point.seconds <= every[0].seconds * (1 + CLOSE)]
    return min(near, key=lambda p: (p.layout.micro_batch_size, RECOMPUTE[p.layout.recompute], p.seconds)).layout


def refusal(evaluator: LayoutEvaluator, layout: LayoutSettings) -> str:
    """Return why the rules refuse a layout, in words; empty where they do not."""
    errors = find_errors(evaluator.space.job_of(layout))
    return str(errors[0].issue) if errors else ""


def is_better(split: FitRow, rows: Iterable[FitRow]) -> bool:
    """Return whether a layout that splits the model is faster than these rows, or the only one that fits."""
    seconds = [row.time.total for row in rows if row.time is not None]
    assert split.time is not None, "it was timed"
    return not seconds or split.time.total < min(seconds) * (1 - CLOSE)
