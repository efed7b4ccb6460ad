"""Output of a trained model: sampled text, and loss and perplexity by corpus.

Only sampled texts go to stdout; progress and the last line go to stderr. Text from a model may hold
anything: characters that steer a terminal are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from mpctl.core.units import seconds_text
from mpctl.render.console import get_console, visible
from mpctl.render.parts import Column, DataTable, Part, Sentence
from mpctl.render.progress import ProgressView, TaskBar
from mpctl.render.terminal import print_parts

if TYPE_CHECKING:
    from mpctl.run.inference.evaluate import EvalDocument
    from mpctl.run.inference.sample import SampleDocument, Sampling, WrittenText


FINISH = {
    "end-of-text": "ended by end-of-text",
    "filled": "all blanks filled",
    "stop": "ended by --stop",
    "length": "ended by the limit of tokens",
    "": "not finished",
}


class SampleView(ProgressView):
    """A bar while the model is loaded and several prompts are written. The text of one prompt is
    shown as it is written; those of several at the end, as far as they are finished.

    is_silent: show no text.
    """

    def __init__(self, sampling: Sampling, *, is_silent: bool) -> None:
        self.sampling, self.is_silent = sampling, is_silent
        self.continues = sampling.encoder.form.continues
        self.is_stream = not is_silent and len(sampling.texts) == 1 and self.continues
        bar = TaskBar(lines=not is_silent and len(sampling.texts) > 1)
        super().__init__(bar, "load the model", 1)
        self.limit = sum(map(_most, sampling.texts))
        self.begun = False

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        if self.is_stream:
            _write("\n" if self.begun else "")
        elif not self.is_silent:
            self._print_all()

    def show(self, samples: Sequence[WrittenText]) -> None:
        """Show the texts so far, after every answer of the workers; the first answer says that the
        model is loaded.
        """
        if not self.begun:
            self.bar.update(self.stage, 1, self.total)
        if self.is_stream:
            self._stream(samples[0])
            return
        written = sum(sample.length for sample in samples)
        done = self.limit if all(s.finish for s in samples) else written
        self.bar.update("write", done, self.limit)

    def _stream(self, sample: WrittenText) -> None:
        if not self.begun:
            self.bar.stop()  # the text follows where the bar stood
            _write(visible(sample.prompt))
            self.begun = True
        _write(visible(sample.fresh()))

    def _print_all(self) -> None:
        samples = self.sampling.texts
        for number, sample in enumerate(samples, start=1):
            if sample.finish is not None:
                title = f"--- {number}\n" if len(samples) > 1 else ""
                prompt = sample.prompt if self.continues else ""
                _write(visible(f"{title}{prompt}{self.sampling.text_of(sample)}\n"))


def print_footer(document: SampleDocument) -> None:
    """Print tokens, seconds and the model that wrote them on stderr."""
    samples, step = document["samples"], document["step"]
    rate = document["tokens_per_second"]
    parts = [f"{document['tokens']:,} tokens in {seconds_text(document['seconds'])}"]
    if rate is not None:
        parts.append(f"{rate:,.0f} tokens/s")
    if len(samples) == 1:
        parts.append(FINISH[samples[0]["finish"] or ""])
    of = "" if step is None else f"step {step} of "
    parts.append(f"{of}{document['model']}")
    console = get_console(stderr=True, soft_wrap=True)
    console.print(Text(", ".join(parts), style="dim"))


def _most(sample: WrittenText) -> int:
    return sample.encoded.limit * max(1, len(sample.encoded.masks))


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def print_evaluation(document: EvalDocument) -> None:
    """Print loss and perplexity of each corpus on stdout, and what was evaluated."""
    print_parts(evaluation_parts(document))


CORPORA = (
    Column("corpus", "name", left=True),
    Column("loss", "loss", "{:,.4f}".format),
    Column("perplexity", "perplexity", "{:,.2f}".format),
    Column("samples", "samples", "{:,}".format),
    Column("tokens", "tokens", "{:,}".format),
    Column("time", "seconds", seconds_text),
)
RECORDED = Column("recorded in training", "recorded_loss", "{:,.4f}".format)


def evaluation_parts(document: EvalDocument) -> Iterator[Part]:
    rows = document["corpora"]
    is_recorded = any(row["recorded_loss"] is not None for row in rows)
    yield DataTable("", (*CORPORA, *[RECORDED][:is_recorded]), rows)
    step = "" if document["step"] is None else f"step {document['step']} of "
    layout = " ".join(f"{axis} {n}" for axis, n in document["sizes"].items() if n > 1)
    parts = [
        f"{step}{document['model']}",
        f"samples of {document['seq_length']} tokens",
        document["dtype"],
        document["device"],
        layout or "one rank",
    ]
    yield Sentence(", ".join(parts), "note")
