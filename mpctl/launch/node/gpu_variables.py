"""Environment variables that ranks on GPUs start with: torch's allocator, its flight recorder.

What the user has set stays as it is, an empty value included, so that any of them can be turned
off: `PYTORCH_ALLOC_CONF= mpctl launch ...`.

- `expandable_segments:True`: the allocator maps memory page by page into segments that grow, so
  that free blocks between others are not lost when sizes change from step to step (torch's notes on
  CUDA semantics).
- torch's flight recorder notes the last collectives of each process group; when NCCL's watchdog
  ends a rank, it writes them to a file of that rank, by default below ~/.cache, where the next run
  replaces them. Here they are written to RUN/logs; `torchfrtrace` reads them.

By hand, rank 3 of a run in /r, whose collective timed out, leaves /r/logs/nccl_trace_rank_3.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpctl.rundir.directory import RunDir

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Names under which torch reads the allocator's settings; the first is torch's own since 2.9."""
RECORDER = ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT")
TRACE_ENTRIES = "2000"
"""Collectives that the flight recorder keeps for the record of a time-out."""


def allocator_variables(surroundings: Mapping[str, str]) -> dict[str, str]:
    """Settings of the allocator on a GPU; none where the surroundings have any of their own."""
    if any(name in surroundings for name in ALLOCATOR):
        return {}
    return {ALLOCATOR[0]: "expandable_segments:True"}


def recorder_variables(run: RunDir, surroundings: Mapping[str, str]) -> dict[str, str]:
    """Settings of the flight recorder for ranks of a run, without those that the surroundings
    have."""
    ours = zip(RECORDER, (TRACE_ENTRIES, str(run.collective_trace), "1"), strict=True)
    return {name: value for name, value in ours if name not in surroundings}
