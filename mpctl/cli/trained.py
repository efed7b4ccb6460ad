"""`mpctl eval` and `mpctl sample`: the loss of a trained model on text, and text written by it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from mpctl.cli import complete
from mpctl.cli.options import AsJsonOption

ModelPath = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="A run's directory, whose newest checkpoint is used; one of its checkpoints; the "
        "output of `mpctl checkpoint import`; or a Hugging Face directory.",
        autocompletion=complete.run,
    ),
]
Step = Annotated[
    int | None, typer.Option(help="Use the checkpoint of this step; the newest by default.", show_default=False)
]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: a GPU where there is one.")]
Dtype = Annotated[
    Literal["fp32", "bf16", "fp16", "fp64"] | None,
    typer.Option(help="Data type to compute in; by default that of training.", show_default=False),
]
TokenizerFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A tokenizer.json, for a model whose folder has none.", show_default=False),
]
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
    int | None, typer.Option(min=1, help="Use the first N samples of each corpus; all by default.", show_default=False)
]
SplitOption = Annotated[Literal["train", "validation"], typer.Option(help="Which part of prepared data to use.")]
DpOption = Annotated[int, typer.Option(min=1, help="Data-parallel size: replicas that share the samples.")]
EpOption = Annotated[int, typer.Option(min=1, help="Expert-parallel size: ranks that share a layer's experts.")]
MicroBatchSizeOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Samples that a rank computes at once; by default as in the training.", show_default=False
    ),
]
SeqLengthOption = Annotated[
    int | None, typer.Option(min=1, help="Tokens of a sample; by default as in the training.", show_default=False)
]


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
    ep: EpOption = 1,
    micro_batch_size: MicroBatchSizeOption = None,
    seq_length: SeqLengthOption = None,
    device: Device = "auto",
    dtype: Dtype = None,
    tokenizer: TokenizerFile = None,
    as_json: AsJsonOption = False,
) -> None:
    """Compute loss and perplexity of a trained model, by corpus.

    Samples are cut and weighted as in validation during training, so that the same samples give the
    loss that training recorded. Nothing is written to the run.
    """
    from mpctl.render.output import print_json, print_warnings
    from mpctl.render.progress import PATIENCE, TaskBar
    from mpctl.render.sample import print_evaluation
    from mpctl.run.hosts.machine import this_machine
    from mpctl.run.inference.evaluate import EvalSettings, plan_evaluation
    from mpctl.run.inference.task import TaskOptions

    sizes = {"tp": tp, "dp": dp, "pp": pp, "cp": cp}
    options = TaskOptions(step, tokenizer, sizes, device, dtype, ep=ep)
    settings = EvalSettings(samples, split, micro_batch_size, seq_length)
    with TaskBar(after=PATIENCE, lines=not as_json) as bar:
        evaluation = plan_evaluation(model, data or [], this_machine(), options, settings, bar.update)
    print_warnings(list(evaluation.warnings))
    with TaskBar(lines=not as_json) as bar:
        document = evaluation.run(bar.update)
    if as_json:
        print_json(document)
    else:
        print_evaluation(document)


PromptOption = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="Text to continue; repeatable.", show_default=False)
]
PromptsOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help='A file with a prompt on each line, or a .jsonl file with {"prompt": "..."} on '
        "each line; - reads prompts from stdin, one per line.",
        show_default=False,
    ),
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Maximum number of tokens to write for a prompt, or with glm for a blank. By default "
        "128, or fewer if the model has fewer positions.",
        show_default=False,
    ),
]
TemperatureOption = Annotated[
    float,
    typer.Option(
        min=0.0,
        help="0 takes the likeliest token each time; 1 draws with the model's probabilities, "
        "less than 1 favours likely tokens.",
    ),
]
TopKOption = Annotated[int | None, typer.Option(min=1, help="Draw from the K likeliest tokens.", show_default=False)]
TopPOption = Annotated[
    float | None,
    typer.Option(
        min=0.0, max=1.0, help="Draw from the likeliest tokens whose probabilities add up to P.", show_default=False
    ),
]
SeedOption = Annotated[int, typer.Option(min=0, help="The same seed gives the same texts at any --tp.")]
StopOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT",
        help="End a text before this string; repeatable. The end-of-text token always ends it.",
        show_default=False,
    ),
]
LogProbabilitiesOption = Annotated[
    bool, typer.Option("--log-probabilities", help="With --json: also the log probability of each token.")
]


def sample(
    model: ModelPath,
    prompt: PromptOption = None,
    prompts: PromptsOption = None,
    step: Step = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = 1234,
    stop: StopOption = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size.")] = 1,
    ep: EpOption = 1,
    device: Device = "auto",
    dtype: Dtype = None,
    tokenizer: TokenizerFile = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts that are written at once.")] = 8,
    log_probabilities: LogProbabilitiesOption = False,
    as_json: AsJsonOption = False,
) -> None:
    """Write text with a trained model: continue or fill blanks.

    A gpt model continues each prompt. A bert model fills the [MASK]s of a prompt with one token
    each, a glm model its [MASK]s with several, a t5 model its <extra_id_0>, <extra_id_1>, and so
    on. Nothing is written to the run, which may be training at the same time.
    """
    from mpctl.render.output import print_json, print_warnings
    from mpctl.render.progress import PATIENCE, TaskBar
    from mpctl.render.sample import SampleView, print_footer
    from mpctl.run.hosts.machine import this_machine
    from mpctl.run.inference.sample import SamplingSettings, plan_sampling, sample_document
    from mpctl.run.inference.task import TaskOptions

    settings = SamplingSettings(max_tokens, temperature, top_k, top_p, seed, tuple(stop or ()), batch_size)
    options = TaskOptions(step, tokenizer, {"tp": tp}, device, dtype, ep=ep)
    texts = read_prompts(prompt or [], prompts)
    with TaskBar(after=PATIENCE, lines=not as_json) as bar:
        sampling = plan_sampling(model, texts, settings, this_machine(), options, bar.update)
    print_warnings(list(sampling.warnings))
    with SampleView(sampling, is_silent=as_json) as view:
        seconds = sampling.run(view.show)
    document = sample_document(sampling, seconds, log_probabilities=log_probabilities)
    if as_json:
        print_json(document)
    else:
        print_footer(document)


def read_prompts(given: list[str], source: str | None) -> list[str]:
    """The prompts of --prompt, then those of the file. Raises InputError when there are none."""
    from mpctl.core.errors import InputError

    prompts = list(given)
    if source is not None:
        prompts += _lines(source)
    if not prompts:
        raise InputError.of(
            "no-prompt", "--prompt", "there is no text to continue", "give --prompt TEXT, --prompts FILE or --prompts -"
        )
    return prompts


def _lines(source: str) -> list[str]:
    from mpctl.core.errors import InputError

    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InputError.of(
            "prompts-unreadable", "--prompts", f"{source}: {why}", "name a text file in UTF-8"
        ) from None
    # Not splitlines(): JSON strings, and prompts, may hold U+2028 and its like.
    numbered = enumerate((line.removesuffix("\r") for line in text.split("\n")), start=1)
    lines = [(number, line) for number, line in numbered if line.strip()]
    if not source.endswith(".jsonl"):
        return [line for _, line in lines]
    return [_prompt_of(line, f"{source}:{number}") for number, line in lines]


def _prompt_of(line: str, where: str) -> str:
    from mpctl.core.errors import InputError

    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    prompt = record.get("prompt") if isinstance(record, dict) else None
    if not isinstance(prompt, str):
        raise InputError.of(
            "prompts-jsonl", where, 'no JSON object with a string under "prompt"', 'write one {"prompt": "..."} a line'
        )
    return prompt
