"""Text from a trained model: prompts in, what the workers write out, as it is written.

The workers deal in tokens alone; here is where text becomes tokens and tokens become text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpctl.errors import InputError, Issue, RunFailed
from mpctl.families import get_prompt_form, special_tokens
from mpctl.launch.machine import Machine
from mpctl.launch.task import Answer, task_answers, task_job
from mpctl.launch.trained_model import TrainedModel, open_trained
from mpctl.launch.verify import Progress, unseen
from mpctl.spec.job import JobSpec

if TYPE_CHECKING:
    from mpctl.data.decode import TextStream
    from mpctl.data.prompts import Encoded, PromptEncoder


@dataclass(frozen=True)
class SamplingSettings:
    """How texts are written. temperature 0 takes the likeliest token at each place; stop: strings
    that end a text and are no part of it."""

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 1234
    stop: tuple[str, ...] = ()
    batch_size: int = 8

    def issues(self) -> list[Issue]:
        unused = [name for name, value in (("--top-k", self.top_k), ("--top-p", self.top_p))
                  if value is not None and self.temperature == 0]  # fmt: skip
        message = "at temperature 0 the likeliest token is taken, nothing is drawn"
        found = [Issue("no-effect", name, message, "add --temperature 1") for name in unused]
        if not math.isfinite(self.temperature):
            found.append(Issue("bad-value", "--temperature", f"{self.temperature} is not finite",
                               "use a number from 0 to 2, say"))  # fmt: skip
        if "" in self.stop:
            found.append(Issue("bad-value", "--stop", "an empty string would end every text at "
                               "its begin", "give some text, or leave it out"))  # fmt: skip
        return found


@dataclass
class WrittenText:
    """One prompt and what has been written for it. blanks: tokens by blank (one for gpt and t5);
    seconds: from the begin of its batch to its last token."""

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
        """How many tokens were written."""
        return sum(map(len, self.blanks))

    def take(self, chosen: list[Any], seconds: float) -> None:
        """One token as the workers chose it: [text, blank, token, log probability, is_end,
        finish]."""
        _, blank, token, share, is_end, finish = chosen
        if self.finish is not None:
            return
        self.blanks += [[] for _ in range(blank + 1 - len(self.blanks))]
        if not is_end:
            self.blanks[blank].append(token)
            self.log_probabilities.append(share)
            self.text += self.stream.push(token)
        self.finish, self.seconds = finish, seconds
        self._stop()

    def _stop(self) -> None:
        if self.finish is not None:
            self.text += self.stream.rest()
        found = [place for stop in self.stop if (place := self.text.find(stop)) >= 0]
        if found:
            self.text, self.finish = self.text[: min(found)], "stop"

    def fresh(self) -> str:
        """Text that is certain and was not given out: what may begin a stop string waits."""
        held = 0 if self.finish else max((len(stop) - 1 for stop in self.stop), default=0)
        end = max(self.shown, len(self.text) - held)
        text, self.shown = self.text[self.shown : end], end
        return text


OnProgress = Callable[[Sequence[WrittenText]], None]


@dataclass(frozen=True)
class Sampling:
    """Everything that is asked, checked, before a worker starts."""

    trained: TrainedModel
    job: JobSpec
    encoder: PromptEncoder
    settings: SamplingSettings
    samples: list[WrittenText]
    warnings: tuple[str, ...]

    def run(self, on_progress: OnProgress) -> float:
        """Write all texts; on_progress sees them whenever something was written, and first when
        the model is loaded. Returns the seconds of writing, without those of loading."""
        began = time.perf_counter()
        with task_answers(self.job, self._request()) as said:
            for answer in said:
                if answer["event"] == "loaded":
                    began = time.perf_counter()
                for chosen in answer.get("chosen", ()):
                    self.samples[chosen[0]].take(chosen, answer["seconds"])
                on_progress(self.samples)
                if all(sample.finish for sample in self.samples):
                    break
        if not all(sample.finish for sample in self.samples):
            raise RunFailed("the workers ended before all texts did")
        return time.perf_counter() - began

    def text_of(self, sample: WrittenText) -> str:
        """What was written; of a model that fills blanks, the prompt with them filled."""
        from mpctl.data.prompts import filled_text

        if self.encoder.form.continues:
            return sample.text
        return filled_text(self.encoder, sample.encoded, sample.blanks, sample.prompt)

    def _request(self) -> Answer:
        s, encoder = self.settings, self.encoder
        draw = {"temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p, "seed": s.seed}
        texts = [
            {"number": number, "tokens": sample.encoded.tokens, "masks": sample.encoded.masks,
             "limit": sample.encoded.limit, "ends": encoder.ends, "special": encoder.special}
            for number, sample in enumerate(self.samples)
        ]  # fmt: skip
        return {"task": "sample", "origin": str(self.trained.origin.resolve()), "texts": texts,
                "draw": draw, "batch_size": s.batch_size}  # fmt: skip


def plan_sampling(
    path: Path, prompts: Sequence[str], settings: SamplingSettings, machine: Machine, *,
    step: int | None = None, tokenizer: Path | None = None, tp: int = 1, device: str = "auto",
    dtype: str | None = None, on_verify: Progress = unseen,
) -> Sampling:  # fmt: skip
    """Raises InputError with what keeps these prompts from being continued."""
    from mpctl.data.decode import TextStream
    from mpctl.data.prompts import PromptEncoder
    from mpctl.data.tokenizer import find_tokenizer

    trained = open_trained(path, step=step, on_progress=on_verify)
    form = get_prompt_form(trained.model)
    issues = [*settings.issues(), *_no_tokenizer(trained, tokenizer)]
    if settings.stop and not form.continues:
        issues.append(Issue("no-effect", "--stop", f"a {trained.model.family} model fills blanks, "
                            "which end by a token of their own", "leave it out"))  # fmt: skip
    if issues:
        raise InputError(issues)
    job = task_job(trained.job, machine, {"tp": tp}, device=device, dtype=dtype)
    found = find_tokenizer(tokenizer) if tokenizer is not None else trained.tokenizer
    assert found is not None
    encoder = PromptEncoder(
        trained.model, form, special_tokens(trained.model), found, trained.own_ends,
        adds_template=trained.run is None,
    )  # fmt: skip
    encoded = encoder.encode(prompts, max_tokens=settings.max_tokens)
    samples = [
        WrittenText(prompt, each, TextStream(encoder.tokenizer, each.tokens), settings.stop)
        for prompt, each in zip(prompts, encoded, strict=True)
    ]
    return Sampling(trained, job, encoder, settings, samples, _warnings(trained, encoded))


def _no_tokenizer(trained: TrainedModel, given: Path | None) -> list[Issue]:
    if given is not None or trained.tokenizer is not None:
        return []
    message = f"there is no tokenizer.json beside {trained.origin}"
    hint = "name the tokenizer.json that the model was trained with"
    return [Issue("no-tokenizer", "--tokenizer", message, hint)]


def _warnings(trained: TrainedModel, encoded: Sequence[Encoded]) -> tuple[str, ...]:
    model = trained.model
    longest = max((len(each.tokens) + each.limit for each in encoded), default=0)
    continues = get_prompt_form(model).continues
    if not continues or model.position == "learned" or longest <= model.seq_length:
        return trained.warnings
    longer = f"texts of up to {longest} tokens are longer than the {model.seq_length} that the "
    return (*trained.warnings, longer + "model was trained with")


def sample_document(sampling: Sampling, seconds: float, *, log_probabilities: bool) -> Answer:
    """Schema mpctl.sample/1."""
    trained, settings, job = sampling.trained, sampling.settings, sampling.job
    written = sum(len(sample.tokens) for sample in sampling.samples)
    return {
        "schema": "mpctl.sample/1",
        "model": str(trained.run or trained.origin),
        "checkpoint": str(trained.origin),
        "step": trained.step,
        "family": trained.model.family,
        "tp": job.parallel.tp,
        "device": job.launch.device,
        "dtype": job.training.dtype,
        "temperature": settings.temperature,
        "top_k": settings.top_k,
        "top_p": settings.top_p,
        "seed": settings.seed,
        "samples": [
            {
                "prompt": sample.prompt,
                "prompt_tokens": len(sample.encoded.tokens),
                "text": sampling.text_of(sample),
                "tokens": sample.tokens,
                **({"log_probabilities": sample.log_probabilities} if log_probabilities else {}),
                "finish": sample.finish,
                "seconds": sample.seconds,
                "tokens_per_second": _rate(len(sample.tokens), sample.seconds),
            }
            for sample in sampling.samples
        ],
        "tokens": written,
        "seconds": seconds,
        "tokens_per_second": _rate(written, seconds),
    }


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if seconds > 0 else None
