"""The options that several commands share, mainly those for settings of a job.

Flags are for settings that people often vary; `--set parallel.order=...` reaches all others.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_type_hints

import typer
from typer.models import ArgumentInfo

from mpctl.cli import complete
from mpctl.cli.own_help import JOB, JOB_RARE
from mpctl.core.axes import AXES
from mpctl.core.errors import InputError
from mpctl.interop.registry import SOURCES

if TYPE_CHECKING:
    from mpctl.plan.planning.plan import Plan
    from mpctl.plan.rules.check import Check


AsJsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run's directory, or its name in runs/.", autocompletion=complete.run)
]
OtherOwnerOption = Annotated[
    bool, typer.Option("--allow-other-owner", help="Accept a run directory that others own or can write.")
]
FETCH_HELP = (
    "Download the config.json of a model by its id (--model OWNER/MODEL) from Hugging Face's hub "
    "to ~/.cache/mpctl/models. Without this option the hub is never contacted."
)


class Flag(NamedTuple):
    """An option, such as `--micro-batch-size`, and the setting that it overrides. is_rare: few jobs need it."""

    option: str
    setting: str
    type: Any
    help: str
    is_rare: bool = False

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
        "--model", "model", str, "A model preset: its name, its file or its id on Hugging Face's hub; or a config.json."
    ),
    *(Flag(f"--{axis.name}", f"parallel.{axis.name}", int, f"{axis.size.capitalize()}.") for axis in AXES),
    Flag("--ep", "parallel.ep", int, "Expert-parallel size: ranks that share the experts of a layer."),
    Flag("--etp", "parallel.etp", int, "Expert-tensor-parallel size: ranks that share each expert.", True),
    Flag(
        "--tensor-mode",
        "parallel.tensor_mode",
        str,
        "How tp splits matrices: over a row of ranks (1d), a square (2d), layers of squares (2.5d) or a cube (3d).",
        True,
    ),
    Flag("--tensor-depth", "parallel.tensor_depth", int, "Number d of layers in 2.5d: tp = d q^2.", True),
    Flag("--vpp", "parallel.vpp", int, "Model chunks (virtual pipeline stages) on each rank."),
    Flag("--stage-balance", "parallel.stage_balance", str, "Stages of equal layers (even) or of equal compute (cost)."),
    Flag(
        "--pipeline-layout",
        "parallel.pipeline_layout",
        str,
        "What each virtual stage has, in Megatron's words: Et*3|(tt|)*29,m|L.",
    ),
    Flag(
        "--order",
        "parallel.order",
        str,
        "Order of the axes over ranks, fastest-varying first: tp-cp-dp-pp, or tp-cp-ep-dp-pp.",
    ),
    Flag(
        "--sequence-parallel/--no-sequence-parallel",
        "parallel.sequence_parallel",
        bool,
        "Split the sequence over tp outside attention and MLP.",
    ),
    Flag("--zero", "parallel.zero", int, "ZeRO stage, 0 to 3."),
    Flag("--zero-size", "parallel.zero_size", int, "Ranks that divide ZeRO's states (HSDP)."),
    Flag(
        "--allow-tp-across-nodes/--no-allow-tp-across-nodes",
        "parallel.allow_tp_across_nodes",
        bool,
        "Allow tensor-parallel groups that leave their NVLink domain (by default a node).",
    ),
    Flag("--micro-batch-size", "training.micro_batch_size", int, "Samples in one micro batch of a replica."),
    Flag("--global-batch-size", "training.global_batch_size", int, "Samples in one step, over all ranks."),
    Flag("--seq-length", "model.seq_length", int, "Tokens of one sample."),
    Flag("--recompute", "training.recompute", str, "Activation recomputation: none, selective or full."),
    Flag("--dtype", "training.dtype", str, "Data type of parameters and activations: auto, fp32, bf16, fp16, ..."),
    Flag(
        "--runtime",
        "training.runtime",
        str,
        "Software that trains the job; a plan assumes its speed and memory: mpctl, megatron-core, "
        "torchtitan, ..., or a release: megatron-bridge-26.06, nemo:26.06; `mpctl presets runtimes` lists them.",
    ),
    Flag("--steps", "training.steps", int, "Number of training steps."),
    Flag(
        "--price",
        "cluster.operations.price_per_gpu_hour",
        float,
        "Price of a GPU-hour; costs are in the same currency.",
    ),
    Flag("--seed", "training.seed", int, "Seed of weights, data order and dropout.", True),
)

RuntimesOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,...",
        help="Also show a table with the estimate for each of these runtimes; all: mpctl and "
        "every launcher of --emit whose figures are known.",
        show_default=False,
        autocompletion=complete.runtimes,
    ),
]

TokensOption = Annotated[
    str | None,
    typer.Option(
        metavar="AMOUNT",
        help="Also show a run of so many tokens, such as 15T: days, GPU-hours, price, energy, "
        "failures, the best checkpoint interval.",
        show_default=False,
    ),
]


class JobSource(NamedTuple):
    """The job of a command line: its name or path, the settings that override it, and warnings from
    reading it.

    typed: the overrides that were typed, where --from gives others; read: the launcher and the text of
    --from; word: JOB beside --from, a word of the command; counts: of --gpus, where a search takes them.
    """

    source: str | None
    overrides: Mapping[str, Any] = MappingProxyType({})
    warnings: tuple[Check, ...] = ()
    typed: Mapping[str, Any] | None = None
    read: tuple[str, str] | None = None
    word: str | None = None
    counts: str | None = None

    def plan(self, more: Mapping[str, Any] | None = None) -> Plan:
        """The legal plan; if it does not fit its devices, with the nearest layouts that do.

        more: settings that win over everything typed. Raises InputError with every issue.
        """
        from dataclasses import replace

        from mpctl.plan.planning.plan import load_plan

        plan = load_plan(self.source, {**self.overrides, **(more or {})})
        plan = replace(plan, checks=(*self.warnings, *plan.checks))
        if plan.fits is not False:
            return plan
        from mpctl.plan.search.nearest import with_nearest

        return with_nearest(plan)

    def with_words(self, words: list[str] | None) -> list[str]:
        """The words of a command that takes words after JOB: the one typed as JOB beside --from is the first."""
        return [*([self.word] if self.word else []), *(words or [])]

    def with_first_word(self, words: list[str]) -> tuple[JobSource, list[str]]:
        """The same without JOB, which becomes the first word, where flags name a model and there is
        no such job: `mpctl explain time.mfu --model gpt2`."""
        from mpctl.spec.load import read_source

        if self.source and self.model_name:
            try:
                read_source(self.source)
            except InputError as error:
                if error.issues[0].rule == "no-such-job":
                    return self._replace(source=None), [self.source, *words]
        return self, words

    @property
    def model_name(self) -> str | None:
        """The model that options name, or that they make key by key; None where they say nothing of a model."""
        named = self.overrides.get("model", self.overrides.get("model.preset"))
        if isinstance(named, Mapping):
            named = named.get("preset")
        is_made = any(key.split(".")[0] == "model" for key in self.overrides)
        return str(named) if named else "the job" if is_made else None

    @property
    def own(self) -> Mapping[str, Any]:
        """The overrides that were typed."""
        return self.overrides if self.typed is None else self.typed

    @property
    def others(self) -> Mapping[str, Any]:
        """The overrides that --from gives."""
        return {key: value for key, value in self.overrides.items() if key not in self.own}

    def line(self, verb: str, settings: Mapping[str, Any] | None = None) -> str:
        """The command line of a verb for the job with other settings, by default those typed."""
        return command_line(verb, self.source, self.own if settings is None else settings, self.read)

    def with_default(self, setting: str, value: Any) -> JobSource:
        """The same with a setting set to `value`, unless the command line sets it."""
        return self._replace(overrides={setting: value, **self.overrides})

    def with_settings(self, settings: Mapping[str, Any]) -> JobSource:
        """The same with these settings, which override others; None leaves a setting unchanged."""
        given = {setting: value for setting, value in settings.items() if value is not None}
        return self._replace(overrides={**self.overrides, **given})


def command_line(
    verb: str, source: str | None, settings: Mapping[str, Any], read: tuple[str, str] | None = None
) -> str:
    """The command line `mpctl launch demo --tp 2`: a flag for each setting that has one, else
    `--set`, which also removes one that is None. read: of --from."""
    from mpctl.spec.load import UNSET

    flags = {flag.setting: flag for flag in FLAGS}
    words = ["mpctl", verb, *([source] if source else []), *(["--from", *read] if read else [])]
    if settings.get(KIND) in KINDS and isinstance(settings.get(RANK), int):
        words += [f"--{settings[KIND]}", str(settings[RANK])]
        settings = {where: value for where, value in settings.items() if where not in (KIND, RANK)}
    for where, value in settings.items():
        flag = flags.get(where)
        if value is None:
            words += ["--set", f"{where}={UNSET}"]
        elif flag is None or isinstance(value, dict | list):
            words += ["--set", f"{where}={_toml(value)}"]
        elif flag.type is bool:
            words.append(flag.option.split("/")[0 if value else 1])
        else:
            words += [flag.option, str(value)]
    return shlex.join(words)


def typed_command() -> str:
    """The command line of this process, quoted for a shell, with its interpreter."""
    return shlex.join([sys.executable, "-m", "mpctl", *sys.argv[1:]])


def _toml(value: Any) -> str:
    """The value in the form that parse_settings reads: a string is quoted where it would be read as another value."""
    from mpctl.spec.load import parse_settings

    if isinstance(value, str) and parse_settings([f"key={value}"])["key"] == value:
        return value
    return _inline(value)


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_inline(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    return json.dumps(value)


Command = Callable[..., None]


def with_value(name: str, parameters: Iterable[Parameter], make: Callable[..., Any]) -> Callable[[Command], Command]:
    """Pass to a command, as its argument `name`, the value that `make` builds from shared
    parameters: arguments come before the command's own, options after them."""
    shared = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in parameters]
    arguments = [p for p in shared if isinstance(p.annotation.__metadata__[0], ArgumentInfo)]
    options = [p for p in shared if p not in arguments]

    def decorate(command: Command) -> Command:
        @wraps(command)
        def wrapper(**values: Any) -> None:
            made = make(**{p.name: values.pop(p.name) for p in shared})
            command(**{name: made}, **values)

        hints = get_type_hints(command, include_extras=True)
        own = [
            p.replace(annotation=hints[p.name], kind=Parameter.KEYWORD_ONLY)
            for p in signature(command).parameters.values()
            if p.name != name
        ]
        every = [*arguments, *own, *options]
        wrapper.__signature__ = Signature(every)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in every}
        return wrapper

    return decorate


