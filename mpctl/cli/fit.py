"""`mpctl fit`: whether a fine-tuning fits, how fast it is, what it costs, what to type."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mpctl.cli import complete
from mpctl.cli.options import FETCH_HELP, AsJsonOption, command_line
from mpctl.core.errors import DOES_NOT_FIT, InputError

if TYPE_CHECKING:
    from mpctl.plan.fit.choice import FitChoice
    from mpctl.plan.fit.document import FitDocument
    from mpctl.plan.fit.methods import MethodName
    from mpctl.plan.fit.request import FitData

HUB_PAGE = "https://huggingface.co/"
ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A model preset, an id on Hugging Face's hub, or a config.json; `mpctl presets models` lists the presets.",
        autocompletion=complete.preset_of("models"),
    ),
]
GpusOption = Annotated[
    str,
    typer.Option(
        "--gpus",
        metavar="NxDEVICE",
        help="Your GPUs: 1xrtx-4090, 4xa100-80gb, 64xh100; any: the fewest of each device on which it fits.",
        autocompletion=complete.gpus,
    ),
]
PriceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--price",
        metavar="GPU=HOURLY",
        help="Price of a GPU-hour, in any currency: a100-80gb=1.8; repeatable. The number alone: of --gpus.",
    ),
]
MethodOption = Annotated[
    str | None,
    typer.Option(
        "--method",
        metavar="full|lora|qlora",
        help="Plan only this; all three by default.",
        show_default=False,
        autocompletion=lambda incomplete: [one for one in ("full", "lora", "qlora") if one.startswith(incomplete)],
    ),
]
TargetsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--targets", help="Products with an adapter: all-linear, attention, mlp, or q_proj,v_proj; repeatable."
    ),
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        help="A cluster preset, its name or its file, of which --gpus has the number.",
        show_default=False,
        autocompletion=complete.preset_of("clusters"),
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any other setting of the job, such as training.adapter.dropout=0.1; repeatable.",
        autocompletion=complete.setting,
    ),
]
SaveOption = Annotated[
    Path | None, typer.Option("--save", metavar="FILE", help="Write the answer as a job file, for plan and emit.")
]
HtmlOption = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write an HTML page.")]


def fit(
    model: ModelArgument,
    gpus: GpusOption = "any",
    samples: Annotated[
        str | None, typer.Option(metavar="AMOUNT", help="Samples of the data: 50000, 20k.", show_default=False)
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the samples; 3 by default.")] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="AMOUNT", help="Tokens of the whole training, instead of --samples: 50M.")
    ] = None,
    seq_length: Annotated[
        int | None, typer.Option(help="Tokens of a row; 2048 by default, or all that the model reads.")
    ] = None,
    mean_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a sample if all had this length: samples are packed into rows. "
            "Of unequal ones attention needs the mean weighted by tokens, sum n^2 / sum n."
        ),
    ] = None,
    price: PriceOption = None,
    method: MethodOption = None,
    rank: Annotated[int, typer.Option(help="Rank of LoRA and QLoRA.")] = 16,
    targets: TargetsOption = None,
    global_batch_size: Annotated[
        int | None, typer.Option(help="Rows of a step; 64 by default, or as many as GPUs.", show_default=False)
    ] = None,
    runtime: Annotated[
        str | None,
        typer.Option(
            help="Software that trains: a runtime preset; what fine-tuners use by default.",
            show_default=False,
            autocompletion=complete.value_of("training.runtime"),
        ),
    ] = None,
    cluster: ClusterOption = None,
    set_: SetOption = None,
    fetch: Annotated[bool, typer.Option("--fetch", help=FETCH_HELP)] = False,
    save: SaveOption = None,
    html: HtmlOption = None,
    as_json: AsJsonOption = False,
) -> None:
    """Say whether fine-tuning MODEL fits your GPUs, how fast it is, what it costs and what to type.

    A row for full fine-tuning, LoRA and QLoRA under each sharding, with the micro batch and the recomputation
    that are fastest there. Where nothing fits, the nearest ways out.

    mpctl fit Qwen/Qwen2.5-7B --gpus 1xrtx-4090 --samples 50000

    Exit codes: 0 something fits; 2 bad input; 3 nothing fits.
    """
    from mpctl.plan.fit.document import answer_fit, fit_document
    from mpctl.plan.fit.request import read_request

    request = read_request(
        _model(model, fetch=fetch),
        gpus,
        data=_data(samples, epochs, tokens, mean_length),
        settings=_settings(rank, targets, global_batch_size, runtime, set_),
        prices=price or [],
        seq_length=seq_length,
        cluster=cluster,
        methods=_methods(method),
    )
    found = answer_fit(replace(request, is_said=_is_said))
    document = fit_document(found, _line, _verbs(found.answer))
    if save is not None and found.answer is not None:
        _save(save, found.answer, document)
    if html is not None:
        _write_page(html, document)
    if as_json:
        from mpctl.render.output import print_json

        print_json(document)
    else:
        from mpctl.render.fit import print_fit

        print_fit(document)
    if found.answer is None:
        if save is not None:
            from mpctl.render.console import say

            say(f"{save} is not written: nothing fits; mpctl emit toml writes a way out", stderr=True)
        raise typer.Exit(DOES_NOT_FIT)


def _model(name: str, *, fetch: bool) -> str:
    """The model's name, of a page of the hub its id; fetched where that is asked for. Raises InputError."""
    if name.startswith(HUB_PAGE):
        name = "/".join(name.removeprefix(HUB_PAGE).split("/")[:2])
    if fetch:
        from mpctl.cli.fetch import fetch_model

        fetch_model(None, {"model": name})
    return name


