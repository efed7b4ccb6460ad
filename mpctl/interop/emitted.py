"""A plan as another launcher's flags, file or snippet: one value, the same for every target.

Its notes are comments before the body: those of every target (derived sizes, batch, vocabulary,
verdict) and those of this one. Bodies are made of the rows of a launcher (mapping.py).
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Literal

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.core.axes import CHOSEN_AXES
from mpctl.core.axes import sizes_text as axis_sizes_text
from mpctl.core.errors import InputError, Issue
from mpctl.core.sharding import padded_vocab
from mpctl.core.units import plural
from mpctl.interop.log_formats import LauncherLog
from mpctl.interop.mapping import ReadJob
from mpctl.interop.registry import LAUNCHERS, TARGETS
from mpctl.model.layout.topology import zero_stage
from mpctl.plan.planning.plan import Overrides, Plan
from mpctl.plan.planning.runtimes import runtime_of
from mpctl.plan.planning.summary import model_name, placement_text, routing_text, sizes_text, step_text, verdict
from mpctl.plan.rules.check import listed
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec
from mpctl.spec.runtime import get_profile
from mpctl.spec.schedules import SCHEDULES

WIDTH = 98
OWN_SCRIPT = "train.py"
"""What a trainer of the user's own is called in examples of `--program`."""
Language = Literal["shell", "yaml", "python", "toml"]


class EmitDocument(TypedDict):
    """Schema mpctl.emit/1: a plan in the form of another launcher. text: the notes as comments, and the flags or
    the file; the other keys as in EmittedPlan."""

    schema: Literal["mpctl.emit/1"]
    target: str
    software: str
    language: Language
    text: str
    notes: list[str]


@dataclass(frozen=True, slots=True)
class EmittedPlan:
    """A plan in the form of another launcher.

    target: its name, `megatron`. software: name and version that the spelling was checked with.
    language: of the text, in all of which a comment begins with `#`. notes: what a reader must
    know: derived sizes, approximations. body: flags, file or snippet. config: the JSON that its
    programs read, empty where they read the text. variables: environment by which its programs get the plan
    without an argument.
    """

    target: str
    software: str
    language: Language
    notes: tuple[str, ...]
    body: str
    config: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_flags(self) -> bool:
        """Whether a rank's program takes the body as flags, and no file."""
        return self.language == "shell" and not self.config

    @property
    def text(self) -> str:
        """The notes as comments, each wrapped with its later lines set in, then the body."""
        return "\n".join([*map(_comment, (f"For {self.software}.", *self.notes)), self.body])

    def as_dict(self) -> EmitDocument:
        """Return what `mpctl emit JOB TARGET --json` prints."""
        return {
            "schema": "mpctl.emit/1",
            "target": self.target,
            "software": self.software,
            "language": self.language,
            "text": self.text,
            "notes": list(self.notes),
        }


def _comment(note: str) -> str:
    """A note may hold names from a job file: what could end the comment becomes a space."""
    plain = " ".join("".join(c if c.isprintable() else " " for c in note).split())
    return textwrap.fill(
        plain, WIDTH, initial_indent="# ", subsequent_indent="#   ", break_long_words=False, break_on_hyphens=False
    )


@dataclass(frozen=True, slots=True)
class ForeignLauncher:
    """A launcher that plans are written for; its module and a row in registry.py are all of it.

    software: with the version that the spelling was checked with. refusals: issues of settings that
    it cannot express. notes: comments on a plan that it can express; body: the text. read: the job
    of its flags or file, which the settings on mpctl's command line override; None where it is not
    read. log: how its log reads. script: the software's own training script, empty where every user
    writes one or `{NAME}` is it; given: how a script gets the plan, `{NAME}` when empty. config,
    variables: see EmittedPlan. runtime: whose figures are the software's, where no preset names the launcher in
    `emit`, which would list it next to every plan.
    """

    name: str
    software: str
    language: Language
    refusals: Callable[[Plan], Iterator[Issue]]
    notes: Callable[[Plan], Iterator[str]]
    body: Callable[[Plan], str]
    read: Callable[[str, Overrides], ReadJob] | None = None
    log: LauncherLog | None = None
    script: str = ""
    given: str = ""
    config: Callable[[Plan], str] | None = None
    variables: Callable[[Plan], dict[str, str]] | None = None
    runtime: str = ""

    @property
    def is_flags(self) -> bool:
        """Whether a rank's program takes the body as flags, and no file."""
        return self.language == "shell" and self.config is None

    @property
    def program(self) -> str:
        """The usual command of a rank, as `mpctl launch --program` takes it: `python pretrain_gpt.py {megatron}`."""
        placeholder = f"{{{self.name}}}"
        given = "" if self.script == placeholder else f" {self.given or placeholder}"
        return f"python {self.script or OWN_SCRIPT}{given}"


def usual_launcher(plan: Plan) -> ForeignLauncher | None:
    """The launcher of a legal plan's runtime: the first that can express the plan, else the first; None where there
    is none."""
    launchers = [get_launcher(name) for name in get_profile(plan.job.training.runtime).runs.emit]
    able = (launcher for launcher in launchers if not any(launcher.refusals(plan)))
    return next(able, launchers[0] if launchers else None)


