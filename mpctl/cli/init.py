"""`mpctl init`: a commented job file, from flags or from a few questions."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mpctl.cli import complete
from mpctl.cli.options import FETCH_HELP
from mpctl.core.errors import InputError
from mpctl.core.units import TOKENS, plural

if TYPE_CHECKING:
    from mpctl.render.job_file import JobFile
    from mpctl.spec.cluster import ClusterSpec
    from mpctl.spec.model import ModelSpec


DEFAULT_PATH = Path("job.toml")
CPU_STEPS, GPU_STEPS = 100, 1000
ABOUT = (
    "A job for mpctl. Every key is listed with its bounds in docs/reference.md; a flag or",
    "--set KEY=VALUE overrides one for a single command.",
)
EXAMPLES = "megatron-bridge-26.06, nemo:26.06, megatron-core-0.16"
SAMPLES_PER_GPU = 4  # so that every dp divides the batch, and gradients may be accumulated


def _option(text: str, completer: complete.Completer | None = None) -> Any:
    return typer.Option(help=text, show_default=False, autocompletion=completer)


ClusterOption = Annotated[str | None, _option("A cluster preset, by name or file.", complete.preset_of("clusters"))]
ModelOption = Annotated[
    str | None,
    _option(
        "A model preset, by name, file or id on Hugging Face's hub; or a config.json.", complete.preset_of("models")
    ),
]
FamilyOption = Annotated[
    str | None, _option("Instead of --model: a small model of this family.", complete.value_of("model.family"))
]
RuntimeOption = Annotated[
    str | None,
    _option(
        f"Software that will train the model: mpctl, megatron-core, torchtitan, ...; or its release: {EXAMPLES}.",
        complete.preset_of("runtimes"),
    ),
]
SchedulerOption = Annotated[
    Literal["slurm", "ssh", "kubernetes"] | None,
    _option("Where `mpctl launch` will start ranks; by default on this host."),
]


def init(
    path: Annotated[
        Path | None, typer.Argument(metavar="[PATH]", help="The job file to write.", show_default="job.toml")
    ] = None,
    cluster: ClusterOption = None,
    nodes: Annotated[str | None, _option("Number of nodes (hosts).")] = None,
    gpus_per_node: Annotated[str | None, _option("GPUs, and so ranks, on each node.")] = None,
    model: ModelOption = None,
    family: FamilyOption = None,
    runtime: RuntimeOption = None,
    global_batch_size: Annotated[str | None, _option("Samples in one step.")] = None,
    steps: Annotated[str | None, _option("Number of training steps.")] = None,
    tokens: Annotated[str | None, _option("Instead of --steps: tokens to train on, such as 300B.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file, if there is one.")] = False,
    on: SchedulerOption = None,
    fetch: Annotated[bool, typer.Option("--fetch", help=FETCH_HELP)] = False,
) -> None:
    """Write a commented job file, with the layout that mpctl search finds.

    In a terminal it asks for what no flag sets; otherwise it uses defaults and prints them.
    """
    path = DEFAULT_PATH if path is None else path
    _require_writable(path, overwrite=overwrite)
    exclusive = {"--model": model, "--family": family}, {"--steps": steps, "--tokens": tokens}
    for flags in exclusive:
        if None not in flags.values():
            raise InputError.of("usage", " ".join(flags), "exclude each other", "use one of them")
    if fetch:
        from mpctl.cli.fetch import fetch_model

        fetch_model(None, {"model": model})
    answers = Answers(
        {
            "cluster": cluster,
            "nodes": nodes,
            "GPUs per node": gpus_per_node,
            "model": model or family,
            "runtime": runtime,
            "global batch size": global_batch_size,
            "length": steps or (tokens and f"{tokens} tokens"),
        },
        asks=sys.stdin.isatty() and sys.stderr.isatty(),
    )
    from mpctl.render.job_file import job_text, print_written

    file = _file(answers, path, on, is_family=family is not None)
    _write(path, job_text(file), overwrite=overwrite)
    print_written(path, answers.rows, file)


def _file(answers: Answers, path: Path, on: str | None, *, is_family: bool) -> JobFile:
    """The job file for the answers. Raises InputError and DoesNotFit."""
    from mpctl.cli.init_launch import launch_part
    from mpctl.cli.init_layout import choose_layout
    from mpctl.plan.planning.plan import load_plan
    from mpctl.render.job_file import JobFile
    from mpctl.spec.figure_sources import sources_text

    cluster, settings = _ask_machines(answers)
    shape = _ask_model(answers, cluster, settings, is_family=is_family)
    _ask_runtime(answers, cluster, settings)
    per_step = _ask_training(answers, cluster, settings, shape.tokens_per_sample)
    chosen = choose_layout(settings)
    answers.rows.append(("layout", chosen.why))
    if chosen.figures_from:
        answers.rows.append(("figures", sources_text(chosen.figures_from)))
    reasons = {
        "cluster": f"The machines. The preset has {size_text(cluster)}.",
        "cluster.preset": "a name of `mpctl presets clusters`, or a file",
        "model": f"The model: {shape.family}, {shape.layers} layers of hidden size {shape.hidden}. "
        "Other keys of this table change the preset's.",
        "model.preset": "a name of `mpctl presets models`, an id of Hugging Face's hub, or a file",
        "model.seq_length": f"tokens of a sample; the config's longest: {shape.max_positions}",
        "parallel": f"The layout: {chosen.why}.",
        "training.runtime": "the software that trains; `mpctl presets runtimes` lists it",
        "training.steps": f"steps, of {per_step:,} tokens each",
    }
    settings |= chosen.settings
    part = launch_part(load_plan(None, settings), path, on)
    settings |= part.settings
    settings = _ordered(settings, path)
    return JobFile(ABOUT, settings, reasons | part.reasons, part.commands, part.stops, part.examples)


def _ask_machines(answers: Answers) -> tuple[ClusterSpec, dict[str, Any]]:
    """The cluster, and its settings in the job."""
    about = "The machines: a cluster preset, by name or file; `mpctl presets clusters` lists them."
    name, cluster = answers.take("cluster", "this-machine", about, read_cluster)
    about = f"{name} has {size_text(cluster)}."
    nodes = answers.take("nodes", str(cluster.nodes), about, read_count("nodes"))
    default = str(cluster.gpus_per_node or 8)
    gpus = answers.take("GPUs per node", default, "On each node:", read_count("GPUs per node"))
    return cluster, {"cluster": name, "cluster.nodes": nodes, "cluster.gpus_per_node": gpus}


def _ask_model(answers: Answers, cluster: ClusterSpec, settings: dict[str, Any], *, is_family: bool) -> ModelSpec:
    """The shape of the model, added to the settings together with the data type to train in."""
    from mpctl.plan.rules.model import is_longest
    from mpctl.spec.job import auto_dtype
    from mpctl.spec.load import load_job

    about = "The model: a preset, by name, id or file (`mpctl presets models`), or a family."
    default = "demo-gpt" if _is_cpu(cluster) else "llama-3-8b"
    settings["model"] = answers.take("model", default, about, lambda text: read_model(text, is_family=is_family))
    settings["training.dtype"] = auto_dtype(cluster.device)
    shape = load_job(None, settings).model
    assert shape is not None, "it was read"
    if not is_longest(shape):
        return shape
    about = f"The config reads up to {shape.seq_length:,} tokens. Tokens of a sample in training:"
    length = answers.take("sequence length", str(shape.seq_length), about, _read_length_of(shape))
    name, said = answers.rows.pop()
    answers.rows.append((name, f"{said}, of the config's {shape.max_positions}"))
    settings["model.seq_length"] = length
    return shape.model_copy(update={"seq_length": length})


def _ask_runtime(answers: Answers, cluster: ClusterSpec, settings: dict[str, Any]) -> None:
    """The software that trains; asked for where there are GPUs, and written to the job only if
    chosen."""
    from mpctl.spec.releases import preset_named
    from mpctl.spec.training import DEFAULT_RUNTIME

    if answers.is_given("runtime") or (answers.asks and not _is_cpu(cluster)):
        about = "The software that trains it, and that the layout is chosen for:"
        about = f"{about} {DEFAULT_RUNTIME}, {_runtimes(cluster)}; or its release: {EXAMPLES}."
        runtime = answers.take("runtime", DEFAULT_RUNTIME, about, _read_runtime)
        named = settings["training.runtime"] = (
            runtime if answers.is_given("runtime") else with_release(answers, runtime)
        )
        preset = preset_named(named, cluster.device.peak_flops if cluster.device else None)
        answers.rows += [("planned as", preset)] if preset != named else []
    elif not _is_cpu(cluster):
        answers.rows.append(("runtime", f"{DEFAULT_RUNTIME} (default); or {_runtimes(cluster)}"))


def _runtimes(cluster: ClusterSpec) -> str:
    from mpctl.plan.planning.runtimes import runtimes_of_today

    assert cluster.device is not None, "read_cluster refuses it"
    return ", ".join(runtimes_of_today(cluster, cluster.device.kind))


def _read_runtime(text: str) -> str:
    from mpctl.spec.releases import preset_named
    from mpctl.spec.runtime import get_profile

    get_profile(preset_named(text))
    return text


def with_release(answers: Answers, runtime: str) -> str:
    """The release of software whose releases have several presets, asked for; another runtime unchanged."""
    from mpctl.spec.releases import releases

    known = next((software for software in releases() if runtime in software.names), None)
    if known is None or len(known.first) == 1:
        return runtime
    about = f"Its release decides the figures: {' or '.join(known.first)} and later, up to {known.latest}."
    release = answers.take("release", known.latest, about, lambda text: _read_runtime(f"{runtime}-{text}"))
    return str(release)


def _read_length_of(shape: ModelSpec) -> Callable[[str], int]:
    """A reader of the tokens of a sample, at most as many as the model's config allows."""

    def read(text: str) -> int:
        if (length := read_count("sequence length")(text)) <= shape.max_positions:
            return length
        message = f"{length:,} is more than the config's {shape.max_positions:,}"
        raise InputError.of("bad-value", "sequence length", message, "for example 8192")

    return read


