"""The loss of a trained model on text: prepared data, or text files tokenized for the occasion.

Text that is tokenized lies in a temporary folder meanwhile; nothing is written where the model or
the data lie.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mpctl.errors import InputError, Issue, RunFailed
from mpctl.families import get_family
from mpctl.launch.machine import Machine
from mpctl.launch.task import Answer, task_answers, task_job
from mpctl.launch.tokenizers import mean_other_text
from mpctl.launch.trained_model import TrainedModel, open_trained
from mpctl.launch.verify import Progress, unseen
from mpctl.rundir.directory import RunDir
from mpctl.spec.job import JobSpec

SplitName = Literal["train", "validation"]

LARGEST_EXPONENT = 700  # exp of more overflows a double


@dataclass(frozen=True)
class EvalCorpus:
    """Text by a name. prefix: of its indexed dataset, None for text files in `path` that are yet to
    be tokenized. recorded: the loss that the training noted at this checkpoint's step."""

    name: str
    path: Path
    tokenizer: Path
    words: int
    prefix: Path | None
    recorded: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """Everything that is asked, checked, before a worker starts."""

    trained: TrainedModel
    job: JobSpec
    corpora: tuple[EvalCorpus, ...]
    samples: int | None
    warnings: tuple[str, ...]

    def run(self, on_progress: Progress) -> list[Answer]:
        """A row a corpus; on_progress(stage, done, total) is told of `load the model` and of every
        corpus."""
        found: list[Answer] = []
        with _tokenized(self.corpora, on_progress) as prefixes:
            on_progress("load the model", 0, 1)
            with task_answers(self.job, self._request(prefixes)) as said:
                for answer in said:
                    if answer["event"] == "loaded":
                        on_progress("load the model", 1, 1)
                        continue
                    corpus = self.corpora[answer["corpus"]]
                    if answer["event"] == "progress":
                        on_progress(corpus.name, answer["done"], answer["total"])
                    else:
                        found.append(self._row(corpus, answer))
        if len(found) != len(self.corpora):
            raise RunFailed("the workers ended before all corpora were evaluated")
        return found

    def _request(self, prefixes: Sequence[Path]) -> Answer:
        corpora = [
            {"prefix": str(prefix.resolve()), "tokenizer": str(corpus.tokenizer.resolve()),
             "words": corpus.words}
            for corpus, prefix in zip(self.corpora, prefixes, strict=True)
        ]  # fmt: skip
        return {"task": "evaluate", "origin": str(self.trained.origin.resolve()),
                "corpora": corpora, "samples": self.samples}  # fmt: skip

    def _row(self, corpus: EvalCorpus, answer: Answer) -> Answer:
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
        """Whether the training's validations took these samples: its `eval_samples`, or all where
        there are fewer."""
        then = self.trained.job.training.eval_samples
        takes_all = self.samples is None or samples < self.samples
        is_same_length = self.job.model == self.trained.model
        return is_same_length and (samples == then or (samples < then and takes_all))


def plan_evaluation(
    path: Path, data: Sequence[str], machine: Machine, *, step: int | None = None,
    samples: int | None = None, split: SplitName = "validation", tokenizer: Path | None = None,
    sizes: Mapping[str, int] | None = None, device: str = "auto", dtype: str | None = None,
    micro_batch: int | None = None, seq_length: int | None = None, on_progress: Progress = unseen,
) -> Evaluation:  # fmt: skip
    """data: folders of prepared data, text files or folders of them, each NAME=PATH or PATH; by
    default the run's own validation data. Raises InputError with all that is wrong with them."""
    from mpctl.data.tokenizer import find_tokenizer

    trained = open_trained(path, step=step, on_progress=on_progress)
    found = trained.tokenizer if tokenizer is None else find_tokenizer(tokenizer)
    corpora, issues = _corpora(trained, data, found, split)
    if issues:
        raise InputError(issues)
    job = _resized(trained.job, micro_batch, seq_length)
    job = task_job(job, machine, dict(sizes or {}), device=device, dtype=dtype)
    unknown = "the model has no tokenizer beside it: whether the data's is its own is not checked"
    warnings = (*trained.warnings, *(() if found else (unknown,)))
    return Evaluation(trained, job, tuple(corpora), samples, warnings)


def _resized(job: JobSpec, micro_batch: int | None, seq_length: int | None) -> JobSpec:
    assert job.model is not None
    given = {"micro_batch_size": micro_batch} if micro_batch else {}
    longer = {"seq_length": seq_length} if seq_length else {}
    return job.model_copy(update={
        "training": job.training.model_copy(update=given),
        "model": job.model.model_copy(update=longer),
    })  # fmt: skip


def evaluation_document(evaluation: Evaluation, rows: list[Answer]) -> Answer:
    """Schema mpctl.eval/1."""
    trained, job = evaluation.trained, evaluation.job
    assert job.model is not None
    return {
        "schema": "mpctl.eval/1",
        "model": str(trained.run or trained.origin),
        "checkpoint": str(trained.origin),
        "step": trained.step,
        "family": trained.model.family,
        "seq_length": job.model.seq_length,
        "sizes": job.sizes,
        "micro_batch_size": job.training.micro_batch_size,
        "device": job.launch.device,
        "dtype": job.training.dtype,
        "corpora": rows,
    }


