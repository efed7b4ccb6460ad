"""Whether the data and the initial weights of a job can be read and fit its model: checked before a
launch, from manifests, headers and tokenizers alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mpctl.core.errors import InputError, Issue
from mpctl.model.families import least_tokens, seq_length_for, special_tokens
from mpctl.records.checkpoint.folder import newest_checkpoint
from mpctl.records.checkpoint.manifest import MANIFEST, sha256
from mpctl.records.checkpoint.verify import find_damage
from mpctl.records.rundir.directory import RunDir
from mpctl.spec.chat import AS_PREPARED
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec

if TYPE_CHECKING:
    from mpctl.train.data.manifest import Prepared, Split


def data_issues(
    job: JobSpec, model: ModelSpec, resumed: RunDir | None, *, is_elsewhere: bool = False
) -> Iterator[Issue]:
    """Yield the issues of the prepared data or the corpus. resumed: the run that is continued; its data are used if the
    job names none; is_elsewhere: check only whether any are named."""
    if is_elsewhere and (job.data.path or job.data.corpus or resumed is not None):
        return
    if job.data.path is not None:
        yield from _prepared(job, model, Path(job.data.path))
    elif resumed is not None and resumed.data.is_dir():
        yield from _prepared(job, model, resumed.data)
    elif job.data.corpus is None:
        yield Issue(
            "no-data",
            "data",
            "neither data.path nor data.corpus names the text to train on",
            "use --set 'data.corpus=[\"python-stdlib\"]', or `mpctl data prepare` and --set data.path=FOLDER",
        )
    else:
        yield from _corpus(job)


def initial_weight_issues(job: JobSpec, model: ModelSpec, resumed: RunDir | None) -> list[Issue]:
    """Return the issues of the weights of training.init_from. resumed: the run that is continued; with a checkpoint, it
    does not read them."""
    if job.training.init_from is None or (resumed is not None and resumed.last_checkpoint()):
        return []
    from mpctl.train.data.extend import find_extension
    from mpctl.train.data.tokenizer import added_tokens, find_tokenizer, missing_tokens
    from mpctl.train.weights.origin import origin_issues

    origin, tokenizer_path = Path(job.training.init_from), job.data.path or job.data.tokenizer
    issues = _origin_damage(origin)
    if issues or tokenizer_path is None:
        return issues or origin_issues(origin, model, adapter=job.training.adapter)
    tokenizer = find_tokenizer(Path(tokenizer_path))
    try:
        extension, known = find_extension(tokenizer), added_tokens(tokenizer)
    except (InputError, OSError):  # data_issues reports it
        return []
    reserved = len(missing_tokens(known, special_tokens(model)))
    return origin_issues(origin, model, extension, reserved=reserved, adapter=job.training.adapter)


def _origin_damage(origin: Path) -> list[Issue]:
    """Return the damage of mpctl's own checkpoint in `origin`, by sizes and records; the ranks check the bytes that
    they read."""
    if (origin / "config.json").is_file():
        return []
    folder = origin if (origin / MANIFEST).is_file() else newest_checkpoint(origin)
    return [] if folder is None else find_damage(folder, hashed=False)


def _prepared(job: JobSpec, model: ModelSpec, path: Path) -> Iterator[Issue]:
    from mpctl.train.data.manifest import open_prepared, open_validations

    try:
        prepared = open_prepared(path)
        folders = {name: Path(folder) for name, folder in job.data.validation.items()}
        others = open_validations(prepared, folders)
    except InputError as error:
        yield from error.issues
        return
    yield from _vocabulary(model, prepared.tokenizer_path, prepared.tokenizer_vocab_size)
    for one in (prepared, *others.values()):
        yield from _chat(job, model, one, is_main=one is prepared)
    validations = [other.validation for other in (prepared, *others.values()) if other.chat is None]
    for split in (prepared.train, *validations) if prepared.chat is None else validations:
        is_needed = split is prepared.train or job.training.eval_samples > 0
        if is_needed and split.tokens < (least := least_tokens(model)):
            yield Issue(
                "too-few-tokens",
                "model.seq_length",
                f"{split.prefix} has {split.tokens} tokens, but a sample of {model.seq_length} takes {least}",
                _more_tokens(model, split, prepared),
            )


def _chat(job: JobSpec, model: ModelSpec, prepared: Prepared, *, is_main: bool) -> Iterator[Issue]:
    """Prepared chat data has rows of the model's length, and is what the job says that it is."""
    chat, named = prepared.chat, job.data.chat
    if chat is not None and chat.seq_length != model.seq_length:
        yield Issue(
            "chat-seq-length",
            "model.seq_length",
            f"{model.seq_length}, but the rows of {prepared.path} hold {chat.seq_length} tokens",
            f"use model.seq_length {chat.seq_length}, or `mpctl data chat` with --seq-length {model.seq_length}",
        )
    if not is_main or (chat is None and named is None):
        return
    if chat is None or named is None:
        holds, says = ("text", "conversations") if chat is None else ("conversations", "text")
        message = f"{prepared.path} holds {holds}, but the job is of {says}"
        hint = "leave [data.chat] out, or use `mpctl data chat`" if chat is None else "name it: data.path"
        yield Issue("chat-as-prepared", "data.chat", message, hint)
        return
    for key in AS_PREPARED:
        if (was := getattr(chat, key)) != (now := getattr(named, key)):
            message = f"{now}, but {prepared.path} was prepared with {was}"
            yield Issue("chat-as-prepared", f"data.chat.{key}", message, f"use {was}, or prepare the data again")


