"""`mpctl sample`: text from a trained model; schema mpctl.sample/1.

The workers read and write only token ids; this module encodes and decodes text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NotRequired

from typing_extensions import TypedDict

from mpctl.core.errors import InputError, Issue, RunFailed
from mpctl.model.families import get_prompt_form, special_tokens
from mpctl.records.checkpoint.verify import Progress, ignore_progress
from mpctl.records.rundir.requests import ChosenToken, PromptRequest, SampleRequest
from mpctl.run.hosts.machine import Machine
from mpctl.run.inference.task import DEFAULT_OPTIONS, TaskOptions, task_answers, task_job
from mpctl.run.inference.trained_model import TrainedModel, open_trained
from mpctl.spec.job import JobSpec

if TYPE_CHECKING:
    from mpctl.train.data.prompts import Encoded, PromptEncoder, TextStream


class SampleRow(TypedDict):
    """One prompt and its text. log_probabilities: of each token, where asked for; finish:
    end-of-text, filled, stop or length; seconds: from the begin of its batch to its last token."""

    prompt: str
    prompt_tokens: int
    text: str
    tokens: list[int]
    log_probabilities: NotRequired[list[float]]
    finish: str | None
    seconds: float
    tokens_per_second: float | None


class SampleDocument(TypedDict):
    """Output of `mpctl sample --json`. seconds: of writing all texts, without loading."""

    schema: Literal["mpctl.sample/1"]
    model: str
    checkpoint: str
    step: int | None
    family: str
    tp: int
    ep: int
    device: str
    dtype: str
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int
    samples: list[SampleRow]
    tokens: int
    seconds: float
    tokens_per_second: float | None


@dataclass(frozen=True)
class SamplingSettings:
    """Settings of sampling. temperature: 0 takes the likeliest token each time; stop: strings that end a text and are
    not part of it; batch_size: prompts written at once."""

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 1234
    stop: tuple[str, ...] = ()
    batch_size: int = 8

    def issues(self) -> Iterator[Issue]:
        for option, value in (("--top-k", self.top_k), ("--top-p", self.top_p)):
            if value is not None and self.temperature == 0:
                message = "has no effect at temperature 0, which takes the likeliest token"
                yield Issue("no-effect", option, message, "add --temperature 1")
        if not math.isfinite(self.temperature):
            message = f"{self.temperature} is not finite"
            yield Issue("bad-value", "--temperature", message, "use a number, such as 0 to 2")
        if "" in self.stop:
            message = "an empty string would end every text at its begin"
            yield Issue("bad-value", "--stop", message, "give some text, or leave the option out")


@dataclass
class WrittenText:
    """A prompt and its text so far.

    stop: strings that end the text and are not part of it; blanks: tokens written, by blank (one
    for gpt and t5); shown: characters that `fresh` has returned; finish: why the text ended
    (train/runtime/sampling.py), or "stop", None while it continues; seconds: from the begin of its batch
    to its last token.
    """

    prompt: str
    encoded: Encoded
    stream: TextStream
    stop: tuple[str, ...]
    blanks: list[list[int]] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    text: str = ""
    shown: int = 0
    finish: str | None = None
    seconds: float = 0.0

    @property
    def tokens(self) -> list[int]:
        return [token for blank in self.blanks for token in blank]

    @property
    def length(self) -> int:
        return sum(map(len, self.blanks))

    def add(self, chosen: ChosenToken, seconds: float) -> None:
        """Add one token as the workers chose it; seconds: since the begin of the batch."""
        _, blank, token, log_probability, is_end, finish = chosen
        if self.finish is not None:
            return
        self.blanks += [[] for _ in range(blank + 1 - len(self.blanks))]
        if not is_end:
            self.blanks[blank].append(token)
            self.log_probabilities.append(log_probability)
            self.text += self.stream.push(token)
        self.finish, self.seconds = finish, seconds
        self._cut_at_stop()

    def _cut_at_stop(self) -> None:
        if self.finish is not None:
            self.text += self.stream.rest()
        starts = [start for stop in self.stop if (start := self.text.find(stop)) >= 0]
        if starts:
            self.text, self.finish = self.text[: min(starts)], "stop"

    def fresh(self) -> str:
        """The text that was not returned before, without an end that may be the beginning of a stop
        string."""
        uncertain = 0 if self.finish else max((len(stop) - 1 for stop in self.stop), default=0)
        end = max(self.shown, len(self.text) - uncertain)
        text, self.shown = self.text[self.shown : end], end
        return text


OnTexts = Callable[[Sequence[WrittenText]], None]


@dataclass(frozen=True)
class Sampling:
    """Prompts that were checked and can be continued."""

    trained: TrainedModel
    job: JobSpec
    encoder: PromptEncoder
    settings: SamplingSettings
    texts: list[WrittenText]
    warnings: tuple[str, ...]

    def run(self, on_texts: OnTexts) -> float:
        """Write all texts; returns the seconds that this took, without loading the model. on_texts:
        called when the model is loaded and whenever tokens were written. Raises RunFailed when a
        worker fails."""
        began = time.perf_counter()
        with task_answers(self.job, self._request()) as answers:
            for answer in answers:
                if answer["event"] == "loaded":
                    began = time.perf_counter()
                elif answer["event"] == "tokens":
                    for chosen in answer["chosen"]:
                        self.texts[chosen[0]].add(chosen, answer["seconds"])
                on_texts(self.texts)
                if all(text.finish for text in self.texts):
                    break
        if not all(text.finish for text in self.texts):
            raise RunFailed("the workers ended before all texts were written")
        return time.perf_counter() - began

    def text_of(self, written: WrittenText) -> str:
        """The written text; for a model that fills blanks, the prompt with its blanks filled."""
        from mpctl.train.data.prompts import filled_text

        if self.encoder.form.continues:
            return written.text
        return filled_text(self.encoder, written.encoded, written.blanks, written.prompt)

    def _request(self) -> SampleRequest:
        settings = self.settings
        return {
            "task": "sample",
            "origin": str(self.trained.origin.resolve()),
            "texts": [self._prompt_request(n, text) for n, text in enumerate(self.texts)],
            "draw": {
                "temperature": settings.temperature,
                "top_k": settings.top_k,
                "top_p": settings.top_p,
                "seed": settings.seed,
            },
            "batch_size": settings.batch_size,
        }

    def _prompt_request(self, number: int, text: WrittenText) -> PromptRequest:
        return {
            "number": number,
            "tokens": list(text.encoded.tokens),
            "masks": list(text.encoded.masks),
            "limit": text.encoded.limit,
            "ends": list(self.encoder.ends),
            "special": self.encoder.special,
        }


def plan_sampling(
    path: Path,
    prompts: Sequence[str],
    settings: SamplingSettings,
    machine: Machine,
    options: TaskOptions = DEFAULT_OPTIONS,
    on_verify: Progress = ignore_progress,
) -> Sampling:
    """Check that the model at `path` can continue these prompts. Raises InputError with everything
    that is wrong."""
    from mpctl.train.data.prompts import PromptEncoder, TextStream

    trained = open_trained(path, step=options.step, on_progress=on_verify)
    tokenizer = trained.tokenizer_or(options.tokenizer)
    issues = [*settings.issues(), *_stop_issues(trained, settings)]
    if tokenizer is None:
        message = f"there is no tokenizer.json beside {trained.origin}"
        hint = "name the tokenizer.json that the model was trained with"
        issues.append(Issue("no-tokenizer", "--tokenizer", message, hint))
    if trained.model.experts is not None and (tp := options.sizes.get("tp", 1)) > 1:
        message = f"{tp}: ranks of tp share each position, of which a text has one at a time"
        issues.append(Issue("experts-split-tokens", "--tp", message, f"use --ep {tp}"))
    if issues or tokenizer is None:
        raise InputError(issues)
    job = task_job(trained.job, machine, options)
    encoder = PromptEncoder(
        trained.model,
        get_prompt_form(trained.model),
        special_tokens(trained.model),
        tokenizer,
        trained.end_tokens,
        adds_template=trained.run is None,
    )
    encoded = encoder.encode(prompts, max_tokens=settings.max_tokens)
    texts = [
        WrittenText(prompt, each, TextStream(encoder.tokenizer, each.tokens), settings.stop)
        for prompt, each in zip(prompts, encoded, strict=True)
    ]
    return Sampling(trained, job, encoder, settings, texts, _warnings(trained, encoded))


def _stop_issues(trained: TrainedModel, settings: SamplingSettings) -> Iterator[Issue]:
    if settings.stop and not get_prompt_form(trained.model).continues:
        message = f"a {trained.model.family} model fills blanks, which end by a token of their own"
        yield Issue("no-effect", "--stop", message, "leave the option out")


def _warnings(trained: TrainedModel, encoded: Sequence[Encoded]) -> tuple[str, ...]:
    model = trained.model
    longest = max((len(each.tokens) + each.limit for each in encoded), default=0)
    continues = get_prompt_form(model).continues
    if not continues or model.position == "learned" or longest <= model.seq_length:
        return trained.warnings
    length = f"texts of up to {longest} tokens are longer than the sequences of {model.seq_length}"
    return (*trained.warnings, f"{length} that the model was trained with")


def sample_document(sampling: Sampling, seconds: float, *, log_probabilities: bool) -> SampleDocument:
    """The texts as JSON; seconds: what `run` returned; log_probabilities: with those of the
    tokens."""
    trained, settings, job = sampling.trained, sampling.settings, sampling.job
    written = sum(text.length for text in sampling.texts)
    rows = [_row(sampling, text, log_probabilities) for text in sampling.texts]
    return {
        "schema": "mpctl.sample/1",
        "model": str(trained.path),
        "checkpoint": str(trained.origin),
        "step": trained.step,
        "family": trained.model.family,
        "tp": job.parallel.tp,
        "ep": job.parallel.ep,
        "device": job.launch.device,
        "dtype": job.training.dtype,
        "temperature": settings.temperature,
        "top_k": settings.top_k,
        "top_p": settings.top_p,
        "seed": settings.seed,
        "samples": rows,
        "tokens": written,
        "seconds": seconds,
        "tokens_per_second": _rate(written, seconds),
    }


def _row(sampling: Sampling, written: WrittenText, log_probabilities: bool) -> SampleRow:
    row: SampleRow = {
        "prompt": written.prompt,
        "prompt_tokens": len(written.encoded.tokens),
        "text": sampling.text_of(written),
        "tokens": written.tokens,
        "finish": written.finish,
        "seconds": written.seconds,
        "tokens_per_second": _rate(written.length, written.seconds),
    }
    if log_probabilities:
        row["log_probabilities"] = written.log_probabilities
    return row


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if seconds > 0 else None
