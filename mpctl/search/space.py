"""Which layouts there are for a job on its cluster: generators of the values that divide.

A layout is what may differ between two ways to run one job: axis sizes, their order, how the
pipeline is cut and run, micro batch, recomputation, sequence parallelism, ZeRO. Everything else of
the job stays. By default only what the job's runtime runs is searched ([runs] of its preset): of
ours what `mpctl launch` accepts, of others what their papers and sources say. GPipe is left out
unless it is fixed: it takes as long as 1F1B and holds more.

By hand, 24 layers, 16 heads, 4 GPUs in a node, a batch of 8: tp 1, 2 or 4; tp 2 leaves pp 1 or 2;
tp 2, pp 1, dp 2 leaves micro batches of 1, 2 and 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import permutations
from typing import Any, NamedTuple

from mpctl.planning.layout_settings import TRAINING, LayoutSettings
from mpctl.sharding import divisors
from mpctl.spec.job import JobSpec, ends_count_as_layers
from mpctl.spec.parallel import ScheduleName
from mpctl.spec.runtime import get_profile
from mpctl.spec.runtime_support import RuntimeSupport
from mpctl.spec.schedules import SCHEDULES

Recompute = str
ORDER = ("tp", "cp", "dp", "pp")


AXES = LayoutSettings._fields


class LayerKey(NamedTuple):
    """What a layer's seconds follow from, whatever the pipeline."""

    tp: int
    cp: int
    micro_batch_size: int
    sequence_parallel: bool
    recompute: Recompute


class AxesKey(NamedTuple):
    """A group with the rest of its axes."""

    group: LayerKey
    dp: int
    pp: int
    microbatches: int


class LayoutFamily(NamedTuple):
    """Layouts that differ in ZeRO and order alone."""

    shape: AxesKey
    vpp: int
    schedule: ScheduleName
    stage_balance: str

    def layout(self, zero: int, order: str) -> LayoutSettings:
        (tp, cp, batch, split, recompute), dp, pp, _ = self.shape
        return LayoutSettings(
            tp, cp, dp, pp, self.vpp, self.schedule, self.stage_balance, batch, recompute, split,
            zero, order,
        )  # fmt: skip


