"""Scaling efficiency: the same job at several world sizes and in several layouts.

    speed-up S(N) = throughput(N) / throughput(N0)        efficiency E(N) = S(N) / (N / N0)

against the fastest layout of the smallest world N0. Strong scaling keeps the global batch, weak
scaling keeps the work of a rank: the global batch grows with N. The published figure in this form
(Megatron-LM, arXiv 1909.08053, section 5.1): 15.1 PFLOP/s on 512 GPUs against 39 TFLOP/s on one,
15100 / (512 x 39) = 76 %. Every case runs with the same number of threads a rank, so that one rank
does not quietly use the cores of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mpctl.bench.cases import TIMED_SETTINGS
from mpctl.bench.layouts import Layout
from mpctl.planning.plan import Overrides
from mpctl.spec.job import JobSpec

Mode = Literal["strong", "weak"]


@dataclass(frozen=True)
class ScalingCase:
    """A layout with a global batch, and the modes of scaling of which it is a row."""

    layout: Layout
    global_batch_size: int
    modes: tuple[Mode, ...]

    @property
    def name(self) -> str:
        """`strong-tp2-dp2` or `strong+weak-1-rank`, as its run directories begin."""
        return f"{'+'.join(self.modes)}-{self.layout.name.replace(' ', '-')}"

    @property
    def title(self) -> str:
        """`strong tp2 dp2` or `strong and weak 1 rank`."""
        return f"{' and '.join(self.modes)} {self.layout.name}"

    def settings(self, job: JobSpec) -> Overrides:
        """The settings that make a job this case, without validations and checkpoints."""
        batch = {"training.global_batch_size": self.global_batch_size}
        return {**self.layout.settings(job), **batch, **TIMED_SETTINGS}


def scaling_cases(
    job: JobSpec, layouts: Sequence[Layout], modes: Sequence[Mode]
) -> list[ScalingCase]:
    """The cases in order of world size; a layout of which both modes need the same batch is one
    case. The job's global batch is that of the smallest world."""
    ordered = sorted(layouts, key=lambda layout: layout.world_size)
    smallest, batch = ordered[0].world_size, job.training.global_batch_size or 1
    modes_of: dict[tuple[str, int], list[Mode]] = {}
    for layout in ordered:
        for mode in modes:
            size = batch if mode == "strong" else batch * layout.world_size // smallest
            modes_of.setdefault((layout.name, size), []).append(mode)
    named = {layout.name: layout for layout in ordered}
    return [
        ScalingCase(named[name], size, tuple(found)) for (name, size), found in modes_of.items()
    ]


def efficiency(speed: float, ranks: int, base_speed: float, base_ranks: int) -> float:
    """The share of the speed that so many ranks would have if each worked as those of the baseline;
    speeds of all ranks together, in any unit.

    >>> round(efficiency(15100, 512, 39, 1), 3)  # Megatron-LM, TFLOP/s
    0.756
    """
    return speed / base_speed / (ranks / base_ranks)
