"""`mpctl checkpoint`: list, verify and convert what a run has saved."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mpctl.cli import complete
from mpctl.cli.hints import HintingGroup
from mpctl.cli.options import AsJsonOption, RunArgument

if TYPE_CHECKING:
    from mpctl.records.checkpoint.listing import CheckpointPath, CheckpointsDocument
    from mpctl.train.weights.writer import Written


app = typer.Typer(cls=HintingGroup, pretty_exceptions_enable=False, no_args_is_help=True, add_completion=False)

CheckpointArgument = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT",
        help="RUN/checkpoints/step-N; a run, by its directory or its name in runs/, means its newest checkpoint.",
        autocompletion=complete.run,
    ),
]
NOTHING = "nothing was written"
Out = Annotated[
    Path, typer.Argument(metavar="OUT", help="Directory to write, empty or absent; it appears when it is complete.")
]


@app.callback()
def checkpoint() -> None:
    """List, verify and reshard checkpoints; import and export.

    Weights go from and to the files of Hugging Face's models.

    Exit code 1: a checkpoint is damaged.
    """


@app.command("list")
def list_(run: RunArgument, as_json: AsJsonOption = False) -> None:
    """List the checkpoints of RUN: step, size, layout, time, whether all files are there.

    Only records and sizes are compared; `verify` reads every byte.
    """
    from mpctl.records.checkpoint.listing import list_document

    document = list_document(_find(run))
    _print_list(document, as_json=as_json)


@app.command()
def inspect(
    path: CheckpointArgument,
    parameters: Annotated[bool, typer.Option("--parameters", help="Also a line for each parameter.")] = False,
    as_json: AsJsonOption = False,
) -> None:
    """Show the contents of CHECKPOINT: step, layout, shards, parameters, hashes."""
    from mpctl.records.checkpoint.listing import inspect_document, list_document
    from mpctl.render.checkpoints import print_inspection
    from mpctl.render.output import print_json

    found = _find(path)
    newest = found.only_newest()
    damage = list_document(newest)
    if damage["checkpoints"][0]["problems"]:
        _print_list(damage, as_json=as_json)
        return
    document = inspect_document(newest)
    if as_json:
        print_json(document)
    else:
        print_inspection(document, parameters=parameters)


@app.command()
def verify(
    path: CheckpointArgument,
    every: Annotated[bool, typer.Option("--all", help="Verify every checkpoint of the run, not the newest.")] = False,
    as_json: AsJsonOption = False,
) -> None:
    """Compare every byte of CHECKPOINT with the hashes that were written with it.

    Takes about a second per GB. Launching does not require it: each rank checks what it reads.
    """
    from mpctl.cli.signals import ended_by_signals
    from mpctl.records.checkpoint.listing import verify_document
    from mpctl.render.progress import PATIENCE, TaskBar

    found = _find(path)
    chosen = found if every else found.only_newest()
    with ended_by_signals("nothing was changed"), TaskBar(after=PATIENCE, lines=True) as bar:
        document = verify_document(chosen, bar.update)
    _print_list(document, as_json=as_json)


@app.command()
def reshard(
    path: CheckpointArgument,
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="Run directory to write, empty or absent; it appears when it is complete."),
    ],
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor-parallel size; as saved by default.")] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="Pipeline-parallel size; as saved by default.")] = None,
    ep: Annotated[int | None, typer.Option(min=1, help="Expert-parallel size; as saved by default.")] = None,
    etp: Annotated[int | None, typer.Option(min=1, help="Expert-tensor-parallel size; as saved by default.")] = None,
    tensor_mode: Annotated[
        str | None, typer.Option(help="How tp splits matrices: 1d, 2d, 2.5d or 3d; as saved by default.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Any other setting of OUT's job, such as micro_batch_size=4; repeatable."
        ),
    ] = None,
    as_json: AsJsonOption = False,
) -> None:
    """Rewrite CHECKPOINT for another layout: OUT/checkpoints/step-N, with OUT/job.json for it.

    `mpctl launch --resume --run-dir OUT` continues from it. Launching does not require it, since
    any layout reads checkpoints of any other. At most one tensor at a time is in memory.
    """
    from mpctl.cli.signals import ended_by_signals
    from mpctl.records.checkpoint.listing import list_document
    from mpctl.render.progress import PATIENCE, TaskBar
    from mpctl.run.launch.reshard import reshard_checkpoint

    found, mode = _find(path), [f"tensor_mode={tensor_mode}"] if tensor_mode else []
    experts = [f"{key}={size}" for key, size in (("ep", ep), ("etp", etp)) if size is not None]
    settings = [*mode, *experts, *(set_ or [])]
    with ended_by_signals("nothing was written"), TaskBar(after=PATIENCE, lines=True) as bar:
        reshard_checkpoint(found.newest, out, tp=tp, pp=pp, settings=settings, on_progress=bar.update)
    _print_list(list_document(_find(out)), as_json=as_json)


def _find(path: Path) -> CheckpointPath:
    """The checkpoint that a path names; a run may also be named by its name in runs/."""
    from mpctl.core.errors import Issue
    from mpctl.records.checkpoint.listing import find_checkpoints
    from mpctl.run.history.saved import find_run

    run = find_run(path)
    return find_checkpoints(path if isinstance(run, Issue) else run)


def _print_list(document: CheckpointsDocument, *, as_json: bool) -> None:
    """Print checkpoints; exits with code 1 when one of them is damaged."""
    from mpctl.render.checkpoints import print_checkpoints
    from mpctl.render.output import print_json

    if as_json:
        print_json(document)
    else:
        print_checkpoints(document)
    if any(entry["problems"] for entry in document["checkpoints"]):
        raise typer.Exit(1)


RunOption = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="A run's directory; its newest checkpoint is exported.", autocompletion=complete.run
    ),
]
ShardBytesOption = Annotated[
    int, typer.Option(min=1, help="Largest size of a weights file; larger models get several.")
]


class WrittenType(StrEnum):
    """Types of exported weights."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