@dataclass(frozen=True)
class SearchSpace:
    """job: complete, with a model; fixed: values of Layout's fields that stay; most: the largest
    of an axis; chosen: what is run, where it is not
    what its runtime runs."""

    job: JobSpec
    fixed: Mapping[str, Any] = field(default_factory=dict)
    most: Mapping[str, int] = field(default_factory=dict)
    chosen: RuntimeSupport | None = None

    @property
    def world(self) -> int:
        return self.job.world_size

    @property
    def layers(self) -> int:
        assert self.job.model is not None
        return self.job.model.all_layers

    @cached_property
    def runs(self) -> RuntimeSupport:
        return self.chosen or get_profile(self.job.training.runtime).runs

    def layouts(self) -> Iterator[LayoutSettings]:
        """All of them, in a fixed order."""
        for shape in self.shapes():
            for family in self.families(shape):
                yield from self.members(family)

    def shapes(self) -> Iterator[AxesKey]:
        for tp in self.tensor():
            for cp in self.context(tp):
                for pp in self.pipeline(tp * cp):
                    dp = self.world // (tp * cp * pp)
                    if self._has("dp", dp):
                        yield from self._of_axes(tp, cp, dp, pp)

    def _of_axes(self, tp: int, cp: int, dp: int, pp: int) -> Iterator[AxesKey]:
        recomputes = list(self._only("recompute", self.runs.recompute))
        for batch in self.micro_batches(dp):
            m = (self.job.training.global_batch_size or dp) // (batch * dp)
            for split in self.sequence(tp, cp):
                for recompute in recomputes:
                    yield AxesKey(LayerKey(tp, cp, batch, split, recompute), dp, pp, m)

    def families(self, shape: AxesKey) -> Iterator[LayoutFamily]:
        return (LayoutFamily(shape, *cut) for cut in self.cuts(shape.pp, shape.microbatches))

    def members(
        self, family: LayoutFamily, zeros: Sequence[int] | None = None
    ) -> Iterator[LayoutSettings]:
        """zeros: just those of these ZeRO stages."""
        g, dp, pp, _ = family.shape
        orders = self.orders(g.tp, g.cp, dp, pp)
        chosen = self.zeros(dp * g.cp) if zeros is None else zeros
        return (family.layout(zero, order) for zero in chosen for order in orders)

    def tensor(self) -> Iterator[int]:
        """Sizes that divide heads and ffn, and keep groups on their nodes unless told otherwise."""
        model, p = self.job.model, self.job.parallel
        assert model is not None
        per_node = self.job.cluster.gpus_per_node or 1
        for tp in divisors(self.world):
            kv_fits = model.kv_heads % tp == 0 or tp % model.kv_heads == 0
            divides = model.heads % tp == 0 and model.ffn % tp == 0 and kv_fits
            stays = per_node % tp == 0 or p.allow_tp_across_nodes or "tp" in self.fixed
            runs = tp == 1 or self._runs("tp", self.runs.tensor)
            if divides and stays and runs and self._has("tp", tp):
                yield tp

    def context(self, tp: int) -> Iterator[int]:
        model = self.job.model
        assert model is not None
        lengths = [n for n in (model.seq_length, model.decoder_seq_length) if n]
        for cp in divisors(self.world // tp):
            divides = cp == 1 or all(length % (2 * cp) == 0 for length in lengths)
            runs = cp == 1 or self._runs("cp", self.runs.context)
            if divides and runs and self._has("cp", cp):
                yield cp

    def pipeline(self, inner: int) -> Iterator[int]:
        for pp in divisors(self.world // inner):
            runs = pp == 1 or self._runs("pp", self.runs.pipeline)
            if pp <= self.layers and runs and self._has("pp", pp):
                yield pp

    def micro_batches(self, dp: int) -> Iterator[int]:
        batch = self.job.training.global_batch_size or dp
        if batch % dp == 0:
            yield from (k for k in divisors(batch // dp) if self._has("micro_batch_size", k))

    def cuts(self, pp: int, m: int) -> Iterator[tuple[int, ScheduleName, str]]:
        """(chunks a stage, schedule, balance) of so many stages. Several chunks are small, and cut
        evenly; by cost only where their number is fixed."""
        for vpp in divisors(self.layers):
            chunked = vpp == 1 or (pp > 1 and m % pp == 0 and self._runs("vpp", self.runs.chunks))
            if pp * vpp > self.layers or not chunked or not self._has("vpp", vpp):
                continue
            for schedule in self._schedules(pp, vpp):
                for balance in self._balances(pp, vpp):
                    yield vpp, schedule, balance

    def _schedules(self, pp: int, vpp: int) -> tuple[ScheduleName, ...]:
        """With chunks, 1f1b is the interleaved one, and goes by the name that the job gives it."""
        if "schedule" in self.fixed:
            name: ScheduleName = self.fixed["schedule"]
            is_legal = SCHEDULES[name].runs(vpp) and (pp > 1 or vpp == 1)
            return (name,) if is_legal else ()
        if pp > 1 and vpp > 1:
            return ("interleaved" if self.job.parallel.schedule == "interleaved" else "1f1b",)
        return ("1f1b",) if pp == 1 else tuple(self.runs.schedules)

    def _balances(self, pp: int, vpp: int) -> Iterator[str]:
        even = self.layers % (pp * vpp) == 0 or self.counts_ends(pp * vpp)
        by_cost = self.runs.by_cost and pp > 1 and (vpp == 1 or "vpp" in self.fixed)
        legal = ["even"] * even + ["cost"] * by_cost
        if even or self.fixed.get("stage_balance") != "even":
            yield from self._only("stage_balance", legal)

    def counts_ends(self, blocks: int) -> bool:
        """Whether embedding and loss are counted as layers; with so few layers in a block that the
        first one would hold one at most, the layout is not searched."""
        is_deep = self.layers + 2 > 2 * blocks
        return is_deep and ends_count_as_layers(self.layers, blocks, self.job.training.runtime)

    def sequence(self, tp: int, cp: int) -> Iterator[bool]:
        model = self.job.model
        assert model is not None
        lengths = [n for n in (model.seq_length, model.decoder_seq_length) if n]
        divides = tp > 1 and all(length % (tp * cp) == 0 for length in lengths)
        splits = divides and self.runs.sequence
        yield from self._only("sequence_parallel", (False, True) if splits else (False,))

    def zeros(self, replicas: int) -> list[int]:
        return list(self._only("zero", self.runs.zero if replicas > 1 else self.runs.zero[:1]))

    def orders(self, tp: int, cp: int, dp: int, pp: int) -> list[str]:
        """tp first; of the other axes those that place ranks otherwise on nodes."""
        if "order" in self.fixed:
            return [self.fixed["order"]]
        used = [axis for axis, size in zip(ORDER, (tp, cp, dp, pp), strict=True) if size > 1]
        inner = [axis for axis in used if axis != "tp"]
        if self.job.cluster.nodes == 1 or len(inner) < 2:
            return ["-".join(ORDER)]
        idle = [axis for axis in ORDER[1:] if axis not in inner]
        return ["-".join(("tp", *idle, *turn)) for turn in permutations(inner)]

    def _only(self, name: str, legal: Sequence[Any]) -> Iterator[Any]:
        """What is fixed was asked for, and the rules say whether it is legal."""
        if name in self.fixed:
            yield self.fixed[name]
        else:
            yield from legal

    def _has(self, name: str, value: Any) -> bool:
        allowed = self.fixed.get(name, value) == value
        return allowed and not (name in self.most and value > self.most[name])

    def _runs(self, name: str, runs: bool) -> bool:
        return runs or name in self.fixed

    def job_of(self, layout: LayoutSettings) -> JobSpec:
        """The job under a layout."""
        values = layout._asdict()
        training = {key: values.pop(key) for key in TRAINING}
        ends = self.counts_ends(layout.pp * layout.vpp) and layout.stage_balance == "even"
        values |= dict.fromkeys(("first_stage_layers", "last_stage_layers"))
        values |= dict.fromkeys(("embedding_is_layer", "loss_is_layer"), ends)
        whole = layout.recompute == "full"
        old = self.job.training
        training["offload_activations"] = whole and old.offload_activations
        training["partition_activations"] = (
            whole and old.partition_activations and not layout.sequence_parallel
        )
        return self.job.model_copy(
            update={
                "parallel": self.job.parallel.model_copy(update=values),
                "training": old.model_copy(update=training),
            }
        )