def _data(samples: str | None, epochs: int | None, tokens: str | None, mean_length: int | None) -> FitData:
    """Read the training data from the options. Raises InputError."""
    from mpctl.plan.fit.request import FitData
    from mpctl.plan.planning.whole_run import read_tokens

    amount = None if tokens is None else read_tokens(tokens)
    count = None if samples is None else read_tokens(samples, "--samples", "samples", "--samples 1000 or 20k")
    return FitData(amount, count, epochs, mean_length)


def _methods(text: str | None) -> tuple[MethodName, ...]:
    """The methods of --method, in any case. Raises InputError."""
    from mpctl.plan.fit.methods import METHODS

    found = METHODS if text is None else tuple(name for name in METHODS if name == text.lower())
    if not found:
        hint = "use full, lora or qlora; others for one layout: mpctl plan --set training.adapter.kind=dora"
        raise InputError.of("bad-value", "--method", f"{text!r} has no rows here", hint)
    return found


def _settings(
    rank: int, targets: list[str] | None, batch: int | None, runtime: str | None, set_: list[str] | None
) -> dict[str, Any]:
    """The settings of the job that the options give, by full name."""
    from mpctl.spec.load import parse_settings

    given = {
        "training.adapter.rank": rank,
        "training.adapter.targets": [name for text in targets for name in text.split(",")] if targets else None,
        "training.global_batch_size": batch,
        "training.runtime": runtime,
    }
    return {**{key: value for key, value in given.items() if value is not None}, **parse_settings(set_ or [])}


def _verbs(answer: FitChoice | None) -> list[str]:
    """The commands that the answer is shown for: its plan, and the files of its software if it can say it."""
    if answer is None:
        return []
    said = next(_saying(answer.settings), None)
    return ["plan", f"emit {said}"] if said else ["plan"]


def _is_said(settings: Mapping[str, Any]) -> bool:
    """Whether a launcher of the settings' software takes them, if mpctl writes files for one."""
    return not _launchers(settings) or next(_saying(settings), None) is not None


def _launchers(settings: Mapping[str, Any]) -> list[str]:
    """The launchers of the settings' software that mpctl writes files for."""
    from mpctl.interop.registry import TARGETS
    from mpctl.spec.runtime import get_profile

    return [name for name in get_profile(settings["training.runtime"]).runs.emit if name in TARGETS]


def _saying(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the launchers that take these settings."""
    from mpctl.interop.emitted import emit_plan
    from mpctl.plan.planning.plan import load_plan

    plan = load_plan(None, settings)
    for name in _launchers(settings):
        with suppress(InputError):
            emit_plan(plan, name)
            yield name


def _line(verb: str, choice: FitChoice) -> str:
    """The command line of a verb for a row, whose GPUs are named by --gpus where they have a name."""
    from mpctl.spec.gpus import CLUSTERS

    gpus, settings, named = choice.request.gpus, choice.settings, ""
    if gpus is not None and gpus.settings["cluster"] in CLUSTERS.values():
        settings = {key: value for key, value in settings.items() if key not in gpus.settings}
        named = f" --gpus {choice.gpus_text}"
    return f"mpctl {verb}{named}{command_line('', None, settings).removeprefix(shlex.join(['mpctl', '']))}"


def _save(path: Path, answer: FitChoice, document: FitDocument) -> None:
    """Write the answer as a job file. Raises InputError where the file is there already."""
    from mpctl.cli.job_toml import job_toml
    from mpctl.core.durable import write_whole
    from mpctl.render.markup import cannot_write

    if path.exists():
        raise InputError.of("file-exists", "--save", f"{path} is there already", "name another file")
    text = job_toml(None, answer.settings, [document["advice"], f"mpctl {shlex.join(['plan', str(path)])}"])
    try:
        write_whole(path, text)
    except OSError as error:
        raise cannot_write(path, error, "--save") from None


def _write_page(path: Path, document: FitDocument) -> None:
    from mpctl.render.fit import fit_parts
    from mpctl.render.markup import write_text
    from mpctl.render.page import page_text

    write_text(path, page_text(fit_parts(document), command=shlex.join(["mpctl", *sys.argv[1:]])), option="--html")
