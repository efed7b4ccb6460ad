"""`mpctl eval`: the loss of a trained model on text."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from mpctl.cli.task_options import AsJson, Device, Dtype, ModelPath, Step, TokenizerFile

app = typer.Typer(pretty_exceptions_enable=False)


DataOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[NAME=]PATH",
        help="A folder of prepared data, a text file or a folder of text files; repeatable. By "
        "default the run's own validation data.",
        show_default=False,
    ),
]
SamplesOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Use the first N samples of each corpus; all by default.",
        show_default=False,
    ),
]
SplitOption = Annotated[
    Literal["train", "validation"], typer.Option(help="Which part of prepared data to use.")
]
DpOption = Annotated[
    int, typer.Option(min=1, help="Data-parallel size: replicas that share the samples.")
]
MicroBatchSizeOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Samples that a rank computes at once; by default as in the training.",
        show_default=False,
    ),
]
SeqLengthOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Tokens of a sample; by default as in the training.", show_default=False
    ),
]


@app.command("eval")
def eval_(
    model: ModelPath,
    data: DataOption = None,
    samples: SamplesOption = None,
    step: Step = None,
    split: SplitOption = "validation",
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size.")] = 1,
    dp: DpOption = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline-parallel size: stages.")] = 1,
    cp: Annotated[int, typer.Option(min=1, help="Context-parallel size.")] = 1,
    micro_batch_size: MicroBatchSizeOption = None,
    seq_length: SeqLengthOption = None,
    device: Device = "auto",
    dtype: Dtype = None,
    tokenizer: TokenizerFile = None,
    as_json: AsJson = False,
) -> None:
    """Compute the loss and the perplexity of a trained model, for each corpus.

    Samples are cut and weighted as in a validation during training, so that the same samples give
    the loss that the training recorded. Nothing is written to the run.
    """
    from mpctl.hosts.machine import this_machine
    from mpctl.inference.evaluate import EvalSettings, plan_evaluation
    from mpctl.inference.task import TaskOptions
    from mpctl.render.output import print_json, print_warnings
    from mpctl.render.progress import PATIENCE, TaskBar
    from mpctl.render.sample import print_evaluation

    sizes = {"tp": tp, "dp": dp, "pp": pp, "cp": cp}
    options = TaskOptions(step, tokenizer, sizes, device, dtype)
    settings = EvalSettings(samples, split, micro_batch_size, seq_length)
    with TaskBar(after=PATIENCE, lines=not as_json) as bar:
        evaluation = plan_evaluation(
            model, data or [], this_machine(), options, settings, bar.update
        )
    print_warnings(list(evaluation.warnings))
    with TaskBar(lines=not as_json) as bar:
        document = evaluation.run(bar.update)
    if as_json:
        print_json(document)
    else:
        print_evaluation(document)
