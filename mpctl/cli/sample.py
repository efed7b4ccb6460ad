"""`mpctl sample`: text from a trained model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def sample(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL", help="A run's directory, whose newest checkpoint is taken; one "
            "checkpoint of it; what `mpctl weights import` wrote; or a Hugging Face directory."
        ),
    ],
    prompt: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Text to continue; may be repeated.", show_default=False),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="A file with one prompt a line, or a .jsonl file with a prompt in "
            "each line's object; - reads lines from stdin.", show_default=False
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="The checkpoint of this step.", show_default=False)
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Most tokens to write for a prompt (for a blank, of glm). By "
                     "default 128, or what the model's positions leave.", show_default=False),
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the likeliest token each time; 1 draws with the "
                            "model's own probabilities, less than 1 with sharper ones.")
    ] = 0.0,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Draw from the K likeliest tokens.",
                                 show_default=False)
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Draw from the likeliest tokens that "
                                   "together reach probability P.", show_default=False)
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="The same seed gives the same texts, at any --tp.")
    ] = 1234,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End a text before this string; may be repeated. The "
                     "end-of-text token always ends it.", show_default=False),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks that share the model.")] = 1,
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
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts written at once.")] = 8,
    log_probabilities: Annotated[
        bool, typer.Option("--log-probabilities", help="With --json: of each token written.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:  # fmt: skip
    """Write text with a trained model: continue prompts, or fill blanks.

    A gpt model continues each prompt. A bert model fills the [MASK]s of a prompt, a glm model its
    [MASK]s with several words each, a t5 model its <extra_id_0>, <extra_id_1>, and so on. Nothing
    is written to the run, which may be training meanwhile.
    """
    from mpctl.launch.machine import this_machine
    from mpctl.launch.sample import SamplingSettings, plan_sampling, sample_document
    from mpctl.render.errors import print_warnings
    from mpctl.render.json import print_json
    from mpctl.render.sample import SampleView, print_footer
    from mpctl.render.tasks import PATIENCE, TaskBar

    settings = SamplingSettings(
        max_tokens, temperature, top_k, top_p, seed, tuple(stop or ()), batch_size
    )
    given = read_prompts(prompt or [], prompts)
    with TaskBar(after=PATIENCE, lines=not as_json) as bar:
        sampling = plan_sampling(
            model, given, settings, this_machine(), step=step, tokenizer=tokenizer, tp=tp,
            device=device, dtype=dtype, on_verify=bar.update,
        )  # fmt: skip
    print_warnings(list(sampling.warnings))
    with SampleView(sampling, is_silent=as_json) as view:
        seconds = sampling.run(view.show)
    document = sample_document(sampling, seconds, log_probabilities=log_probabilities)
    if as_json:
        print_json(document)
    else:
        print_footer(document)


def read_prompts(given: list[str], source: str | None) -> list[str]:
    """The prompts typed, then the file's; raises InputError where there is none."""
    from mpctl.errors import InputError

    found = list(given)
    if source is not None:
        found += _lines(source)
    if not found:
        raise InputError.of("no-prompt", "--prompt", "there is no text to continue",
                            "give --prompt TEXT, --prompts FILE or --prompts -")  # fmt: skip
    return found


def _lines(source: str) -> list[str]:
    from mpctl.errors import InputError

    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InputError.of("prompts-unreadable", "--prompts", f"{source}: {why}",
                            "name a text file in UTF-8") from None  # fmt: skip
    # Not splitlines(): JSON strings, and prompts, may hold U+2028 and its like.
    numbered = enumerate((line.removesuffix("\r") for line in text.split("\n")), start=1)
    lines = [(number, line) for number, line in numbered if line.strip()]
    if not source.endswith(".jsonl"):
        return [line for _, line in lines]
    return [_prompt_of(line, f"{source}:{number}") for number, line in lines]


def _prompt_of(line: str, where: str) -> str:
    from mpctl.errors import InputError

    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    prompt = record.get("prompt") if isinstance(record, dict) else None
    if not isinstance(prompt, str):
        raise InputError.of("prompts-jsonl", where, 'no JSON object with a string under "prompt"',
                            'write one {"prompt": "..."} a line')  # fmt: skip
    return prompt