def _ask_training(answers: Answers, cluster: ClusterSpec, settings: dict[str, Any], sample: int) -> int:
    """Tokens of a step. Batch and steps are added to the settings; sample: tokens of a sample."""
    gpus = settings["cluster.nodes"] * settings["cluster.gpus_per_node"]
    about = f"{plural(gpus, 'GPU')}; a sample has {sample:,} tokens."
    default = str(SAMPLES_PER_GPU * gpus)
    batch = answers.take("global batch size", default, about, read_count("global batch size"))
    per_step = int(batch * sample)
    about = f"How long to train: steps of {per_step:,} tokens, or tokens as in `300B tokens`."
    default = f"{CPU_STEPS if _is_cpu(cluster) else GPU_STEPS} steps"
    steps = answers.take("length", default, about, lambda text: read_length(text, per_step))
    settings |= {"training.global_batch_size": batch, "training.steps": steps}
    return per_step


def _is_cpu(cluster: ClusterSpec) -> bool:
    return cluster.device is not None and cluster.device.is_cpu


def _ordered(settings: dict[str, Any], path: Path) -> dict[str, Any]:
    """The settings in the order of a job file; the paths of presets relative to it."""
    from mpctl.spec.paths import is_hub_id, is_path

    def named(name: str, *, is_model: bool = False) -> str:
        if not is_path(name) or (is_model and is_hub_id(name)):
            return name
        relative = os.path.relpath(name, path.parent)
        return relative if is_path(relative) else f"./{relative}"

    rest = {name: value for name, value in settings.items() if name not in ("cluster", "model")}
    ordered = {"name": path.stem, "cluster.preset": named(settings["cluster"])}
    ordered |= {name: rest.pop(name) for name in ("cluster.nodes", "cluster.gpus_per_node")}
    ordered["model.preset"] = named(settings["model"], is_model=True)
    tables = sorted(rest, key=lambda name: (name[:5] != "paral", name.rpartition(".")[0]))  # parallel first
    ordered |= {name: rest[name] for name in tables}
    return ordered