def _perplexity(family: str, loss: float) -> float | None:
    """exp(loss), None where the family's loss is not one of tokens alone or exp overflows."""
    has_perplexity = get_family(family).has_perplexity and loss <= LARGEST_EXPONENT
    return math.exp(loss) if has_perplexity else None


def _corpora(
    trained: TrainedModel, data: Sequence[str], tokenizer: Path | None, split: SplitName
) -> tuple[list[EvalCorpus], list[Issue]]:
    found: list[EvalCorpus] = []
    issues: list[Issue] = []
    own = [] if data else list(_own_data(trained, split))
    if not data and not own:
        issues.append(Issue("no-data", "--data", f"{trained.origin} has no data of its own",
                            "name a folder of prepared data, or text files"))  # fmt: skip
    for name, path in [*own, *map(_named, data)]:
        try:
            found.append(_corpus(trained, name, path, tokenizer, split, is_own=not data))
        except InputError as error:
            issues += error.issues
    names = [corpus.name for corpus in found]
    for name in sorted({name for name in names if names.count(name) > 1}):
        issues.append(Issue("same-name", "--data", f"two corpora are called {name!r}",
                            "give names: --data NAME=PATH"))  # fmt: skip
    return found, issues


def _own_data(trained: TrainedModel, split: SplitName) -> Iterator[tuple[str, Path]]:
    """The data that the run trained and validated on, by name."""
    if trained.run is None:
        return
    data = trained.job.data
    yield split, Path(data.path) if data.path else trained.run / "data"
    for name, path in data.validation.items():
        yield name, Path(path)


def _named(text: str) -> tuple[str, Path]:
    """NAME=PATH, or a path that is called by its last part."""
    name, equals, path = text.partition("=")
    if equals and name and "/" not in name and not Path(text).exists():
        return name, Path(path)
    return Path(text).resolve().name, Path(text)


def _corpus(
    trained: TrainedModel, name: str, path: Path, tokenizer: Path | None, split: SplitName, *,
    is_own: bool,
) -> EvalCorpus:  # fmt: skip
    """One corpus, prepared or of text files. Raises InputError."""
    from mpctl.data.manifest import MANIFEST, open_prepared
    from mpctl.data.tokenizer import load_tokenizer, vocabulary_size

    if not (path / MANIFEST).is_file() and not is_own:
        return _raw(name, path, tokenizer, vocabulary_size, load_tokenizer)
    prepared = open_prepared(path)
    if tokenizer is not None and mean_other_text(tokenizer, prepared.tokenizer_path):
        raise InputError.of(
            "eval-tokenizer", name, f"{path} was prepared with another tokenizer than the model's, "
            f"{tokenizer}: its token ids mean other text", f"prepare its text with --tokenizer "
            f"{tokenizer}, or name the text files themselves",
        )  # fmt: skip
    held = prepared.train if split == "train" else prepared.validation
    recorded = _recorded(trained, name) if is_own and split == "validation" else None
    return EvalCorpus(
        name, path, prepared.tokenizer_path, prepared.tokenizer_vocab_size, held.prefix, recorded
    )


def _raw(
    name: str, path: Path, tokenizer: Path | None, size: Callable[[Any], int],
    load: Callable[[Path], Any],
) -> EvalCorpus:  # fmt: skip
    if not path.exists():
        raise InputError.of("no-such-file", name, f"{path} does not exist",
                            "name a folder of prepared data, or text files")  # fmt: skip
    if tokenizer is None:
        raise InputError.of("no-tokenizer", "--tokenizer", f"{path} is text, and the model has no "
                            "tokenizer.json beside it", "name its tokenizer.json")  # fmt: skip
    return EvalCorpus(name, path, tokenizer, size(load(tokenizer)), None)


def _recorded(trained: TrainedModel, name: str) -> float | None:
    """The loss of one corpus that the training noted at the checkpoint's step."""
    assert trained.run is not None
    for record in RunDir(trained.run).records():
        if record["step"] == trained.step and "validation_loss" in record:
            named = record.get("validation_losses", {})
            found: float | None = {"validation": record["validation_loss"], **named}.get(name)
            return found
    return None


@contextmanager
def _tokenized(corpora: Sequence[EvalCorpus], on_progress: Progress) -> Iterator[list[Path]]:
    """The prefix of every corpus; those of text files are there until the block ends."""
    from mpctl.data.encode import write_texts
    from mpctl.data.tokenizer import load_tokenizer

    with tempfile.TemporaryDirectory(prefix="mpctl-") as folder:
        prefixes = []
        for number, corpus in enumerate(corpora):
            prefix = corpus.prefix or Path(folder) / str(number)
            if corpus.prefix is None:
                write_texts([corpus.path], load_tokenizer(corpus.tokenizer), prefix,
                            on_progress=on_progress)  # fmt: skip
            prefixes.append(prefix)
        yield prefixes
