"""`mpctl eval`: the loss of a trained model on text, by corpus; schema mpctl.eval/1."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.core.errors import InputError, Issue, RunFailed
from mpctl.model.families import get_family
from mpctl.records.checkpoint.verify import Progress, ignore_progress
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.requests import CorpusAnswer, CorpusRequest, EvalRequest
from mpctl.run.hosts.machine import Machine
from mpctl.run.inference.task import DEFAULT_OPTIONS, TaskOptions, task_answers, task_job
from mpctl.run.inference.trained_model import TrainedModel, open_trained
from mpctl.run.launch.data_checks import mean_other_text
from mpctl.spec.job import JobSpec

LOADING = "load the model"
SplitName = Literal["train", "validation"]
LARGEST_EXPONENT = 700  # exp of more overflows a double


class CorpusRow(TypedDict):
    """The result of one corpus.

    loss: the mean over its samples; perplexity: None where the loss is not of tokens alone; tokens:
    predictions over which the loss is averaged; seconds: the time this took; recorded_loss: what
    the training recorded for the same samples, None when it recorded nothing for them.
    """

    name: str
    path: str
    loss: float
    perplexity: float | None
    samples: int
    tokens: int
    seconds: float
    recorded_loss: float | None


class EvalDocument(TypedDict):
    """Output of `mpctl eval --json`."""

    schema: Literal["mpctl.eval/1"]
    model: str
    checkpoint: str
    step: int | None
    family: str
    seq_length: int
    sizes: dict[str, int]
    micro_batch_size: int
    device: str
    dtype: str
    corpora: list[CorpusRow]


@dataclass(frozen=True)
class EvalSettings:
    """samples: the first N of each corpus, None for all; split: which part of prepared data;
    micro_batch_size, seq_length: None for those of the training."""

    samples: int | None = None
    split: SplitName = "validation"
    micro_batch_size: int | None = None
    seq_length: int | None = None


@dataclass(frozen=True)
class Evaluation:
    """An evaluation that was checked and can start. seq_length: tokens of a sample."""

    trained: TrainedModel
    job: JobSpec
    seq_length: int
    corpora: tuple[EvalCorpus, ...]
    samples: int | None
    warnings: tuple[str, ...]

    def run(self, on_progress: Progress) -> EvalDocument:
        """Evaluate all corpora. on_progress: called with (stage, done, total); the stages are
        tokenizing, loading the model, and each corpus. Raises RunFailed when a worker fails."""
        rows: list[CorpusRow] = []
        with tokenized(self.corpora, on_progress) as prefixes:
            on_progress(LOADING, 0, 1)
            with task_answers(self.job, self._request(prefixes)) as answers:
                for answer in answers:
                    if answer["event"] == "loaded":
                        on_progress(LOADING, 1, 1)
                        continue
                    corpus = self.corpora[answer["corpus"]]
                    if answer["event"] == "progress":
                        on_progress(corpus.name, answer["done"], answer["total"])
                    else:
                        rows.append(self._row(corpus, answer))
        if len(rows) != len(self.corpora):
            raise RunFailed("the workers ended before all corpora were evaluated")
        return self._document(rows)

    def _request(self, prefixes: Sequence[Path]) -> EvalRequest:
        corpora: list[CorpusRequest] = [
            {"prefix": str(prefix.resolve()), "tokenizer": str(corpus.tokenizer.resolve()), "words": corpus.words}
            for corpus, prefix in zip(self.corpora, prefixes, strict=True)
        ]
        origin = str(self.trained.origin.resolve())
        return {"task": "evaluate", "origin": origin, "corpora": corpora, "samples": self.samples}

    def _row(self, corpus: EvalCorpus, answer: CorpusAnswer) -> CorpusRow:
        return {
            "name": corpus.name,
            "path": str(corpus.path),
            "loss": answer["loss"],
            "perplexity": _perplexity(self.trained.model.family, answer["loss"]),
            "samples": answer["samples"],
            "tokens": answer["tokens"],
            "seconds": answer["seconds"],
            "recorded_loss": corpus.recorded if self._is_as_recorded(answer["samples"]) else None,
        }

    def _is_as_recorded(self, samples: int) -> bool:
        """Whether the validations of the training used these samples: its `eval_samples`, or all
        where there are fewer."""
        recorded = self.trained.job.training.eval_samples
        is_all = self.samples is None or samples < self.samples
        is_same_length = self.job.model == self.trained.model
        return is_same_length and (samples == recorded or (samples < recorded and is_all))

    def _document(self, rows: list[CorpusRow]) -> EvalDocument:
        trained, job = self.trained, self.job
        return {
            "schema": "mpctl.eval/1",
            "model": str(trained.path),
            "checkpoint": str(trained.origin),
            "step": trained.step,
            "family": trained.model.family,
            "seq_length": self.seq_length,
            "sizes": job.sizes,
            "micro_batch_size": job.training.micro_batch_size,
            "device": job.launch.device,
            "dtype": job.training.dtype,
            "corpora": rows,
        }


def plan_evaluation(
    path: Path,
    data: Sequence[str],
    machine: Machine,
    options: TaskOptions = DEFAULT_OPTIONS,
    settings: EvalSettings = EvalSettings(),
    on_progress: Progress = ignore_progress,
) -> Evaluation:
    """Check an evaluation of the model at `path`.

    data: folders of prepared data, text files or folders of them, each NAME=PATH or PATH; without
    any, the run's validation data. Raises InputError with everything that is wrong.
    """
    trained = open_trained(path, step=options.step, on_progress=on_progress)
    tokenizer = trained.tokenizer_or(options.tokenizer)
    corpora = CorpusFinder(trained, tokenizer, settings.split).find(data)
    model, training = trained.model, trained.job.training
    if settings.seq_length:
        model = model.model_copy(update={"seq_length": settings.seq_length})
    if settings.micro_batch_size:
        training = training.model_copy(update={"micro_batch_size": settings.micro_batch_size})
    resized = trained.job.model_copy(update={"training": training, "model": model})
    job = task_job(resized, machine, options)
    unchecked = "the model has no tokenizer beside it, so the data's tokenizer was not compared"
    warnings = (*trained.warnings, *(() if tokenizer else (unchecked,)))
    return Evaluation(trained, job, model.seq_length, corpora, settings.samples, warnings)


def _perplexity(family: str, loss: float) -> float | None:
    """Return exp(loss); None if the family's loss is not of tokens alone, or if exp overflows."""
    has_perplexity = get_family(family).has_perplexity and loss <= LARGEST_EXPONENT
    return math.exp(loss) if has_perplexity else None