def with_job(
    command: Command | None = None, *, takes_words: bool = False, takes_counts: bool = False
) -> Callable[..., Any]:
    """Add the argument JOB, every flag, --from, --gpus, --set and --fetch to a command, which
    receives them as `job`. takes_words: JOB beside --from is a word of the command; takes_counts:
    --gpus may name several counts, or counts alone."""
    make = partial(job_source, takes_words=takes_words, takes_counts=takes_counts)
    decorate = with_value("job", _job_parameters(), make)
    return decorate if command is None else decorate(command)


def describe_job(job: JobSource) -> None:
    """The job that a command plans, searches or trains: a file or preset, and options that override it.

    Without JOB the options make the job. Every setting has a name for --set; docs/reference.md lists them.
    """  # shown by `mpctl help job`


def job_source(
    job: str | None,
    set_: list[str] | None,
    from_: tuple[str, str] | None = None,
    gpus: str | None = None,
    *,
    lora: int | None = None,
    qlora: int | None = None,
    fetch: bool,
    takes_words: bool = False,
    takes_counts: bool = False,
    **flags: Any,
) -> JobSource:
    """The job of a command line. fetch: download its model's config.json first."""
    overrides = {f.setting: v for f in FLAGS if (v := flags[f.name]) is not None}
    if set_:
        from mpctl.spec.load import parse_settings

        overrides |= parse_settings(set_)
    if lora is not None or qlora is not None:
        overrides = {**_adapter(lora, qlora), **overrides}
    made = JobSource(job, overrides)
    if gpus is not None:
        made = _on_gpus(made, gpus, takes_counts=takes_counts)
    if fetch:
        from mpctl.cli.fetch import fetch_model

        fetch_model(job, overrides)
    return made if from_ is None else _read_from(made, *from_, takes_words=takes_words)


