"""Which grids of tensor-parallel ranks a search tries for a size of tp.

One row of ranks (1d) where it divides the model; a square, squares in layers or a cube where the
job's runtime runs that tensor mode and the rules accept it for this model. What else they ask of a
layout (tensor_grid.py has what is cut) is said in `combines` and by the space's micro batches, of
which each part of the grid has equally many samples. 2.5d of depth 1 is 2d, and tried only where
2.5d is fixed.

By hand, 16 heads and hidden 1024: tp 4 is 1d or 2d, tp 8 is 1d, 2.5d of depth 2, or 3d.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mpctl.rules.validate import has_errors
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec
from mpctl.spec.parallel import ScheduleName, TensorMode
from mpctl.spec.schedules import SCHEDULES
from mpctl.tensor_grid import TensorGrid, grid_axes, grid_depths


@dataclass(frozen=True)
class SearchedGrids:
    """The grids to try for a complete job with a model. modes: those that its runtime runs; fixed:
    fields of a layout with the value that they keep."""

    job: JobSpec
    modes: list[TensorMode]
    fixed: Mapping[str, Any]

    def of(self, tp: int) -> list[TensorGrid]:
        """The grids of so many ranks, the row first."""
        if tp not in self._grids:
            self._grids[tp] = list(self._find(tp))
        return self._grids[tp]

    @cached_property
    def _grids(self) -> dict[int, list[TensorGrid]]:
        return {}

    @cached_property
    def _sharded(self) -> dict[tuple[object, ...], bool]:
        return {}

    def _find(self, tp: int) -> Iterator[TensorGrid]:
        model, fixed = self.job.model, self.fixed.get("tensor_mode")
        assert model is not None, "a search is of a model"
        if fixed in (None, "1d") and _divides(model, tp):
            yield TensorGrid("1d", {"tp": tp})
        for mode in self.modes if fixed is None else [fixed]:
            for depth in self._depths(mode, tp) if mode != "1d" else ():
                axes = grid_axes(mode, tp, depth)
                if axes is not None and self._accepts(TensorGrid(mode, axes), zero=0):
                    yield TensorGrid(mode, axes)

    def _depths(self, mode: str, tp: int) -> list[int | None]:
        """The depths of 2.5d; without a fixed mode those from 2 on."""
        if mode != "2.5d":
            return [None]
        if self.fixed.get("tensor_depth"):
            return [self.fixed["tensor_depth"]]
        least = 1 if "tensor_mode" in self.fixed else 2
        return [depth for depth in grid_depths(tp) if depth >= least]

    def shards(self, grid: TensorGrid, zero: int) -> bool:
        """Whether this ZeRO stage can be had with the grid of another mode than 1d."""
        key = grid.mode, *grid.axes.values(), zero
        if key not in self._sharded:
            self._sharded[key] = self._accepts(grid, zero=zero)
        return self._sharded[key]

    def _accepts(self, grid: TensorGrid, *, zero: int) -> bool:
        """Whether the rules accept the grid in the plainest layout of the job: all other ranks are
        replicas, and a micro batch has one sample for each part."""
        dp = self.job.world_size // grid.size
        parallel = {
            "tp": grid.size, "cp": 1, "dp": dp, "pp": 1, "vpp": 1, "schedule": "1f1b",
            "zero": zero, "sequence_parallel": False, "stage_balance": "even",
            "first_stage_layers": None, "last_stage_layers": None, "allow_tp_across_nodes": True,
            "tensor_mode": grid.mode, "tensor_depth": grid.axes.get("depth"),
        }  # fmt: skip
        training = {
            "micro_batch_size": grid.sample_parts, "global_batch_size": grid.sample_parts * dp,
            "recompute": "none", "partition_activations": False, "offload_activations": False,
        }  # fmt: skip
        job = self.job
        tables = {
            "parallel": job.parallel.model_copy(update=parallel),
            "training": job.training.model_copy(update=training),
        }
        return not has_errors(job.model_copy(update=tables))


def _divides(model: ModelSpec, tp: int) -> bool:
    """Whether tp ranks in a row divide heads and ffn."""
    kv_fits = model.kv_heads % tp == 0 or tp % model.kv_heads == 0
    return model.heads % tp == 0 and model.ffn % tp == 0 and kv_fits


def combines(mode: str, schedule: ScheduleName) -> bool:
    """Whether a pipeline's schedule can be had with a tensor mode: those that defer the gradients
    of weights are of 1d alone."""
    return mode == "1d" or not SCHEDULES[schedule].splits_backward
