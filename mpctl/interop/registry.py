"""The launchers that a plan can be written for, and those whose command lines a job is read from.

A new one is a module with a row here: what it cannot say (refusals), its comments and its text.

>>> sorted(TARGETS)[:2]
['accelerate', 'colossalai']
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType

from mpctl.core.errors import InputError
from mpctl.interop import accelerate, bridge, colossalai, deepspeed, megatron, nanotron, torch_mesh, torchtitan
from mpctl.interop.emitted import EmittedPlan
from mpctl.interop.flag_reader import ReadJob, says_ranks
from mpctl.interop.from_deepspeed import read_deepspeed
from mpctl.interop.from_megatron import read_megatron
from mpctl.interop.from_nanotron import read_nanotron
from mpctl.interop.from_torchtitan import read_torchtitan
from mpctl.plan.planning.plan import Overrides, Plan
from mpctl.plan.planning.runtimes import runtime_of
from mpctl.plan.planning.summary import step_text
from mpctl.plan.rules.check import Check, listed
from mpctl.spec.job import JobSpec
from mpctl.spec.runtime import get_profile

_ROWS = (megatron, bridge, torchtitan, deepspeed, accelerate, nanotron, colossalai, torch_mesh)
TARGETS = {row.TARGET.name: row.TARGET for row in _ROWS}


def emit_plan(plan: Plan, target: str) -> EmittedPlan:
    """A legal plan as what a launcher takes. Raises InputError for a name that is not in TARGETS,
    and with every setting that the launcher cannot say."""
    if target not in TARGETS:
        message = f"{target!r} is no launcher that plans are written for"
        raise InputError.of("emit-target", "--emit", message, f"use {listed([*TARGETS])}")
    row = TARGETS[target]
    if issues := list(row.refusals(plan)):
        raise InputError(issues)
    notes = (*_runtime_note(plan, target), *row.notes(plan))
    return EmittedPlan(target, row.software, row.language, notes, row.body(plan))


def launcher_runtime(job: JobSpec, target: str) -> str | None:
    """The runtime that a job is planned under before it is written for a launcher; None where there
    is none whose figures are the launcher's on the job's devices, by default NVIDIA's."""
    return runtime_of(target, job.device_kind or "cuda")


def _runtime_note(plan: Plan, target: str) -> Iterator[str]:
    """Whose speed and memory the plan assumes, and the step's time where it is the launcher's."""
    runtime, estimate = plan.job.training.runtime, plan.estimate
    if estimate is None:
        return
    if target not in get_profile(runtime).runs.emit:
        software, theirs = TARGETS[target].software, launcher_runtime(plan.job, target)
        way_out = f": --runtime {theirs}" if theirs else ", of which there are no figures here"
        yield f"memory and time are estimated for runtime {runtime}, not for {software}{way_out}"
    elif not isinstance(estimate.time, str):
        yield f"planned for runtime {runtime}; a step takes {step_text(estimate.time)}"


READERS: dict[str, Callable[[str], ReadJob]] = {
    "megatron": read_megatron,
    "torchtitan": read_torchtitan,
    "nanotron": read_nanotron,
    "deepspeed": read_deepspeed,
}
EXAMPLE = 'such as "--num-layers 24 ...", or @FILE for a file of them'


def read_flags(launcher: str, text: str, typed: Overrides = MappingProxyType({})) -> ReadJob:
    """The job that a launcher's command line is.

    text: the flags or the full command; `@FILE` is a file that contains it, `-` is stdin. typed:
    the settings on mpctl's command line, which override it. Raises InputError for another launcher,
    for a file that cannot be read, and for flags that are wrong or leave the vocabulary open.
    """
    if launcher not in READERS:
        message = f"{launcher!r} is no launcher whose flags are read"
        raise InputError.of("from-launcher", "--from", message, f"use {listed([*READERS])}")
    content = _content(text)
    if not content.strip():
        hint = f"give the flags as one text, {EXAMPLE}"
        raise InputError.of("bad-syntax", "--from", "there are no flags to read", hint)
    reader = READERS[launcher]
    read = reader(content) if reader is not read_megatron else read_megatron(content, typed)
    known = {*read.settings, *typed}
    if "model.layers" in read.settings and not known & {"model", "model.vocab"}:
        message = "is not there, and no tokenizer is asked for the vocabulary"
        raise InputError.of("megatron-flag", "--vocab-size", message, "add it, or --set model.vocab=N")
    if any(map(says_ranks, known)):
        return read
    message = "neither the flags nor the command line say how many ranks there are: dp 1 is planned"
    hint = "add --nodes and --gpus-per-node, or --cluster"
    return read._replace(warnings=(*read.warnings, Check("from-world", "warning", "--from", message, hint)))


def _content(text: str) -> str:
    try:
        if text == "-":
            return sys.stdin.read()
        if text.startswith("@"):
            return Path(text[1:]).read_text("utf-8")
    except OSError as error:
        raise InputError.of("no-such-file", text[1:], error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise InputError.of("bad-syntax", text, str(error)) from None
    _check_has_flags(text)
    return text


def _check_has_flags(text: str) -> None:
    """Raises InputError for a typed text without any flag, such as a file's name without its @."""
    if not text.strip() or any(word.startswith("--") for word in text.split()):
        return
    if len(text) < 256 and Path(text).is_file():
        message = f"{text!r} is a file, and flags are wanted"
        raise InputError.of("bad-syntax", "--from", message, f"write @{text} for the flags in it")
    message = f"{text[:80]!r} has no flag"
    raise InputError.of("bad-syntax", "--from", message, f"give the flags as one text, {EXAMPLE}")
