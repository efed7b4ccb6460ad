"""`mpctl eval`: the loss of a trained model on text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(pretty_exceptions_enable=False)


@app.command("eval")
def eval_(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL", help="A run's directory, whose newest checkpoint is taken; one "
            "checkpoint of it; what `mpctl weights import` wrote; or a Hugging Face directory."
        ),
    ],
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]PATH", help="A folder of prepared data, a text file or a folder of "
            "them; may be repeated. By default the run's own validation data.", show_default=False
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Take the first N samples of each; by default all.",
                     show_default=False),
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="The checkpoint of this step.", show_default=False)
    ] = None,
    split: Annotated[
        Literal["train", "validation"], typer.Option(help="Which part of prepared data.")
    ] = "validation",
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size.")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Replicas that share the samples.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 1,
    cp: Annotated[int, typer.Option(min=1, help="Context-parallel size.")] = 1,
    micro_batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Samples a rank takes at once; the run's own by default.",
                     show_default=False),
    ] = None,
    seq_length: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a sample; the model's own by default.",
                     show_default=False),
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="auto: a GPU where there is one.")
    ] = "auto",
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16", "fp64"] | None,
        typer.Option(help="Precision to compute in; the run's own by default.", show_default=False),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A tokenizer.json, where the model has none beside it.",
                     show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:  # fmt: skip
    """Compute loss and perplexity of a trained model, by corpus.

    Samples are made and weighted as in a validation while training, so that the same samples give
    the loss that the training recorded. Nothing is written to the run.
    """
    from mpctl.launch.evaluate import evaluation_document, plan_evaluation
    from mpctl.launch.machine import this_machine
    from mpctl.render.errors import print_warnings
    from mpctl.render.evaluate import print_evaluation
    from mpctl.render.json import print_json
    from mpctl.render.tasks import PATIENCE, TaskBar

    with TaskBar(after=PATIENCE, lines=not as_json) as bar:
        evaluation = plan_evaluation(
            model, data or [], this_machine(), step=step, samples=samples, split=split,
            tokenizer=tokenizer, sizes={"tp": tp, "dp": dp, "pp": pp, "cp": cp}, device=device,
            dtype=dtype, micro_batch=micro_batch_size, seq_length=seq_length,
            on_progress=bar.update,
        )  # fmt: skip
    print_warnings(list(evaluation.warnings))
    with TaskBar(lines=not as_json) as bar:
        rows = evaluation.run(bar.update)
    document = evaluation_document(evaluation, rows)
    if as_json:
        print_json(document)
    else:
        print_evaluation(document)