def _require_writable(path: Path, *, overwrite: bool) -> None:
    """Raises InputError, before any question, where the file could not be written."""
    if path.suffix != ".toml" or not path.name.isprintable():
        raise InputError.of(
            "bad-path", "PATH", f"{str(path)!r} is no name of a TOML file", f"for example {DEFAULT_PATH}"
        )
    if not path.parent.is_dir():
        raise InputError.of("no-such-folder", "PATH", f"there is no folder {path.parent}", "make it")
    if path.is_dir() or (os.path.lexists(path) and not overwrite):
        hint = "name another file" + (", or use --overwrite" if path.is_file() else "")
        raise InputError.of("file-exists", "PATH", f"{path} is there already", hint)


def _write(path: Path, text: str, *, overwrite: bool) -> None:
    """Write the file completely or not at all. Raises InputError where it cannot be written, or was
    created after `_require_writable`."""
    from mpctl.core.durable import write_whole

    _require_writable(path, overwrite=overwrite)
    try:
        write_whole(path, text)
    except OSError as error:
        message = f"{path}: {error.strerror or error}"
        raise InputError.of("unwritable", "PATH", message, "name another file") from None


MOST = 2**31 - 1  # the largest count in a job


@dataclass
class Answers:
    """The answers so far, from flags, typed input or defaults.

    given: the flags' texts by the name of the question; rows: what was chosen, and whether by
    the user or by default.
    """

    given: dict[str, str | None]
    asks: bool
    rows: list[tuple[str, str]] = field(default_factory=list)

    def is_given(self, name: str) -> bool:
        """Whether a flag answers the question."""
        return self.given.get(name) is not None

    def take(self, name: str, default: str, about: str, read: Callable[[str], Any]) -> Any:
        """The answer to a question. read: converts a text, or raises InputError, after which the
        question is asked again. about: printed before the question."""
        text = self.given.get(name)
        is_given = text is not None
        if text is not None:
            value = read(text)
        elif not self.asks:
            text, value = default, read(default)
        else:
            text, value = self._asked(name, default, about, read)
        self.rows.append((name, text if is_given or text != default else f"{text} (default)"))
        return value

    def _asked(self, name: str, default: str, about: str, read: Callable[[str], Any]) -> tuple[str, Any]:
        from mpctl.render.console import say
        from mpctl.render.output import print_issues

        say(about, stderr=True)
        while True:
            print(f"{name} [{default}]: ", end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
            if not line:  # Ctrl-D
                raise InputError.of("no-answer", name, "the answers ended", "give flags instead")
            text = line.strip() or default
            try:
                return text, read(text)
            except InputError as error:
                print_issues(list(error.issues), wants_json=False)


def read_cluster(text: str) -> tuple[str, ClusterSpec]:
    """A cluster preset with a device, and its name."""
    from mpctl.spec.load import load_job

    cluster = load_job(None, {"cluster": text}).cluster
    if cluster.device is None:
        raise InputError.of(
            "no-device", "cluster", f"{text} names no device", "use another preset, or add device = ... to the file"
        )
    return text, cluster


def size_text(cluster: ClusterSpec) -> str:
    """The machines in words: `32 nodes of 8 NVIDIA H100, 79.6 GiB each`."""
    from mpctl.core.units import bytes_text

    device = cluster.device
    of = f" {device.name}, {bytes_text(device.memory_bytes)} each" if device else " GPUs"
    return f"{plural(cluster.nodes, 'node')} of {cluster.gpus_per_node or 'any number of'}{of}"


def read_model(text: str, *, is_family: bool) -> str:
    """A model preset's name or file; for a family, its small preset. Raises InputError."""
    from mpctl.spec.families import family_names
    from mpctl.spec.load import load_job
    from mpctl.spec.presets import find_preset, preset_names

    if is_family or (text in family_names() and text not in preset_names("models")):
        small = (name for name in preset_names("models") if name.startswith("demo-"))
        found = next((n for n in small if (find_preset("models", n) or {}).get("family") == text), "")
        if not found:
            hint = f"use {', '.join(family_names())}; or --model with a file of its shape"
            message = f"there is no small preset of a family {text!r}"
            raise InputError.of("unknown-family", "--family", message, hint)
        return found
    load_job(None, {"model": text})
    return text


def read_count(name: str) -> Callable[[str], int]:
    """A reader of an integer from 1 up. name: the setting that it counts."""

    def read(text: str) -> int:
        if text.isascii() and text.isdigit() and 1 <= int(text[:12]) <= MOST and len(text) <= 12:
            return int(text)
        message = f"{text[:20]!r} is not a whole number from 1 to {MOST:,}"
        raise InputError.of("bad-value", name, message, "for example 8")

    return read


def read_length(text: str, per_step: int) -> int:
    """Steps from `1000`, `1000 steps` or `300B tokens`; tokens are rounded up to full steps."""
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)([kMBT]?)(?: (steps|tokens))?", text, re.ASCII)
    amount = float(found[1]) * float(TOKENS.units[found[2]]) if found else 0
    steps = -(-amount // per_step) if found and found[3] == "tokens" else amount
    if not 1 <= steps <= MOST or steps != int(steps):
        message = f"{text[:20]!r} is no number of steps or tokens"
        raise InputError.of("bad-value", "length", message, "for example 1000 steps, or 300B tokens")
    return int(steps)