@app.command()
def export(
    run: RunOption,
    out: Out,
    shard_bytes: ShardBytesOption = 5_000_000_000,
    merged: Annotated[
        bool, typer.Option("--merged", help="Of a run with adapters: the full weights with the adapters added.")
    ] = False,
    dtype: Annotated[
        WrittenType | None, typer.Option(help="Type of full weights; as stored by default.", show_default=False)
    ] = None,
    as_json: AsJsonOption = False,
) -> None:
    """Write a directory that transformers loads, from a run of any layout; from adapters one that peft loads.

    It contains config.json, the weights in safetensors, the tokenizer with its settings and, for
    models that generate text, generation_config.json. Of a run with adapters it contains
    adapter_config.json and adapter_model.safetensors, or with --merged full weights: sums are made in
    float32, the base stays as it is.
    """
    from mpctl.cli.signals import ended_by_signals
    from mpctl.render.progress import PATIENCE, TaskBar
    from mpctl.train.weights.origin import open_origin, origin_adapter
    from mpctl.train.weights.peft_export import export_adapters
    from mpctl.train.weights.writer import export_weights

    with ended_by_signals(NOTHING), TaskBar(after=PATIENCE, lines=True) as bar:
        if not merged and dtype is None and origin_adapter(open_origin(run)) is not None:
            written = export_adapters(run, out, on_progress=bar.update)
            base = f"from transformers import {written.architecture} as M; from peft import PeftModel as P"
            use = f"{base}; P.from_pretrained(M.from_pretrained('HF_BASE'), {str(out)!r})"
            _print(written, ["python", "-c", use], as_json=as_json)
            return
        stored = None if dtype is None else {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}[dtype]
        written = export_weights(run, out, shard_bytes=shard_bytes, dtype=stored, on_progress=bar.update)
    imported = f"from transformers import {written.architecture} as M"
    load = f"{imported}; M.from_pretrained({str(out)!r})"
    _print(written, ["python", "-c", load], as_json=as_json)


@app.command("import")
def import_(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="HF_DIR",
            help="Directory with config.json and safetensors, one file or several, or with adapter_config.json.",
        ),
    ],
    out: Out,
    base: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The weights that an adapter adds to: a Hugging Face directory, a run or an import; those that its "
            "config names by default.",
        ),
    ] = None,
    as_json: AsJsonOption = False,
) -> None:
    """Write a checkpoint of mpctl, and OUT/model.toml, a job file that starts from it.

    Names, shapes and types of all tensors and the sizes of all files are checked first. Values
    that are NaN or infinite are refused, and so is a tied head that differs from the embedding.
    The checkpoint of an adapter (peft's LoRA or DoRA) holds the adapter alone and names its base.
    """
    from mpctl.cli.signals import ended_by_signals
    from mpctl.core.errors import InputError
    from mpctl.render.progress import PATIENCE, TaskBar
    from mpctl.train.weights.peft_config import CONFIG
    from mpctl.train.weights.peft_import import import_adapters
    from mpctl.train.weights.writer import import_weights

    is_adapter = (source / CONFIG).is_file()
    if base is not None and not is_adapter:
        raise InputError.of("no-adapter", str(source), f"holds no {CONFIG}, to which --base belongs", "leave it out")
    with ended_by_signals(NOTHING), TaskBar(after=PATIENCE, lines=True) as bar:
        if is_adapter:
            written = import_adapters(source, out, base=base, on_progress=bar.update)
        else:
            written = import_weights(source, out, on_progress=bar.update)
    use = ["mpctl", "launch", str(out / "model.toml"), "--set", 'data.corpus=["TEXTS"]']
    _print(written, use, as_json=as_json)


def _print(written: Written, use: list[str], *, as_json: bool) -> None:
    from mpctl.render.checkpoints import print_written
    from mpctl.render.output import print_json, print_warnings

    if as_json:
        print_json(written.as_dict())
    else:
        print_warnings(list(written.notes))
        print_written(written, use=use)
