"""The origin of initial weights, checked from headers alone, so that a launch can refuse at once.

Three kinds of directory: Hugging Face's (hub.py), one that `mpctl checkpoint import` wrote, and a
run (saved.py). Here: which of them a path is, and whether a model may start from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mpctl.core.errors import InputError, Issue
from mpctl.records.checkpoint.manifest import MANIFEST, BaseReference, sha256
from mpctl.records.checkpoint.saved_model import SavedModel, open_saved
from mpctl.spec.adapter import AdapterSpec
from mpctl.spec.model import ModelSpec
from mpctl.train.data.extend import TokenizerExtension
from mpctl.train.weights.hub import Hub, open_hub

FRAGMENT = "model.toml"
# Settings in which a model may differ from the one whose weights it starts from.
FREE = ("name", "source", "hub_id", "vocab_divisor", "seq_length", "decoder_seq_length", "attention")


def open_origin(path: Path) -> Hub | SavedModel:
    """Open the source of initial weights. Raises InputError with all of its faults.

    A path may also be one checkpoint of a run or of an import, RUN/checkpoints/step-N.
    """
    if path.parent.name == "checkpoints" and (path / MANIFEST).is_file():
        folder = path.parent.parent
        fragment = folder / FRAGMENT
        return open_saved(folder, fragment if fragment.is_file() else folder / "job.json", path)
    if (path / FRAGMENT).is_file():
        return open_saved(path, path / FRAGMENT)
    if (path / "job.json").is_file() and (path / "checkpoints").is_dir():
        return open_saved(path, path / "job.json")
    if (path / "config.json").is_file():
        return open_hub(path)
    hint = "name a Hugging Face directory, what `mpctl checkpoint import` wrote, or a run"
    if not path.exists():
        raise InputError.of("no-weights", str(path), "no such file or folder", hint)
    if (path / "job.json").is_file():
        raise InputError.of("no-weights", str(path), "is a run, but has no checkpoint", "let the run save one")
    raise InputError.of("no-weights", str(path), "holds no config.json, no import and no run with a checkpoint", hint)


def open_base(checkpoint: Path, reference: BaseReference) -> Hub | SavedModel:
    """The weights that the adapters of a checkpoint add to. Raises InputError where they are gone."""
    path = Path(reference.path)
    if not path.exists():
        message = f"is gone, and the adapters in {checkpoint} add to it"
        raise InputError.of("adapter-base", str(path), message, "put it back, or a link to where it is now")
    return open_origin(path)


def origin_adapter(origin: Hub | SavedModel) -> AdapterSpec | None:
    """The adapters at an origin, None where it has none."""
    return origin.adapter if isinstance(origin, SavedModel) else None


def longest_sequence(origin: Hub | SavedModel, seen: frozenset[Path] = frozenset()) -> int:
    """The longest sequence of a model, in tokens: the larger of its limit and that of the weights
    it started from, if they still exist (a run may train on shorter sequences)."""
    limit = max(origin.model.max_positions, origin.model.seq_length)
    folder = origin.folder.resolve()
    if isinstance(origin, Hub) or origin.started_from is None or folder in seen:
        return limit
    try:
        before = open_origin(origin.started_from)
    except InputError:
        return limit
    return max(limit, longest_sequence(before, seen | {folder}))


def origin_issues(
    path: Path,
    model: ModelSpec,
    extension: TokenizerExtension | None = None,
    *,
    reserved: int = 0,
    adapter: AdapterSpec | None = None,
) -> list[Issue]:
    """Return all obstacles to starting `model` from the weights at `path`; reads headers only.

    extension: of the tokenizer of the data to train on, where it adds to an older one; reserved:
    ids at the top of the vocabulary that no text uses. adapter: that of the job.
    """
    try:
        origin = open_origin(path)
    except InputError as error:
        return list(error.issues)
    extended = is_extended(model, origin, extension, reserved=reserved)
    issues = [*differences(model, origin.model, path), *adapter_differences(adapter, origin_adapter(origin), path)]
    return [issue for issue in issues if not (extended and issue.where == "model.vocab")]


def is_extended(
    model: ModelSpec, origin: Hub | SavedModel, extension: TokenizerExtension | None, *, reserved: int = 0
) -> bool:
    """Whether the extension starts where the origin ends, so that it explains all new rows.

    The origin has the old tokenizer's vocabulary if the size is equal, or if the tokenizer is the
    same, which may leave rows unused.
    """
    if extension is None:
        return False
    words, path = origin.model.vocab - reserved, origin.tokenizer
    if words == extension.old_vocab_size:
        return model.vocab > origin.model.vocab
    if path is None or not extension.old_vocab_size < words <= model.vocab - reserved:
        return False
    return sha256(path) == extension.old_tokenizer_sha256


def adapter_differences(ours: AdapterSpec | None, theirs: AdapterSpec | None, path: Path) -> Iterator[Issue]:
    """Issues where a job cannot continue the adapters at its origin. A job without adapters merges them."""
    if ours is None or theirs is None:
        return
    hint = "use that, or start new adapters over merged weights: `mpctl checkpoint export RUN OUT --merged`"
    for key in ("kind", "rank", "scale", "targets", "modules_to_save"):
        now, then = _comparable(ours, key), _comparable(theirs, key)
        if now != then:
            where = f"training.adapter.{'alpha' if key == 'scale' else key}"
            of = ", as alpha / rank," if key == "scale" else ","
            yield Issue("init-from-adapter", where, f"{now!r}{of} but the adapters in {path} have {then!r}", hint)


def _comparable(adapter: AdapterSpec, key: str) -> object:
    """A setting as far as it changes tensors or what they compute."""
    if key == "kind":
        return "dora" if adapter.kind == "dora" else "lora"
    value = getattr(adapter, key)
    return sorted(value) if isinstance(value, list) else value


def differences(ours: ModelSpec, theirs: ModelSpec, path: Path) -> Iterator[Issue]:
    """Issues for keys in which the models differ in shape or in function."""
    free = FREE if ours.position == "learned" else (*FREE, "max_positions")
    for key in ModelSpec.model_fields:
        now, then = getattr(ours, key), getattr(theirs, key)
        if now != then and key not in free:
            hint = f"use model.{key} {then!r}"
            if key == "vocab" and now > then:
                hint += f", or data of a tokenizer of {then} extended to more: `mpctl data prepare"
                hint += " --extend-tokenizer`"
            yield Issue("init-from-model", f"model.{key}", f"{now!r}, but the weights in {path} are of {then!r}", hint)
