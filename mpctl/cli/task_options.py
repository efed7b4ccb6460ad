"""The argument and the options that `mpctl eval` and `mpctl sample` have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from mpctl.cli import complete

ModelPath = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="A run's directory, whose newest checkpoint is used; one of its checkpoints; what "
        "`mpctl checkpoint import` wrote; or a Hugging Face directory.",
        autocompletion=complete.run,
    ),
]
Step = Annotated[
    int | None,
    typer.Option(
        help="Use the checkpoint of this step; the newest by default.", show_default=False
    ),
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"], typer.Option(help="auto: a GPU where there is one.")
]
Dtype = Annotated[
    Literal["fp32", "bf16", "fp16", "fp64"] | None,
    typer.Option(
        help="Data type to compute in; by default that of the training.", show_default=False
    ),
]
TokenizerFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A tokenizer.json, for a model that has none beside it.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
