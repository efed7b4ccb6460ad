"""A plan as another launcher's flags, file or snippet: one value, the same for every target.

Its notes are comments before the body: those of every target (derived sizes, batch, vocabulary,
verdict) and those of this one. Bodies are made of YAML and of Python source, of numbers, words,
lists and tables, nothing that is run.

>>> print(yaml_text({"tp": 4, "fsdp": {"reshard": True, "wrap": "NONE"}}))
tp: 4
fsdp:
  reshard: true
  wrap: NONE
>>> print(python_call("Plugin", {"tp_size": 4, "precision": "bf16"}))
Plugin(
    tp_size=4,
    precision="bf16",
)
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from mpctl.core.axes import CHOSEN_AXES
from mpctl.core.axes import sizes_text as axis_sizes_text
from mpctl.core.errors import Issue
from mpctl.core.sharding import padded_vocab
from mpctl.core.units import plural
from mpctl.model.layout.topology import zero_stage
from mpctl.plan.planning.plan import Plan
from mpctl.plan.planning.summary import model_name, placement_text, sizes_text, verdict
from mpctl.spec.model import ModelSpec
from mpctl.spec.schedules import SCHEDULES

WIDTH = 98
Language = Literal["shell", "yaml", "python"]


@dataclass(frozen=True, slots=True)
class EmittedPlan:
    """A plan in the form of another launcher.

    target: its name, `megatron`. software: name and version that the spelling was checked with.
    language: of the text, in all of which a comment begins with `#`. notes: what a reader must
    know: derived sizes, approximations. body: flags, file or snippet.
    """

    target: str
    software: str
    language: Language
    notes: tuple[str, ...]
    body: str

    @property
    def text(self) -> str:
        """The notes as comments, each wrapped with its later lines set in, then the body."""
        return "\n".join([*map(_comment, (f"For {self.software}.", *self.notes)), self.body])

    def as_dict(self) -> dict[str, Any]:
        """Schema mpctl.emit/1: what `mpctl plan --emit TARGET --json` prints."""
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
class EmitTarget:
    """One launcher that plans can be written for; a new one starts with a row in registry.py.

    refusals: issues of settings that it cannot express. notes: its comments on a plan that it can
    express; body: the text.
    """

    name: str
    software: str
    language: Language
    refusals: Callable[[Plan], Iterator[Issue]]
    notes: Callable[[Plan], Iterator[str]]
    body: Callable[[Plan], str]


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


_PLAIN = re.compile(r"[A-Za-z_][\w./-]*")
_NOT_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


class Source(NamedTuple):
    """A Python expression that is written verbatim, such as `torch.bfloat16`: only from constants
    of this package, never from a job."""

    code: str


Scalar = int | float | str | bool | None
Value = Scalar | Source | list[int] | list[str] | list[list[str]]
Tree = Mapping[str, "Scalar | Tree"]


def yaml_text(tree: Tree) -> str:
    """Nested tables as YAML blocks, in the order given."""
    return "\n".join(_yaml_lines(tree, ""))


def _yaml_lines(tree: Tree, indent: str) -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield f"{indent}{key}:" if value else f"{indent}{key}: {{}}"
            yield from _yaml_lines(value, f"{indent}  ")
        else:
            yield f"{indent}{key}: {_yaml_scalar(value)}"


def _yaml_scalar(value: Scalar) -> str:
    """A string is unquoted where YAML reads it as a string; a float has a point, as YAML 1.1
    requires."""
    if isinstance(value, str):
        is_plain = _PLAIN.fullmatch(value) and value.lower() not in _NOT_WORDS
        return value if is_plain else json.dumps(value)
    if isinstance(value, float):
        text = repr(value)
        return text if "." in text or "e" not in text else text.replace("e", ".0e")
    return json.dumps(value)


def python_value(value: Value) -> str:
    """A literal, strings in double quotes; a Source is written verbatim.

    >>> python_value([1, 2]), python_value("a"), python_value(None), python_value(True)
    ('[1, 2]', '"a"', 'None', 'True')
    """
    if isinstance(value, Source):
        return value.code
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, list):
        return f"[{', '.join(python_value(part) for part in value)}]"
    return repr(value)


def python_call(name: str, arguments: Mapping[str, Value], indent: str = "") -> str:
    """A call with keyword arguments, one a line."""
    lines = [f"{indent}    {key}={python_value(value)}," for key, value in arguments.items()]
    return "\n".join([f"{name}(", *lines, f"{indent})"])