def usual_program(plan: Plan) -> str:
    """The command that usually trains a legal plan under its runtime, for `mpctl launch --program`."""
    launcher = usual_launcher(plan)
    return launcher.program if launcher else f"python {OWN_SCRIPT}"


def get_launcher(name: str) -> ForeignLauncher:
    """The launcher of a name. Raises InputError for one that no plan is written for."""
    if name not in LAUNCHERS:
        message = f"{name!r} is no launcher that plans are written for"
        raise InputError.of("emit-target", "--emit", message, f"use {listed(TARGETS)}")
    found: ForeignLauncher = import_module(LAUNCHERS[name].module).LAUNCHER
    return found


def emit_plan(plan: Plan, target: str) -> EmittedPlan:
    """A legal plan as what a launcher takes. Raises InputError for a name that is not in TARGETS,
    and with every setting that the launcher cannot say."""
    launcher = get_launcher(target)
    if issues := list(launcher.refusals(plan)):
        raise InputError(issues)
    notes = (*_runtime_note(plan, launcher), *launcher.notes(plan))
    config = launcher.config(plan) if launcher.config else ""
    variables = launcher.variables(plan) if launcher.variables else {}
    return EmittedPlan(target, launcher.software, launcher.language, notes, launcher.body(plan), config, variables)


def launcher_runtime(job: JobSpec, target: str) -> str | None:
    """The runtime that a job is planned under before it is written for a launcher; None where there
    is none whose figures are the launcher's on the job's devices, by default NVIDIA's."""
    device = job.cluster.device
    return (
        runtime_of(target, job.device_kind or "cuda", device.peak_flops if device else ())
        or get_launcher(target).runtime
        or None
    )


def _runtime_note(plan: Plan, launcher: ForeignLauncher) -> Iterator[str]:
    """Yield a note on the runtime behind the estimates; if the launcher runs that runtime, give the step time."""
    runtime, estimate = plan.job.training.runtime, plan.estimate
    if estimate is None:
        return
    if launcher.name not in get_profile(runtime).runs.emit and runtime != launcher.runtime:
        theirs = launcher_runtime(plan.job, launcher.name)
        way_out = f": --runtime {theirs}" if theirs else ", of which there are no figures here"
        yield f"memory and time are estimated for runtime {runtime}, not for {launcher.software}{way_out}"
    elif not isinstance(estimate.time, str):
        yield f"planned for runtime {runtime}; a step takes {step_text(estimate.time)}"


def plan_notes(
    plan: Plan, launcher: str, *, divisor: int | None = None, schedules: Iterable[str] = SCHEDULES
) -> Iterator[str]:
    """The notes of every target: the layout and whether it fits, the padded vocabulary, and
    settings of the plan that have no effect or differ there. divisor: of its padding, where it is
    not the model's; 0 where the launcher pads nothing. schedules: those that it runs."""
    job, sizes, p, t = plan.job, plan.job.sizes, plan.job.parallel, plan.job.training
    model = model_name(job)
    of_model = f"{model}: " if model else ""
    yield f"{of_model}{sizes_text(job)}, {placement_text(plan)}, order {p.order}"
    inner = axis_sizes_text(sizes, CHOSEN_AXES)
    yield f"dp {sizes['dp']} = {plural(job.world_size, 'rank')} / ({inner})"
    yield (
        f"global batch {t.global_batch_size} = micro batch {t.micro_batch_size} x dp "
        f"{sizes['dp']} x {plural(job.num_microbatches, 'micro batch', 'micro batches')} a step"
    )
    yield verdict(plan)
    if plan.estimate is not None and (routed := routing_text(plan.estimate)):
        yield f"routing: {routed}"
    if job.model is not None:
        yield _vocabulary_note(job.model, p.tp, divisor)
    if p.zero and not zero_stage(job):
        yield f"ZeRO {p.zero} shares nothing: dp x cp is 1"
    if p.pp > 1 and p.schedule not in schedules:
        yield (
            f"approximated: schedule {p.schedule} is not there; 1F1B runs instead, with the same "
            "losses and another bubble and memory"
        )
    if p.sequence_parallel and p.tp == 1:
        yield f"sequence parallelism is left out: tp is 1, and {launcher} turns it off itself"


def _vocabulary_note(model: ModelSpec, tp: int, divisor: int | None) -> str:
    """The rows of the word table there, and in the plan if they differ."""
    vocab, multiple = model.vocab, model.vocab_divisor if divisor is None else divisor
    ours = padded_vocab(vocab, tp=tp, divisor=model.vocab_divisor)
    rows = padded_vocab(vocab, tp=tp, divisor=multiple) if multiple else vocab
    how = f"padded to {rows}, a multiple of {multiple} x tp {tp}"
    more = f"; mpctl's plan pads it to {ours}" if ours != rows else ""
    return f"vocabulary {vocab}, {how if multiple else 'not padded by this software'}{more}"
