"""Rules of the software that runs a job: what its own checks end before the first step.

By hand, nanotron on 8 stages: its 1F1B wants 7 micro batches, one for each stage before the last.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpctl.errors import Offer
from mpctl.layout.topology import replicas
from mpctl.pipeline.filled import is_filled, job_cut
from mpctl.rules.check import Check, refusal
from mpctl.sharding import divisors
from mpctl.spec.job import JobSpec
from mpctl.spec.runtime import get_profile
from mpctl.units import plural


def start_rules(job: JobSpec) -> Iterator[Check]:
    """Micro batches for every stage before the last where the runtime's 1F1B asks for them, and a
    parameter on every stage whose replicas torch's DDP would wrap."""
    p, micro_batches = job.parallel, job.num_microbatches
    if p.pp == 1 or not get_profile(job.training.runtime).runs.needs_full_pipeline:
        return
    if micro_batches < p.pp - 1:
        per_micro_batch = job.training.micro_batch_size * job.sizes["dp"]
        setting, least = "training.global_batch_size", (p.pp - 1) * per_micro_batch
        sizes = tuple(size for size in divisors(p.pp) if size - 1 <= micro_batches)
        message = (
            f"{plural(micro_batches, 'micro batch', 'micro batches')} on {p.pp} stages: "
            f"{job.training.runtime}'s 1f1b refuses fewer than {p.pp - 1}, one for each stage "
            "before the last"
        )
        yield refusal("pipeline-is-full", "parallel.pp", message, Offer("parallel.pp", sizes, "pp"),
                      Offer(setting, (least,), setting))  # fmt: skip
    if job.model is not None and is_filled(job) and replicas(job) > 1:
        used = job_cut(job.model, p.pp).loss_stage + 1
        if used < p.pp:
            message = (
                f"{job.training.runtime} needs {used} of {p.pp} stages for the model, and torch's "
                "DDP refuses a stage without parameters"
            )
            yield refusal("stages-hold-something", "parallel.pp", message,
                          more=f"use pp {used} or less")  # fmt: skip
