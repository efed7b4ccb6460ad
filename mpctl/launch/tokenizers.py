"""Whether the token ids of the data mean the same text to a model as in its training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mpctl.checkpoint.manifest import sha256
from mpctl.errors import InputError
from mpctl.spec.job import JobSpec


def mean_other_text(first: Path, second: Path) -> bool:
    """Whether two tokenizer.json files differ, so that a token id means other text in each."""
    return sha256(first) != sha256(second)


def tokenizer_warnings(job: JobSpec) -> Iterator[str]:
    """A warning when the initial weights were trained with a tokenizer that is neither that of the
    data nor the one it was extended from. Not an error, because a new vocabulary may be wanted."""
    if job.training.init_from is None:
        return
    origin = Path(job.training.init_from)
    try:
        known = _tokenizer_of(origin)
        used = _tokenizer_of_data(job)
        if known is None or (used is not None and _continues(used, known)):
            return
    except (InputError, OSError):  # data_checks.py reports it
        return
    other = "a new one that is trained on data.corpus" if used is None else str(used)
    hint = (f"set data.tokenizer={known}" if used is None or job.data.path is None else
            f"prepare them with `mpctl data prepare --tokenizer {known}`")  # fmt: skip
    yield (
        f"training.init_from {origin} was trained with the tokenizer {known}, but the data use "
        f"another, {other}: token ids mean other text to these weights; {hint}, or extend it with "
        f"`mpctl data prepare --tokenizer {known} --extend-tokenizer`, unless a new vocabulary is "
        "wanted"
    )


def _tokenizer_of(origin: Path) -> Path | None:
    from mpctl.weights.origin import open_origin

    return open_origin(origin).tokenizer


def _tokenizer_of_data(job: JobSpec) -> Path | None:
    """None when the launch trains a new one on data.corpus."""
    from mpctl.data.tokenizer import find_tokenizer

    path = job.data.path or job.data.tokenizer
    return None if path is None else find_tokenizer(Path(path))


def _continues(used: Path, known: Path) -> bool:
    """Whether `used` is `known`, or was extended from it."""
    from mpctl.data.extend import find_extension

    if not mean_other_text(used, known):
        return True
    extension = find_extension(used)
    return extension is not None and extension.old_tokenizer_sha256 == sha256(known)
