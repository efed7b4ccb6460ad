"""The texts that `mpctl eval` computes the loss of: prepared data, or text files that are tokenized
in a temporary folder. Nothing is written where the model or the texts are."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mpctl.checkpoint.verify import Progress
from mpctl.errors import InputError, Issue
from mpctl.inference.trained_model import TrainedModel
from mpctl.launch.tokenizers import mean_other_text
from mpctl.rundir.directory import RunDir

SplitName = Literal["train", "validation"]


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
        from mpctl.data.manifest import MANIFEST, open_prepared

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
        from mpctl.data.tokenizer import load_tokenizer, vocabulary_size

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
    from mpctl.data.prepare import write_texts
    from mpctl.data.tokenizer import load_tokenizer

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