@dataclass(frozen=True)
class EvalCorpus:
    """One named corpus.

    tokenizer: the tokenizer.json of its token ids; words: token ids that its text may use; prefix:
    of its indexed dataset, None for text files in `path` that are still to be tokenized; recorded:
    the loss that the training recorded at the checkpoint's step, None when it did not.
    """

    name: str
    path: Path
    tokenizer: Path
    words: int
    prefix: Path | None
    recorded: float | None = None


@dataclass(frozen=True)
class CorpusFinder:
    """Finds corpora for a model. tokenizer: the model's tokenizer.json, where it is known; split:
    which part of prepared data."""

    trained: TrainedModel
    tokenizer: Path | None
    split: SplitName

    def find(self, data: Sequence[str]) -> tuple[EvalCorpus, ...]:
        """The corpora named by `data`, each NAME=PATH or PATH; without any, the data of the run
        itself. Raises InputError with everything that is wrong with them."""
        named = [_parse_name(text) for text in data] if data else list(self._own_data())
        corpora: list[EvalCorpus] = []
        issues: list[Issue] = []
        for name, path in named:
            try:
                corpora.append(self._corpus(name, path, is_own=not data))
            except InputError as error:
                issues += error.issues
        if not named:
            message = f"{self.trained.origin} has no data of its own"
            hint = "name a folder of prepared data, or text files"
            issues.append(Issue("no-data", "--data", message, hint))
        issues += _repeated_names([corpus.name for corpus in corpora])
        if issues:
            raise InputError(issues)
        return tuple(corpora)

    def _own_data(self) -> Iterator[tuple[str, Path]]:
        """The data that the run trained and validated on, by name."""
        run, data = self.trained.run, self.trained.job.data
        if run is None:
            return
        yield self.split, Path(data.path) if data.path else RunDir(run).data
        for name, path in data.validation.items():
            yield name, Path(path)

    def _corpus(self, name: str, path: Path, *, is_own: bool) -> EvalCorpus:
        """One corpus. Raises InputError."""
        from mpctl.train.data.manifest import MANIFEST, open_prepared

        if not (path / MANIFEST).is_file() and not is_own:
            return self._text_corpus(name, path)
        prepared = open_prepared(path)
        if self.tokenizer and mean_other_text(self.tokenizer, prepared.tokenizer_path):
            raise InputError.of(
                "eval-tokenizer",
                name,
                f"{path} was prepared with another tokenizer than the model's, {self.tokenizer}: "
                "its token ids mean other text",
                f"prepare its text with --tokenizer {self.tokenizer}, or name the text files",
            )
        split = prepared.train if self.split == "train" else prepared.validation
        is_recorded = is_own and self.split == "validation"
        return EvalCorpus(
            name=name,
            path=path,
            tokenizer=prepared.tokenizer_path,
            words=prepared.tokenizer_vocab_size,
            prefix=split.prefix,
            recorded=_recorded_loss(self.trained, name) if is_recorded else None,
        )

    def _text_corpus(self, name: str, path: Path) -> EvalCorpus:
        from mpctl.train.data.tokenizer import load_tokenizer, vocabulary_size

        if not path.exists():
            hint = "name a folder of prepared data, or text files"
            raise InputError.of("no-such-file", name, f"{path} does not exist", hint)
        if self.tokenizer is None:
            raise InputError.of(
                "no-tokenizer",
                "--tokenizer",
                f"{path} is text, and the model has no tokenizer.json beside it",
                "name its tokenizer.json with --tokenizer",
            )
        words = vocabulary_size(load_tokenizer(self.tokenizer))
        return EvalCorpus(name, path, self.tokenizer, words, None)


