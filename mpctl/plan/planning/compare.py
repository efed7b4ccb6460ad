"""Plans side by side: the settings in which they differ, the costs of each, and what they cost over the first.

A variant is a job, `demo`; a job with settings, `demo,tp=1,dp=2`; or settings alone, over the first
job: `tp=1,dp=2`. Settings are named as for --set.

Jobs of one model that leave the global batch open share one, the smallest that all of them can run: else a
layout with half the replicas would seem twice as fast, as it computes half the samples. Jobs of different
batches are compared by tokens a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.core.axes import MESSAGE_GROUPS
from mpctl.core.errors import InputError, Issue, IssueEntry
from mpctl.plan.estimate.system import find_system
from mpctl.plan.planning.difference import cost_difference, memory_difference, ranking_error, rate_difference, tie_text
from mpctl.plan.planning.gates import Gate, GateEntry, judge
from mpctl.plan.planning.plan import Overrides, Plan, load_plan
from mpctl.plan.planning.summary import TrainingEntry, training_settings
from mpctl.plan.planning.traffic import sent_bytes
from mpctl.plan.planning.whole_run import gpu_hours_per_billion
from mpctl.plan.rules.check import Check, listed
from mpctl.spec.figure_sources import FigureSource
from mpctl.spec.load import is_file, load_partial, parse_settings
from mpctl.spec.names import full_names
from mpctl.spec.runtime import get_profile, is_same_software
from mpctl.spec.training import DEFAULT_RUNTIME, LOSS_KEYS

if TYPE_CHECKING:
    from mpctl.plan.estimate.job import Estimate
    from mpctl.spec.job import JobSpec


# Warnings of settings that a job's runtime does not run: the estimate is as if it did.
class CompareDocument(TypedDict):
    """Schema mpctl.compare/2: several jobs, each list with an entry a job.

    runs: whether the job's runtime runs all of its settings; the estimate is as if it did.
    figures_from: the user's presets behind its figures. warnings: those of `mpctl plan`. settings: those that
    differ, by full name; figures: by name: `seconds.tp`; `bytes.dp_cp`: of messages; `sent_bytes.dp_cp`: what a
    rank sends in a step; price_per_billion_tokens: where a GPU-hour has a price. is_measured: whether runs of
    the job's software on its cluster were fitted. costs: what each takes over the first, by part of the step,
    and whether estimates can tell them apart; empty for the first and where a time is not known. gates: the
    answers of `--fail-if`, for each job but the first.
    """

    schema: Literal["mpctl.compare/2"]
    jobs: list[str]
    training: list[TrainingEntry]
    fits: list[bool | None]
    runs: list[bool]
    figures_from: list[list[FigureSource]]
    warnings: list[list[IssueEntry]]
    settings: dict[str, list[object]]
    figures: list[dict[str, float | None]]
    is_measured: list[bool]
    costs: list[str]
    gates: list[GateEntry]


BATCH = "training.global_batch_size"
MOST_BATCHES = 8  # times the largest own batch that a shared one may be
NOT_RUN = ("runtime-runs", "model-launched", "job-launched")
DESCRIPTIONS = ("name", "description", "source", "hub_id")  # keys that are no settings


def load_variants(
    texts: Sequence[str], overrides: Overrides, read: tuple[str, Overrides] | None = None, *, shows_read: bool = True
) -> list[tuple[str, Plan]]:
    """Each text with the legal plan of the job that it names; overrides apply to all. read: the name
    and the settings of a job that comes from elsewhere, which stands first if shows_read.

    Raises InputError with the issues of every variant, and where there is nothing to compare.
    """
    name, base = read or (None, {})
    texts = [*([name] if name and shows_read else []), *texts]
    if len(texts) < 2:
        raise InputError.of(
            "usage",
            "OTHER",
            f"{len(texts)} job is nothing to compare",
            "name two or more: mpctl compare demo tp=1,dp=2",
        )
    plans, issues, first = list[Plan](), list[Issue](), name or _split(texts[0], texts[0])[0]
    sources = list[tuple[str | None, Overrides]]()
    for text in texts:
        source, *settings = [first] if text == name else _split(text, first)
        try:
            is_read = source == name
            given = {**overrides, **full_names(parse_settings(settings))}
            sources.append((None if is_read else source, {**(_kept(base, given) if is_read else {}), **given}))
            plans.append(load_plan(*sources[-1]))
        except InputError as error:
            issues += [Issue(i.rule, f"{text}: {i.where}", i.message, i.hint) for i in error.issues]
    if issues:
        raise InputError(issues)
    return list(zip(texts, with_one_batch(plans, sources), strict=True))


def with_one_batch(plans: Sequence[Plan], sources: Sequence[tuple[str | None, Overrides]]) -> list[Plan]:
    """The plans, with one global batch for those of one model that leave it open. sources: of each plan, as
    `load_plan` takes them. A batch far above those that they would assume is none that anybody trains with;
    then each keeps its own."""
    found, batches = list(plans), [plan.job.training.global_batch_size or 1 for plan in plans]
    if len(set(batches)) == 1:
        return found
    open_at = [at for at, each in enumerate(sources) if BATCH in load_partial(*each).open_settings]
    alike = [at for at in open_at if plans[at].job.model == plans[open_at[0]].job.model]
    batch = lcm(*(batches[at] for at in alike))
    if len(alike) < 2 or batch > MOST_BATCHES * max(batches):
        return found
    hint = "set training.global_batch_size to the batch of your run"
    noted = Check("one-global-batch", "warning", BATCH, f"{batch} for all, which every layout here can run", hint)
    for at in alike:
        source, more = sources[at]
        plan = load_plan(source, {**more, BATCH: batch})
        found[at] = replace(plan, checks=(*plan.checks, noted))
    return found


def _kept(read: Overrides, given: Overrides) -> Overrides:
    """The settings of a script that hold under the runtime of `given`."""
    was = str(read.get("training.runtime", DEFAULT_RUNTIME))
    if is_same_software(was, str(given.get("training.runtime", was))):
        return read
    return {key: value for key, value in read.items() if key not in LOSS_KEYS}


def _split(text: str, first: str) -> list[str]:
    """The job and its settings; commas inside a list's brackets do not separate, nor those of a file's name."""
    if is_file(Path(text)):
        return [text]
    words: list[str] = []
    for word in text.split(","):
        if words and words[-1].count("[") > words[-1].count("]"):
            words[-1] += f",{word}"
        else:
            words.append(word)
    where, equals, _ = words[0].partition("=")
    is_setting = equals and "/" not in where
    return [first, *words] if is_setting else words


def compare_document(variants: Sequence[tuple[str, Plan]], gates: Sequence[Gate] = ()) -> CompareDocument:
    """The variants as JSON, each list with an entry a variant; settings: only those that differ. Raises
    InputError where a gate asks for a figure that is not known."""
    names = [name for name, _ in variants]
    figures = [
        {"ranks": plan.job.world_size, **(_figures(plan.estimate) if plan.estimate else {})} for _, plan in variants
    ]
    settings = [_flat(plan.job.model_dump()) for _, plan in variants]
    batches = [issue.as_dict() for issue in _other_batches([plan.job for _, plan in variants], gates)]
    every = dict.fromkeys(name for values in settings for name in values)
    differ = [n for n in every if len({repr(values.get(n)) for values in settings}) > 1]
    return {
        "schema": "mpctl.compare/2",
        "jobs": names,
        "training": [training_settings(plan.job) for _, plan in variants],
        "fits": [plan.fits for _, plan in variants],
        "runs": [not any(c.rule in NOT_RUN for c in plan.checks) for _, plan in variants],
        "figures_from": [plan.figures_from for _, plan in variants],
        "warnings": [[*_warnings(plan), *batches] for _, plan in variants],
        "settings": {name: [values.get(name) for values in settings] for name in differ},
        "figures": figures,
        "is_measured": [_is_measured(plan.job) for _, plan in variants],
        "costs": [_cost(variants[0][1], plan, names[0]) if at else "" for at, (_, plan) in enumerate(variants)],
        "gates": judge(gates, names, figures),
    }


def _cost(base: Plan, other: Plan, name: str) -> str:
    """What a plan costs over the first one, in words. name: of the first."""
    if base.estimate is None or other.estimate is None:
        return ""
    first, time = base.estimate.time, other.estimate.time
    if isinstance(first, str) or isinstance(time, str):
        return ""
    held, holds = (estimate.fullest_stage.device_bytes for estimate in (base.estimate, other.estimate))
    was, batch = base.job.training.global_batch_size, other.job.training.global_batch_size
    if was != batch:
        rates = (
            estimate.layout.tokens_per_step / t.total
            for estimate, t in ((base.estimate, first), (other.estimate, time))
        )
        text = f"{rate_difference(*rates)}, at {batch:,} instead of {was:,} samples a step"
        text += memory_difference(held, holds)
    else:
        text = cost_difference(first, time, held, holds)
    lacks = [said for plan, said in ((base, f"{name} does not fit"), (other, "does not fit")) if plan.fits is False]
    error = ranking_error(first.high / first.low)
    is_tie = abs(time.total - first.total) <= error * min(first.total, time.total)
    if not lacks and is_tie and _is_same_work(base.job, other.job):
        lacks = [tie_text(error)]
    return "; ".join([text, *lacks])


def _is_measured(job: JobSpec) -> bool:
    return find_system(job.cluster, get_profile(job.training.runtime)).is_measured


def _is_same_work(one: JobSpec, other: JobSpec) -> bool:
    """Whether jobs differ in their layout alone, for which alone the error of estimates was measured."""
    keys = ("runtime", "chosen_dtype", "global_batch_size")
    same = all(getattr(one.training, key) == getattr(other.training, key) for key in keys)
    return same and one.model == other.model and one.cluster == other.cluster


def _other_batches(jobs: Sequence[JobSpec], gates: Sequence[Gate]) -> Iterator[Issue]:
    """A warning where steps compute different numbers of samples, so that their seconds say little."""
    sizes = dict.fromkeys(job.training.global_batch_size for job in jobs)
    if len(sizes) > 1:
        message = f"steps of {listed([f'{size:,}' for size in sizes])} samples: compare tokens/s, not seconds"
        gate = "; gate on tokens, such as tokens<-5%" if any(gate.key == "step_seconds" for gate in gates) else ""
        yield Issue("batches-differ", BATCH, message, f"set training.global_batch_size{gate}")


def _warnings(plan: Plan) -> list[IssueEntry]:
    noted = (c for c in plan.checks if c.status != "ok" and c.rule != "memory-fits")
    return [check.issue.as_dict() for check in noted]


def _flat(table: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """`{"parallel": {"tp": 2}}` -> `{"parallel.tp": 2}`, without names and descriptions."""
    settings: dict[str, object] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            settings |= _flat(value, f"{prefix}{key}.")
        elif key not in DESCRIPTIONS:
            settings[prefix + key] = value
    return settings


def _figures(estimate: Estimate) -> dict[str, float | None]:
    """Parameters, memory, time where it can be stated, and by axis the bytes of messages of one
    rank of each stage, summed, and the bytes that a rank sends in the stage that sends most."""
    time = estimate.time
    figures: dict[str, float | None] = {"parameters": estimate.parameters}
    figures["peak_bytes"] = estimate.fullest_stage.device_bytes
    if not isinstance(time, str):
        figures["step_seconds"] = time.total
        figures |= {"low_seconds": time.low, "high_seconds": time.high}
        figures["tokens_per_second"] = tokens = estimate.layout.tokens_per_step / time.total
        job = estimate.layout.job
        if (price := job.cluster.operations.price_per_gpu_hour) is not None:
            figures["price_per_billion_tokens"] = price * gpu_hours_per_billion(job.world_size, tokens)
        figures["mfu"] = time.mfu
        figures |= {f"seconds.{name}": seconds for name, seconds in time.parts().items()}
    grid, ranks = dict.fromkeys(estimate.layout.grid.groups, "tp"), estimate.layout.group_sizes
    for axis in MESSAGE_GROUPS:
        stages = [[m for m in stage if grid.get(m.axis, m.axis) == axis] for stage in estimate.messages]
        figures[f"bytes.{axis}"] = sum(m.bytes * m.count for stage in stages for m in stage)
        figures[f"sent_bytes.{axis}"] = max(sent_bytes(stage, ranks) for stage in stages)
    return figures
