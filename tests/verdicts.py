"""Which recorded runs of nanotron's sweep fit their GPUs by the estimate, and which did.

A failed run "crashed or ran out of memory"; the sweep does not tell which. Memory is not taken for
the reason where nanotron refuses to start (mpctl/plan/rules/runtime.py), where stages hold nothing (of
94 such runs 2 ran), and where another run of the model ran that needs at least as much of
everything: samples, micro batches in flight, states on as many ranks or fewer.

Balanced accuracy is the mean of two shares: of runs that ran and are said to fit, and of runs that
failed for memory and are said not to. By hand, 9 of 10 and 3 of 4: 0.825.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.batch.rows import as_others_run, load_row
from mpctl.plan.estimate.memory import layout_memory, peak_bytes
from mpctl.plan.rules.validate import find_errors
from mpctl.spec.job import JobSpec
from tests.nanotron import nanotron_rows


@dataclass(frozen=True)
class JudgedRun:
    """A run with what its fullest rank needs and its device has, bytes. first_bytes: reserved on
    the first stage, where the sweep measured peak_bytes (None where it failed). has_cause: whether
    a failed run's cause may have been memory."""

    name: str
    model: str
    job: JobSpec
    need: int
    have: int
    first_bytes: int
    peak_bytes: float | None
    has_cause: bool = True

    @property
    def ran(self) -> bool:
        """Whether it ran to its end."""
        return self.peak_bytes is not None

    def fits(self, headroom: float) -> bool:
        """Whether it leaves so many percent of its device free."""
        return self.need <= self.have * (1 - headroom / 100)


def judged_runs(every: int = 1) -> list[JudgedRun]:
    """The sweep's runs; every: one of so many of them."""
    rows = [row for outcome in ("ran", "soft", "failed") for row in nanotron_rows(outcome)]
    jobs = [_job(row) for row in rows]
    ran = [job for job, row in zip(jobs, rows, strict=True) if "failed" not in row["measured"]]
    return [_judged(row, job, ran) for row, job in list(zip(rows, jobs, strict=True))[::every]]


def _job(row: dict[str, Any]) -> JobSpec:
    loaded = load_row(row["job"])
    assert loaded.job is not None, row["id"]
    return as_others_run(loaded.job)[0]


def _judged(row: dict[str, Any], job: JobSpec, ran: Iterable[JobSpec]) -> JudgedRun:
    layout, device = JobLayout.of(job), job.cluster.device
    assert device is not None
    memory, peak = layout_memory(layout), row["measured"].get("peak_mem_gib_reserved")
    return JudgedRun(
        row["id"],
        row["id"].split("_")[1],
        job,
        peak_bytes(memory),
        device.memory_bytes,
        memory[0].reserved_bytes,
        None if peak is None else peak * 2**30,
        peak is not None
        or not (find_errors(job) or layout.loss_stage < layout.last_stage or any(_needs_less(job, run) for run in ran)),
    )


def _needs_less(job: JobSpec, other: JobSpec) -> bool:
    """Whether the job needs no more memory than another one, in every part."""
    model, p, q = job.model, job.parallel, other.parallel
    assert model is not None and other.model is not None
    tied = {"tied_embeddings": model.tied_embeddings}
    is_alike = other.model == model or (model.tied_embeddings and other.model.model_copy(update=tied) == model)
    has_states = q.zero < p.zero or (q.zero == p.zero and (not p.zero or (q.dp or 1) <= (p.dp or 1)))
    return (
        is_alike
        and q.pp == p.pp
        and q.tp <= p.tp
        and has_states
        and (q.tp > 1 or p.tp == 1)
        and ((q.dp or 1) > 1 or (p.dp or 1) == 1)
        and other.training.micro_batch_size >= job.training.micro_batch_size
        and min(other.num_microbatches, q.pp) >= min(job.num_microbatches, p.pp)
    )


def balanced_accuracy(
    runs: Sequence[JudgedRun], headroom: float, counts: Callable[[JudgedRun], bool] | None = None
) -> float:
    """The mean of two shares: of runs that ran and fit, and of runs that failed and do not.

    counts: which failed runs count; those that may have failed for memory by default.
    """
    counts = counts or (lambda run: run.has_cause)
    ran = [run.fits(headroom) for run in runs if run.ran]
    failed = [not run.fits(headroom) for run in runs if not run.ran and counts(run)]
    return (sum(ran) / len(ran) + sum(failed) / len(failed)) / 2


def best_headroom(runs: Sequence[JudgedRun]) -> float:
    """The headroom, percent in halves, by which most of the runs are judged rightly."""
    return max((half / 2 for half in range(41)), key=lambda share: balanced_accuracy(runs, share))
