"""Every option that names a setting of a job, defined once and shared by the commands.

Flags are for settings that people often vary; `--set parallel.order=...` reaches all others.
"""

from __future__ import annotations

import inspect
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from mpctl.axes import AXES
from mpctl.cli import complete
from mpctl.errors import InputError

if TYPE_CHECKING:
    from mpctl.planning.plan import Plan
    from mpctl.rules.check import Check


@dataclass(frozen=True, slots=True)
class Flag:
    """An option, such as `--micro-batch-size`, and the setting that it overrides."""

    option: str
    setting: str
    type: Any
    help: str

    @property
    def name(self) -> str:
        """The name of the option as a Python identifier."""
        return self.option.removeprefix("--").split("/")[0].replace("-", "_")


FLAGS = (
    Flag("--nodes", "cluster.nodes", int, "Number of nodes (hosts)."),
    Flag("--gpus-per-node", "cluster.gpus_per_node", int, "GPUs, and so ranks, on each node."),
    Flag("--cluster", "cluster", str, "A cluster preset: its name or its file."),
    Flag(
        "--headroom",
        "cluster.headroom",
        float,
        "Percent of a device's memory that must stay free for a layout to fit; 5 by default.",
    ),
    Flag(
        "--model",
        "model",
        str,
        "A model preset: its name, its file or its id on Hugging Face's hub; or a config.json.",
    ),
    *(
        Flag(f"--{axis.name}", f"parallel.{axis.name}", int, f"{axis.size.capitalize()}.")
        for axis in AXES
    ),
    Flag(
        "--tensor-mode",
        "parallel.tensor_mode",
        str,
        "How tp splits matrices: over a row of ranks (1d), a square (2d), layers of squares (2.5d) "
        "or a cube (3d).",
    ),
    Flag("--tensor-depth", "parallel.tensor_depth", int, "Layers d of 2.5d: tp = d q^2."),
    Flag("--vpp", "parallel.vpp", int, "Model chunks (virtual pipeline stages) on each rank."),
    Flag(
        "--stage-balance",
        "parallel.stage_balance",
        str,
        "Stages of equal layers (even) or of equal compute (cost).",
    ),
    Flag(
        "--order",
        "parallel.order",
        str,
        "Order of the axes over ranks, fastest-varying first: tp-cp-dp-pp.",
    ),
    Flag(
        "--sequence-parallel/--no-sequence-parallel",
        "parallel.sequence_parallel",
        bool,
        "Split the sequence over tp outside attention and MLP.",
    ),
    Flag("--zero", "parallel.zero", int, "ZeRO stage, 0 to 3."),
    Flag(
        "--allow-tp-across-nodes/--no-allow-tp-across-nodes",
        "parallel.allow_tp_across_nodes",
        bool,
        "Allow tensor-parallel groups that leave their NVLink domain (by default a node).",
    ),
    Flag(
        "--micro-batch-size",
        "training.micro_batch_size",
        int,
        "Samples that a rank computes at once.",
    ),
    Flag(
        "--global-batch-size",
        "training.global_batch_size",
        int,
        "Samples in one step, over all ranks.",
    ),
    Flag(
        "--recompute",
        "training.recompute",
        str,
        "Activation recomputation: none, selective or full.",
    ),
    Flag(
        "--dtype",
        "training.dtype",
        str,
        "Data type of parameters and activations: auto, fp32, bf16, fp16, ...",
    ),
    Flag(
        "--runtime",
        "training.runtime",
        str,
        "Software that trains the job, and whose speed and memory a plan assumes: mpctl, "
        "megatron-core, torchtitan, ...; `mpctl presets runtimes` lists them.",
    ),
    Flag("--steps", "training.steps", int, "Number of training steps."),
    Flag("--seed", "training.seed", int, "Seed of weights, data order and dropout."),
)

RuntimesOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,...",
        help="Also answer for each of these runtimes, as a table; all: for mpctl and every "
        "launcher of --emit whose figures are known.",
        show_default=False,
        autocompletion=complete.runtimes,
    ),
]


