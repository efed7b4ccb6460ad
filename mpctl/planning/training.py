"""How a job is trained, in one line: the head of every plan, search, comparison and page.

By hand, a job on an H100 that names no data type, 64 samples a step in micro batches of 4 over 2
replicas: `dtype bf16 (auto), global batch 64, micro batch 4 x 8, ...`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpctl.planning.schemas import TrainingEntry
    from mpctl.spec.job import JobSpec


def training_settings(job: JobSpec, searched: Collection[str] | None = None) -> TrainingEntry:
    """The settings of training that every output states.

    searched: of a search, the settings that vary, by the names of the entry; they are None, as is
    the number of micro batches, which follows from them.
    """
    t, free = job.training, searched or ()
    return {
        "dtype": t.dtype,
        "dtype_is_auto": t.is_dtype_auto,
        "global_batch_size": t.global_batch_size,
        "micro_batch_size": None if "micro_batch_size" in free else t.micro_batch_size,
        "micro_batches": job.num_microbatches if searched is None else None,
        "recompute": None if "recompute" in free else t.recompute,
        "zero": None if "zero" in free else job.parallel.zero,
        "runtime": t.runtime,
        "runtime_is_default": t.is_runtime_default,
    }


def training_line(settings: TrainingEntry) -> str:
    """`dtype bf16 (auto), global batch 64, micro batch 4 x 8, recompute none, ZeRO 0, runtime
    mpctl`: 8 micro batches of 4 samples a step on each replica; `recompute any` where a search
    varies it."""
    count, dtype = settings["micro_batches"], settings["dtype"]
    return ", ".join([
        f"dtype {dtype}" + " (auto)" * settings["dtype_is_auto"],
        f"global batch {settings['global_batch_size']:,}",
        f"micro batch {_given(settings['micro_batch_size'])}"
        + (f" x {count:,}" if count else ""),
        f"recompute {_given(settings['recompute'])}", f"ZeRO {_given(settings['zero'])}",
        f"runtime {settings['runtime']}",
    ])  # fmt: skip


def _given(value: int | str | None) -> str:
    return "any" if value is None else f"{value}"
