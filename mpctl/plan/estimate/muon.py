"""Muon under a layout: the messages that complete matrices, and the work of Newton-Schulz steps.

mpctl gathers every bucket with matrices over the replicas that share it and, one by one, over tp (etp) the matrices
that a slice touches (model/layout/matrices.py); each rank computes all of those, in the bytes of the update. Below
ZeRO 1 every replica computes all matrices. A layer-wise optimizer (Megatron-Core's distributed optimizer) deals
complete matrices to the ranks, the largest first (LPT), so that nothing is gathered over the replicas; over tp by
training.muon.tp_mode: duplicated gathers a matrix in float32 (4 m n bytes) and repeats the steps, distributed
all-reduces a 16-bit Gram matrix of the side that is not cut in each step, blockwise sends nothing.

By hand, a 1024 x 4096 matrix, 5 steps: 5 x 2 (2 x 1024^2 x 4096 + 1024^3) = 96.6 GFLOP; gathered over tp 16.8 MB.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from mpctl.core.sharding import View
from mpctl.core.units import DTYPE_BYTES
from mpctl.model.layout.buckets import Bucket
from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.layout.matrices import Matrix, gather_axis, gathers, is_cut, largest_load, muon_matrices, touched
from mpctl.model.operators.matmul import ParameterSpec
from mpctl.plan.estimate.attention import kernels_of
from mpctl.plan.estimate.communication import Message
from mpctl.plan.estimate.optimizers import layout_states

WHAT = "matrices of updates"
GATHERED, GRAM = 4, 2  # bytes of an element


@dataclass(frozen=True)
class MuonWork:
    """Messages and operations of Muon's update on a rank of a stage, the one that has most to do."""

    layout: JobLayout

    @cached_property
    def matrices(self) -> Mapping[str, Matrix]:
        """The parameters that it updates; none under another optimizer."""
        return muon_matrices(self.layout)

    @property
    def width(self) -> int:
        """Bytes of an element that mpctl gathers."""
        return max(GATHERED, layout_states(self.layout).value)

    def messages(self, stage: int) -> Iterator[Message]:
        """The messages of a stage once a step."""
        if not self.matrices:
            return
        sizes = self.layout.group_sizes
        sent = self._gathers(stage) if self._is_by_slices else self._layer_wise(stage)
        yield from (message for message in sent if sizes[message.axis] > 1)

    def flops(self, stage: int) -> float:
        """Operations of the Newton-Schulz steps of a stage on the rank that has most."""
        if not self.matrices:
            return 0.0
        return float(self._by_slices(stage) if self._is_by_slices else self._by_ranks(stage))

    @property
    def _is_by_slices(self) -> bool:
        return kernels_of(self.layout).slices_buckets

    @property
    def _steps(self) -> int:
        return self.layout.job.training.muon.steps

    def _specs(self, stage: int) -> dict[str, ParameterSpec]:
        return {w.name: w for w in self.layout.stage_parameters(stage) if w.name in self.matrices}

    def _buckets(self, stage: int) -> Iterator[tuple[Bucket, list[int], list[int]]]:
        """Each bucket with the numbers of its matrices, and of those that ranks of tp cut."""
        specs, views = self._specs(stage), self.layout.views
        for bucket in self.layout.buckets(stage):
            chosen = [n for n, name in enumerate(bucket.names) if name in specs]
            if chosen:
                yield bucket, chosen, [n for n in chosen if is_cut(specs[bucket.names[n]], views)]

    def _gathers(self, stage: int) -> Iterator[Message]:
        for bucket, _, cut in self._buckets(stage):
            if bucket.view.zero:
                yield Message(bucket.view.zero_group, "all_gather", WHAT, bucket.padded * self.width)
            axis = gather_axis(bucket.view.name)
            for size in gathers(bucket.sizes, bucket.part, cut):
                yield Message(axis, "all_gather", WHAT, size * self.layout.group_sizes[axis] * self.width)

    def _by_slices(self, stage: int) -> int:
        busiest = 0
        for bucket, chosen, _ in self._buckets(stage):
            work = {n: self._flops(bucket.names[n], bucket.view) for n in chosen}
            busiest += max(sum(work[n] for n in held) for held in touched(bucket.sizes, bucket.part, chosen))
        return busiest

    def working(self, stage: int) -> int:
        """Bytes that an update needs besides the states: u of the largest bucket, gathered, and of the largest
        matrix its parts, what the steps multiply (three like it, three Gram matrices) and the result."""
        if not self.matrices:
            return 0
        bucket = max((b.part + b.padded if b.view.zero else b.numel for b, _, _ in self._buckets(stage)), default=0)
        each = 2 if DTYPE_BYTES[self.layout.job.training.dtype] <= 2 else self.width
        largest = 0
        for name, weight in self._specs(stage).items():
            matrix, ep = self.matrices[name], self.layout.views[weight.view].sizes.get("ep", 1)
            count, rows = matrix.number // ep, max(matrix.heights)
            numel, square = count * rows * matrix.columns, count * min(rows, matrix.columns) ** 2
            copies = 1 if is_cut(weight, self.layout.views) else 0
            full = count * sum(matrix.heights) * matrix.columns * self.width
            largest = max(largest, (copies + 1) * full + 3 * each * (numel + square))
        return bucket * self.width + largest

    def _flops(self, name: str, view: View) -> int:
        """Operations of the matrices of a parameter on a rank, which has a part of the experts."""
        return self.matrices[name].flops(self._steps) // view.sizes.get("ep", 1)

    def _by_ranks(self, stage: int) -> int:
        """Operations of the fullest rank of a layer-wise optimizer, by view."""
        mode, views, total = self.layout.job.training.muon.tp_mode, self.layout.views, 0
        for name, view in views.items():
            specs = [w for w in self._specs(stage).values() if w.view == name]
            loads = []
            for weight in specs:
                each = self._flops(weight.name, view)
                parts = self._cut_parts(weight) if mode != "duplicated" else 1
                loads += [each // parts] if weight.view == "dense" else self._of_experts(weight, each // parts)
            total += largest_load(loads, view.zero_size if view.zero else 1) if loads else 0
        return total

    def _of_experts(self, weight: ParameterSpec, work: int) -> list[int]:
        """The work of each expert of a rank, which is a matrix of its own to the optimizer."""
        experts = weight.shape[0] // self.layout.views[weight.view].sizes.get("ep", 1)
        return [work // experts] * experts

    def _cut_parts(self, weight: ParameterSpec) -> int:
        return self.layout.views[weight.view].grid.weight_parts(weight.dims[-2:])

    def _layer_wise(self, stage: int) -> Iterator[Message]:
        """Messages over tp for a rank's share of the matrices."""
        mode = self.layout.job.training.muon.tp_mode
        for weight in self._specs(stage).values():
            view = self.layout.views[weight.view]
            if mode == "blockwise" or not is_cut(weight, self.layout.views):
                continue
            axis, ranks = gather_axis(view.name), view.zero_size if view.zero else 1
            experts = prod(weight.shape[:-2]) // view.sizes.get("ep", 1)
            rows, columns = weight.shape[-2:]
            if mode == "duplicated":
                yield Message(axis, "all_gather", WHAT, -(-experts * rows * columns * GATHERED // ranks))
            else:
                whole = columns if view.grid.weight_parts(weight.dims[-2:-1]) > 1 else rows
                size = -(-experts * whole * whole * GRAM // ranks)
                yield Message(axis, "all_reduce", WHAT, size, self._steps)