@contextmanager
def tokenized(corpora: Sequence[EvalCorpus], on_progress: Progress) -> Iterator[list[Path]]:
    """The prefix of each corpus's indexed dataset; those of text files exist until the block
    ends."""
    from mpctl.train.data.prepare import write_texts
    from mpctl.train.data.tokenizer import load_tokenizer

    with tempfile.TemporaryDirectory(prefix="mpctl-") as folder:
        prefixes = []
        for number, corpus in enumerate(corpora):
            prefix = corpus.prefix or Path(folder) / str(number)
            if corpus.prefix is None:
                tokenizer = load_tokenizer(corpus.tokenizer)
                write_texts([corpus.path], tokenizer, prefix, on_progress=on_progress)
            prefixes.append(prefix)
        yield prefixes


def _parse_name(text: str) -> tuple[str, Path]:
    """NAME=PATH, or a path, which is named by its last part."""
    name, equals, path = text.partition("=")
    if equals and name and "/" not in name and not Path(text).exists():
        return name, Path(path)
    return Path(text).resolve().name, Path(text)


def _repeated_names(names: list[str]) -> Iterator[Issue]:
    for name in sorted({name for name in names if names.count(name) > 1}):
        message = f"two corpora are named {name!r}"
        yield Issue("same-name", "--data", message, "give them names: --data NAME=PATH")


def _recorded_loss(trained: TrainedModel, name: str) -> float | None:
    """The validation loss of one corpus that the training recorded at the checkpoint's step."""
    if trained.run is None:
        return None
    for record in RunDir(trained.run).records():
        if record["step"] == trained.step and "validation_loss" in record:
            further = record.get("validation_losses", {})
            return {"validation": record["validation_loss"], **further}.get(name)
    return None
