"""Comments that every target gives: the sizes that follow from others, batch, vocabulary, verdict.

By hand, tp 4, cp 2 and pp 4 on 64 ranks with a global batch of 128:

    dp 2 = 64 ranks / (tp 4 x cp 2 x pp 4)
    global batch 128 = micro batch 1 x dp 2 x 64 micro batches a step
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mpctl.axes import CHOSEN_AXES
from mpctl.axes import sizes_text as axis_sizes_text
from mpctl.layout.topology import zero_stage
from mpctl.planning.plan import Plan
from mpctl.planning.summary import model_name, placement_text, sizes_text, verdict
from mpctl.sharding import padded_vocab
from mpctl.spec.job import JobSpec
from mpctl.spec.schedules import SCHEDULES
from mpctl.units import plural


def plan_notes(
    plan: Plan, launcher: str, *, divisor: int | None = None, schedules: Iterable[str] = SCHEDULES
) -> Iterator[str]:
    """What every target says: the layout and whether it fits, the padded vocabulary, and what of
    the plan has no effect or is another thing there. divisor: of its padding, where it is not the
    model's; 0 where the launcher pads nothing. schedules: those that it runs."""
    yield from layout_notes(plan)
    yield from vocabulary_note(plan.job, divisor=divisor)
    yield from zero_note(plan.job)
    yield from schedule_note(plan.job, tuple(schedules))
    yield from sequence_note(plan.job, launcher)


def layout_notes(plan: Plan) -> Iterator[str]:
    """Model, sizes and place of the ranks; how dp and the micro batches follow; whether it fits."""
    job, sizes = plan.job, plan.job.sizes
    model = model_name(job)
    of_model = f"{model}: " if model else ""
    yield f"{of_model}{sizes_text(job)}, {placement_text(plan)}, order {job.parallel.order}"
    inner = axis_sizes_text(sizes, CHOSEN_AXES)
    yield f"dp {sizes['dp']} = {plural(job.world_size, 'rank')} / ({inner})"
    yield batch_note(job)
    yield verdict(plan)


def batch_note(job: JobSpec) -> str:
    """How the global batch follows from micro batch, dp and micro batches."""
    t, count = job.training, job.num_microbatches
    return (
        f"global batch {t.global_batch_size} = micro batch {t.micro_batch_size} x dp "
        f"{job.sizes['dp']} x {plural(count, 'micro batch', 'micro batches')} a step"
    )


def vocabulary_note(job: JobSpec, *, divisor: int | None = None) -> Iterator[str]:
    """The padded rows of the word table. divisor: theirs, where it is not the model's; 0 where the
    software pads nothing."""
    if job.model is None:
        return
    vocab, tp = job.model.vocab, job.parallel.tp
    ours = padded_vocab(vocab, tp=tp, divisor=job.model.vocab_divisor)
    if divisor == 0:
        more = f"; mpctl's plan pads it to {ours}" if ours != vocab else ""
        yield f"vocabulary {vocab}, not padded by this software{more}"
        return
    theirs = padded_vocab(vocab, tp=tp, divisor=divisor or job.model.vocab_divisor)
    more = f"; mpctl's plan pads it to {ours}" if ours != theirs else ""
    multiple = divisor or job.model.vocab_divisor
    yield f"vocabulary {vocab}, padded to {theirs}, a multiple of {multiple} x tp {tp}{more}"


def zero_note(job: JobSpec) -> Iterator[str]:
    """Where the plan asks for ZeRO and there is a single replica."""
    if job.parallel.zero and not zero_stage(job):
        yield f"ZeRO {job.parallel.zero} shares nothing: dp x cp is 1"


def schedule_note(job: JobSpec, known: tuple[str, ...]) -> Iterator[str]:
    """Where the software has another schedule than the plan's. known: those that it runs."""
    p = job.parallel
    if p.pp > 1 and p.schedule not in known:
        yield (
            f"approximated: schedule {p.schedule} is not there; 1F1B runs instead, with the same "
            "losses and another bubble and memory"
        )


def sequence_note(job: JobSpec, launcher: str) -> Iterator[str]:
    """Where sequence parallelism is on and tp is 1."""
    if job.parallel.sequence_parallel and job.parallel.tp == 1:
        yield f"sequence parallelism is left out: tp is 1, and {launcher} turns it off itself"