KINDS = ("lora", "qlora")
KIND, RANK = "training.adapter.kind", "training.adapter.rank"


def _adapter(lora: int | None, qlora: int | None) -> Mapping[str, Any]:
    """The settings of --lora and --qlora. Raises InputError where both are given."""
    if lora is not None and qlora is not None:
        raise InputError.of("given-twice", "--lora", f"{lora} is given with --qlora {qlora}", "leave one of them out")
    return {KIND: "lora", RANK: lora} if qlora is None else {KIND: "qlora", RANK: qlora}


def _on_gpus(job: JobSource, text: str, *, takes_counts: bool) -> JobSource:
    """The job on the GPUs that --gpus names. Raises InputError."""
    from mpctl.plan.rules.check import Check
    from mpctl.spec.gpus import cluster_of, read_gpus
    from mpctl.spec.load import load_partial

    if takes_counts and text == "all":
        return job._replace(counts=text)
    gpus = read_gpus(text)
    if len(gpus.counts) > 1 and not takes_counts:
        message = f"{text!r} has {len(gpus.counts)} counts, and only a search compares them"
        raise InputError.of("bad-gpus", "--gpus", message, f"give one, or use mpctl search --gpus {text}")
    if gpus.settings:
        if given := [key for key in ("cluster", "cluster.nodes", "cluster.gpus_per_node") if key in job.overrides]:
            option = f"--{given[0].rsplit('.', 1)[-1].replace('_', '-')}"
            raise InputError.of("given-twice", option, f"is given with --gpus {text}", "leave one of them out")
        counts = ",".join(map(str, gpus.counts)) if len(gpus.counts) > 1 else None
        hint = "--cluster NAME for others"
        notes = (Check("gpus-assumed", "warning", "--gpus", gpus.assumed, hint),) if "assumed" in gpus.assumed else ()
        return job._replace(overrides={**gpus.settings, **job.overrides}, warnings=notes, counts=counts)
    if takes_counts:
        return job._replace(counts=text)
    loaded = load_partial(job.source, job.overrides).job
    if loaded is None or loaded.cluster.gpus_per_node is None or loaded.cluster.device is None:
        hint = f"name it: --gpus {text}xh100, or --cluster NAME with it"
        raise InputError.of("bad-gpus", "--gpus", f"{text} GPUs of which device is not known", hint)
    return job.with_settings(cluster_of(gpus.counts[0], loaded.cluster.gpus_per_node))