def _more_tokens(model: ModelSpec, split: Split, prepared: Prepared) -> str:
    """The ways out of a split that holds no sample."""
    size = seq_length_for(model, split.tokens)
    shorter = f"use model.seq_length {size} or less, or " if size else ""
    is_held_out = split is prepared.validation
    more = "prepare with a larger --validation-fraction, or more text"
    return shorter + (more if is_held_out else "prepare more text")


def _vocabulary(model: ModelSpec, tokenizer: Path, words: int) -> Iterator[Issue]:
    """The token ids of the text and the family's special tokens must fit the embedding."""
    from mpctl.train.data.tokenizer import added_tokens, special_ids

    if words > model.vocab:
        yield Issue(
            "vocabulary-fits-model",
            "model.vocab",
            f"{model.vocab} rows, but the tokenizer {tokenizer} has {words} entries",
            f"use model.vocab {words} or more",
        )
        return
    try:
        special_ids(added_tokens(tokenizer), special_tokens(model), vocab=model.vocab, words=words)
    except InputError as error:
        yield from error.issues


def _corpus(job: JobSpec) -> Iterator[Issue]:
    from mpctl.train.data.conversations import find_chat_files
    from mpctl.train.data.corpus import find_files
    from mpctl.train.data.texts import Findings
    from mpctl.train.data.tokenizer import find_tokenizer

    data = job.data
    if data.chat is not None and data.tokenizer is None:
        message = "conversations need the tokenizer of the model, with its chat template"
        yield Issue("chat-tokenizer", "data.tokenizer", message, "name its folder: --set data.tokenizer=FOLDER")
    try:
        if data.chat is not None:
            find_chat_files(data.corpus or [], Findings(), data.encoding)
        else:
            find_files(data.corpus or [], max_bytes=data.max_bytes, encoding=data.encoding)
    except InputError as error:
        yield from error.issues
    if data.tokenizer is not None and not find_tokenizer(Path(data.tokenizer)).is_file():
        message = f"{data.tokenizer} is neither a file nor a folder with a tokenizer.json"
        hint = "name a tokenizer.json, a folder of prepared data or a run"
        yield Issue("no-such-file", "data.tokenizer", message, hint)


def mean_other_text(first: Path, second: Path) -> bool:
    """Whether two tokenizer.json files differ, so that a token id means other text in each."""
    return sha256(first) != sha256(second)


def tokenizer_warnings(job: JobSpec) -> Iterator[str]:
    """A warning when the initial weights were trained with a tokenizer that is neither that of the
    data nor the one it was extended from. Not an error, because a new vocabulary may be wanted."""
    from mpctl.train.data.extend import find_extension
    from mpctl.train.data.tokenizer import find_tokenizer
    from mpctl.train.weights.origin import open_origin

    if job.training.init_from is None:
        return
    origin, path = Path(job.training.init_from), job.data.path or job.data.tokenizer
    try:
        known = open_origin(origin).tokenizer
        used = None if path is None else find_tokenizer(Path(path))
        if known is None:
            return
        if used is not None and not mean_other_text(used, known):
            return
        extension = None if used is None else find_extension(used)
        if extension is not None and extension.old_tokenizer_sha256 == sha256(known):
            return
    except (InputError, OSError):  # data_issues reports it
        return
    other = "a new one that is trained on data.corpus" if used is None else str(used)
    hint = (
        f"set data.tokenizer={known}"
        if used is None or job.data.path is None
        else f"prepare them with `mpctl data prepare --tokenizer {known}`"
    )
    yield (
        f"training.init_from {origin} was trained with the tokenizer {known}, but the data use "
        f"another, {other}: token ids mean other text to these weights; {hint}, or extend it with "
        f"`mpctl data prepare --tokenizer {known} --extend-tokenizer`, unless a new vocabulary is "
        "wanted"
    )
