"""`mpctl weights`: from and to Hugging Face directories, in safetensors only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mpctl.cli.hints import HintingGroup

if TYPE_CHECKING:
    from mpctl.weights.writer import Written

app = typer.Typer(
    cls=HintingGroup, pretty_exceptions_enable=False, no_args_is_help=True, add_completion=False
)

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Out = Annotated[
    Path, typer.Argument(metavar="OUT", help="A directory that is not there yet; whole or not.")
]


@app.callback()
def weights() -> None:
    """Start from weights that others trained, and give trained ones back.

    GPT-2, Llama, BERT and T5 shapes. A launch also reads a Hugging Face directory as it stands:
    --set training.init_from=DIR.
    """


@app.command("import")
def import_(
    source: Annotated[
        Path,
        typer.Argument(metavar="HF_DIR", help="config.json and safetensors, one file or sharded."),
    ],
    out: Out,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint of ours and a job fragment, OUT/model.toml, that starts from it.

    The shape, every tensor's name, shape and dtype and every file's size are checked first.
    """
    from mpctl.render.tasks import TaskBar
    from mpctl.weights.writer import import_weights

    with TaskBar() as bar:
        written = import_weights(source, out, on_progress=bar.update)
    use = ["mpctl", "launch", str(out / "model.toml"), "--set", 'data.corpus=["TEXTS"]']
    _print(written, use, as_json=as_json)


@app.command()
def export(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="A run's directory, whose newest checkpoint is taken."),
    ],
    out: Out,
    shard_bytes: Annotated[
        int,
        typer.Option(min=1, help="Largest file; above it the weights are split, with an index."),
    ] = 5_000_000_000,
    as_json: AsJson = False,
) -> None:
    """Write what the shape's class of transformers loads, from a run of any layout."""
    from mpctl.render.tasks import TaskBar
    from mpctl.weights.writer import export_weights

    with TaskBar() as bar:
        written = export_weights(run, out, shard_bytes=shard_bytes, on_progress=bar.update)
    imported = f"from transformers import {written.architecture} as M"
    load = f"{imported}; M.from_pretrained({str(out)!r})"
    _print(written, ["python", "-c", load], as_json=as_json)


def _print(written: Written, use: list[str], *, as_json: bool) -> None:
    from mpctl.render.json import print_json
    from mpctl.render.weights import print_written

    if as_json:
        print_json(written.as_dict())
    else:
        print_written(written, use=use)
