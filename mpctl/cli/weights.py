"""`mpctl checkpoint import` and `export`: from and to Hugging Face directories, safetensors only.

For models of the architectures GPT-2, Llama, BERT and T5. A launch can also start from a Hugging
Face directory directly: --set training.init_from=DIR.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mpctl.cli import complete

if TYPE_CHECKING:
    from mpctl.weights.writer import Written

PATIENCE = 1.0  # seconds before progress is shown
NOTHING = "nothing was written"
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Out = Annotated[
    Path,
    typer.Argument(
        metavar="OUT",
        help="Directory to write, empty or absent; it appears when it is complete.",
    ),
]


def import_(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="HF_DIR",
            help="Directory with config.json and safetensors, one file or several.",
        ),
    ],
    out: Out,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint of mpctl, and OUT/model.toml, a job file that starts from it.

    Names, shapes and types of all tensors and the sizes of all files are checked first. Values
    that are NaN or infinite are refused, and so is a tied head that differs from the embedding.
    """
    from mpctl.cli.signals import ended_by_signals
    from mpctl.render.progress import TaskBar
    from mpctl.weights.writer import import_weights

    with ended_by_signals(NOTHING), TaskBar(after=PATIENCE, lines=True) as bar:
        written = import_weights(source, out, on_progress=bar.update)
    use = ["mpctl", "launch", str(out / "model.toml"), "--set", 'data.corpus=["TEXTS"]']
    _print(written, use, as_json=as_json)


RunOption = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="A run's directory; its newest checkpoint is exported.",
        autocompletion=complete.run,
    ),
]
ShardBytesOption = Annotated[
    int,
    typer.Option(min=1, help="Largest size of a weights file; larger models get several."),
]


def export(
    run: RunOption,
    out: Out,
    shard_bytes: ShardBytesOption = 5_000_000_000,
    as_json: AsJson = False,
) -> None:
    """Write a directory that transformers loads, from a run of any layout.

    It contains config.json, the weights in safetensors, the tokenizer with its settings and, for
    models that generate text, generation_config.json.
    """
    from mpctl.cli.signals import ended_by_signals
    from mpctl.render.progress import TaskBar
    from mpctl.weights.writer import export_weights

    with ended_by_signals(NOTHING), TaskBar(after=PATIENCE, lines=True) as bar:
        written = export_weights(run, out, shard_bytes=shard_bytes, on_progress=bar.update)
    imported = f"from transformers import {written.architecture} as M"
    load = f"{imported}; M.from_pretrained({str(out)!r})"
    _print(written, ["python", "-c", load], as_json=as_json)


def _print(written: Written, use: list[str], *, as_json: bool) -> None:
    from mpctl.render.checkpoints import print_written
    from mpctl.render.output import print_json, print_warnings

    if as_json:
        print_json(written.as_dict())
    else:
        print_warnings(list(written.notes))
        print_written(written, use=use)