@dataclass(frozen=True)
class JobSource:
    """The job of a command line: its name or path, the settings that override it, and what there is
    to say of how it was read."""

    source: str | None
    overrides: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[Check, ...] = ()

    def plan(self, more: Mapping[str, Any] | None = None) -> Plan:
        """The legal plan; where it does not fit its devices, with the nearest layouts that do.

        more: settings that win over everything typed. Raises InputError with every issue.
        """
        from mpctl.planning.plan import load_plan

        plan = load_plan(self.source, {**self.overrides, **(more or {})})
        plan = replace(plan, checks=(*self.warnings, *plan.checks))
        if plan.fits is not False:
            return plan
        from mpctl.search.nearest import with_nearest

        return with_nearest(plan)

    def read_from(self, settings: Mapping[str, Any], warnings: Iterable[Check]) -> JobSource:
        """The job that these settings are, under those of the command line. Raises InputError where
        the command line names a job as well."""
        if self.source is not None:
            message = f"{self.source!r} is a job of its own"
            raise InputError.of("usage", "JOB", message, "leave out JOB or --from")
        return JobSource(None, {**settings, **self.overrides}, tuple(warnings))

    def with_first_word(self, words: list[str]) -> tuple[JobSource, list[str]]:
        """The same without JOB, which becomes the first word, where flags name a model and there is
        no such job: `--model gpt2 --explain time.mfu`."""
        from mpctl.spec.load import read_source

        if self.source and "model" in self.overrides:
            try:
                read_source(self.source)
            except InputError as error:
                if error.issues[0].rule == "no-such-job":
                    return self.without_source(words)
        return self, words

    def without_source(self, words: list[str]) -> tuple[JobSource, list[str]]:
        """The same without JOB, which becomes the first word, as where --from names the job."""
        return replace(self, source=None), [*([self.source] if self.source else []), *words]

    def with_default(self, setting: str, value: Any) -> JobSource:
        """The same with a setting set to `value`, unless the command line sets it."""
        return replace(self, overrides={setting: value, **self.overrides})

    def with_settings(self, settings: Mapping[str, Any]) -> JobSource:
        """The same with these settings, which override others; None leaves a setting as it is."""
        given = {setting: value for setting, value in settings.items() if value is not None}
        return replace(self, overrides={**self.overrides, **given})


def command_line(verb: str, source: str | None, settings: Mapping[str, Any]) -> str:
    """The command line `mpctl launch demo --tp 2`: a flag for each setting that has one, else
    `--set`; a setting that is None is left out."""
    flags = {flag.setting: flag for flag in FLAGS}
    words = ["mpctl", verb, *([source] if source else [])]
    for where, value in settings.items():
        flag = flags.get(where)
        if value is None:
            continue
        if flag is None or isinstance(value, dict | list):
            words += ["--set", f"{where}={_toml(value)}"]
        elif flag.type is bool:
            words.append(flag.option.split("/")[0 if value else 1])
        else:
            words += [flag.option, str(value)]
    return shlex.join(words)


def typed_command() -> str:
    """The command line of this process as a shell takes it, with the interpreter that runs it."""
    return shlex.join([sys.executable, "-m", "mpctl", *sys.argv[1:]])


def _toml(value: Any) -> str:
    """As parse_settings reads it."""
    return value if isinstance(value, str) else json.dumps(value)


FETCH_HELP = (
    "Ask Hugging Face's hub for the config.json of a model by its id (--model OWNER/MODEL) and "
    "keep it in ~/.cache/mpctl/models. Without it the hub is never asked."
)


def with_job(command: Callable[..., None]) -> Callable[..., None]:
    """Add the argument JOB, every flag and --set to a command, which receives them as `job`."""

    @wraps(command)
    def wrapper(**values: Any) -> None:
        is_fetched = values.pop("fetch")
        overrides = {f.setting: v for f in FLAGS if (v := values.pop(f.name)) is not None}
        settings = values.pop("set_") or []
        if settings:
            from mpctl.spec.load import parse_settings

            overrides.update(parse_settings(settings))
        job = JobSource(values.pop("job"), overrides)
        if is_fetched:
            from mpctl.cli.fetch import fetch_model

            fetch_model(job.source, job.overrides)
        command(job, **values)

    own = list(inspect.signature(command).parameters.values())[1:]
    hints = get_type_hints(command, include_extras=True)
    own = [p.replace(annotation=hints[p.name], kind=p.KEYWORD_ONLY) for p in own]
    flags = map(_flag_parameter, FLAGS)
    parameters = [_job_argument(), *own, *flags, _set_parameter(), _fetch_parameter()]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper


def _keyword(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _job_argument() -> inspect.Parameter:
    text = "A job file (TOML) or a job preset's name; `mpctl presets jobs` lists them."
    argument = typer.Argument(metavar="JOB", help=text, autocompletion=complete.preset_of("jobs"))
    return _keyword("job", Annotated[str | None, argument])


def _flag_parameter(flag: Flag) -> inspect.Parameter:
    option = typer.Option(
        flag.option, help=flag.help, show_default=False, rich_help_panel="Job",
        autocompletion=_completer(flag),
    )  # fmt: skip
    return _keyword(flag.name, Annotated[flag.type | None, option])


def _completer(flag: Flag) -> complete.Completer | None:
    """What completes a flag's value; presets without importing the job's models."""
    if flag.setting == "model":
        return complete.preset_of("models")
    if flag.setting == "cluster":
        return complete.preset_of("clusters")
    return None if flag.type is bool else complete.value_of(flag.setting)


def _fetch_parameter() -> inspect.Parameter:
    option = typer.Option("--fetch", help=FETCH_HELP, rich_help_panel="Job")
    return _keyword("fetch", Annotated[bool, option], default=False)


def _set_parameter() -> inspect.Parameter:
    option = typer.Option(
        "--set",
        metavar="KEY=VALUE",
        rich_help_panel="Job",
        autocompletion=complete.setting,
        help="Any setting of the job, such as dropout=0.1 or training.dropout=0.1; repeatable.",
    )
    return _keyword("set_", Annotated[list[str] | None, option])