def _read_from(job: JobSource, launcher: str, text: str, *, takes_words: bool) -> JobSource:
    """The job of another launcher's flags, overridden by those typed. Raises InputError where the
    command line names a job as well, and takes no other words."""
    from mpctl.interop.command_line import read_flags

    if job.source is not None and not takes_words:
        raise InputError.of("usage", "JOB", f"{job.source!r} is a job of its own", "leave out JOB or --from")
    read = read_flags(launcher, text, job.overrides)
    of_model = {name for name in (*read.settings, *job.overrides) if name.split(".")[0] == "model"}
    if launcher == "trl" and not of_model - {"model.seq_length", "model.attention"}:
        raise InputError.of("trl-model", "--from", "no model found in the script", "add --model X")
    return job._replace(
        source=None,
        overrides={**read.settings, **job.overrides},
        warnings=(*job.warnings, *read.warnings),
        typed=job.overrides,
        read=(launcher, text),
        word=job.source,
    )


_LORA = typer.Option(
    "--lora",
    metavar="RANK",
    help="Train LoRA adapters of this rank on all linear layers; other targets: --set training.adapter.targets=...",
    show_default=False,
    rich_help_panel=JOB,
)
_QLORA = typer.Option(
    "--qlora",
    metavar="RANK",
    help="The same over a base in 4 bits (nf4, double quantisation).",
    show_default=False,
    rich_help_panel=JOB,
)
_GPUS = typer.Option(
    "--gpus",
    metavar="NxDEVICE",
    help="GPUs by count and device, with typical nodes and links: 64xh100, 8xrtx-4090; a count alone where "
    "the cluster is named. A search also takes counts to compare: 32,64,128 or 32,64,128xh100; all: powers of two.",
    show_default=False,
    rich_help_panel=JOB,
)
_FROM = typer.Option(
    "--from",
    metavar="NAME TEXT",
    help="Read the job from another launcher's script, command line or config: --from megatron @train.sh "
    f'(@FILE: a file, -: stdin, or its text: "--num-layers 24 ..."); {", ".join(SOURCES)}.',
    show_default=False,
    rich_help_panel=JOB,
)


def _job_parameters() -> Iterable[Parameter]:
    text = "A job file (TOML), a job preset's name, or - for a job on standard input; `mpctl "
    text += "presets jobs` lists the presets."
    argument = typer.Argument(metavar="JOB", help=text, autocompletion=complete.preset_of("jobs"))
    yield _parameter("job", Annotated[str | None, argument])
    for flag in FLAGS:
        option = typer.Option(
            flag.option,
            help=flag.help,
            show_default=False,
            rich_help_panel=JOB_RARE if flag.is_rare else JOB,
            autocompletion=_completer(flag),
        )
        yield _parameter(flag.name, Annotated[flag.type | None, option])
    yield _parameter("lora", Annotated[int | None, _LORA])
    yield _parameter("qlora", Annotated[int | None, _QLORA])
    yield _parameter("gpus", Annotated[str | None, _GPUS])
    yield _parameter("from_", Annotated[tuple[str, str] | None, _FROM])
    text = "Any setting of the job, such as dropout=0.1 or training.dropout=0.1; repeatable."
    option = typer.Option("--set", metavar="KEY=VALUE", rich_help_panel=JOB, autocompletion=complete.setting, help=text)
    yield _parameter("set_", Annotated[list[str] | None, option])
    option = typer.Option("--fetch", help=FETCH_HELP, rich_help_panel=JOB)
    yield _parameter("fetch", Annotated[bool, option], default=False)


def _parameter(name: str, annotation: Any, default: Any = None) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _completer(flag: Flag) -> complete.Completer | None:
    """Return the completion of a flag's value; presets without importing the job's models."""
    if flag.setting == "model":
        return complete.preset_of("models")
    if flag.setting == "cluster":
        return complete.preset_of("clusters")
    return None if flag.type is bool else complete.value_of(flag.setting)
