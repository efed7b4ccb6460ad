"""What `launch.compile` compiles of a job: whole layers, or the operations between their messages.

A message ends what torch.compile can follow, and so does a weight gradient that is left for later;
casts to fp8 note what they see in memory that a whole layer's backward would have to find as it
was. A layer with none of them is compiled whole.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpctl.spec.job import JobSpec
from mpctl.spec.schedules import SCHEDULES


def why_not_whole(job: JobSpec) -> Iterator[str]:
    """The settings for which layers are compiled in pieces; none where they are compiled whole."""
    parallel = job.parallel
    if parallel.tp > 1:
        yield f"parallel.tp {parallel.tp}"
    if parallel.cp > 1:
        yield f"parallel.cp {parallel.cp}"
    if parallel.pp > 1 and SCHEDULES[parallel.schedule].splits_backward:
        yield f"parallel.schedule {parallel.schedule}"
    if job.training.dtype == "fp8":
        yield "training.dtype fp8"


def compiles_whole_layers(job: JobSpec) -> bool:
    """Whether a layer of the job is one function of tensors."""
    return not any(why_not_whole(job))
