"""The tokenizer as transformers loads it, and the tokens that begin, end and pad a text.

Tokens that training added to the text, at ids that its tokenizer does not have (train/data/tokenizer.py),
enter tokenizer.json under those ids; otherwise the file is copied to the byte. Next to it are
tokenizer_config.json and special_tokens_map.json (which token has which role) and, for a class that
generates, generation_config.json. A BERT of 310 entries and a tokenizer of 280 without
[CLS], [SEP] and [MASK] exports these as 309, 308 and 307, and texts are framed `[CLS] A [SEP]`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpctl.core.errors import InputError
from mpctl.model.families import special_tokens
from mpctl.model.families.scheme import Scheme
from mpctl.spec.model import ModelSpec
from mpctl.train.data.tokenizer import added_tokens, load_tokenizer, special_ids, tokenizer_text, vocabulary_size

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Tokens:
    """A model's tokenizer file and the ids of its special tokens by their names."""

    path: Path
    ids: Mapping[str, int]
    missing: tuple[str, ...]
    """Names of special tokens that the file lacks because training reserved ids for them."""


def find_tokens(model: ModelSpec, tokenizer: Path) -> Tokens:
    """Special tokens that the tokenizer has, and those that training reserves ids for.

    Where the vocabulary has no room for these, the model was never trained with this tokenizer.
    """
    added = added_tokens(tokenizer)
    words = vocabulary_size(load_tokenizer(tokenizer))
    try:
        reserved = special_ids(added, special_tokens(model), vocab=model.vocab, words=words)
    except InputError:
        reserved = {}
    missing = tuple(name for name in reserved if name not in added)
    return Tokens(tokenizer, added | reserved, missing)


def token_settings(tokens: Tokens | None, scheme: Scheme) -> dict[str, int | None]:
    """The ids that config.json names, None for those that are not known."""
    ids = {} if tokens is None else tokens.ids
    return {key: next((ids[name] for name in names if name in ids), None) for key, names in scheme.tokens.items()}


def write_tokenizer(folder: Path, tokens: Tokens, model: ModelSpec, scheme: Scheme) -> list[str]:
    """Write the files to `folder`; returns notes on what the files cannot represent."""
    notes = _write_tokens(folder / TOKENIZER, tokens, scheme)
    roles = token_roles(tokens, scheme)
    _write_json(folder / "tokenizer_config.json", tokenizer_config(tokens, model, scheme))
    _write_json(folder / "special_tokens_map.json", roles)
    if scheme.generates:
        ids = {f"{role}_id": tokens.ids[name] for role, name in roles.items() if f"{role}_id" in GENERATION_IDS}
        known = {key: token for key, token in token_settings(tokens, scheme).items() if token is not None}
        _write_json(folder / "generation_config.json", {**ids, **known})
    return notes


GENERATION_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def token_roles(tokens: Tokens, scheme: Scheme) -> dict[str, str]:
    """`pad_token` and others: the first of the possible names that the tokenizer has."""
    chosen = {role: next((name for name in names if name in tokens.ids), None) for role, names in scheme.roles.items()}
    return {role: name for role, name in chosen.items() if name is not None}


def tokenizer_config(tokens: Tokens, model: ModelSpec, scheme: Scheme) -> dict[str, Any]:
    """A causal model continues its input, so batches are padded on the left."""
    roles = token_roles(tokens, scheme)
    others = [name for name in special_tokens(model) if name not in roles.values()]
    relative = model.position == "relative"
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **roles,
        **({"additional_special_tokens": others} if others else {}),
        "padding_side": "left" if scheme.continues_text else "right",
        "model_max_length": model.seq_length if relative else model.max_positions,
        "model_input_names": ["input_ids", *(["token_type_ids"] if scheme.has_token_types else []), "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }


def _write_tokens(path: Path, tokens: Tokens, scheme: Scheme) -> list[str]:
    document = json.loads(tokenizer_text(tokens.path))
    known = all(part in tokens.ids for part in scheme.frame if part not in "AB")
    framed = bool(scheme.frame) and known and document.get("post_processor") is None
    if not tokens.missing and not framed:
        shutil.copyfile(tokens.path, path)
        return []
    if tokens.missing:
        vocabulary = document["model"].get("vocab")
        if not isinstance(vocabulary, dict):  # Unigram: a list, whose ids leave no gap
            shutil.copyfile(tokens.path, path)
            kind = document["model"].get("type")
            names = ", ".join(tokens.missing[:3]) + (" ..." if len(tokens.missing) > 3 else "")
            return [f"tokenizer.json lacks {names}: tokens cannot be added to a {kind} tokenizer"]
        vocabulary.update({name: tokens.ids[name] for name in tokens.missing})
        document["added_tokens"] = [*document.get("added_tokens", []), *_entries(tokens)]
    if framed:
        document["post_processor"] = _frame(scheme.frame, tokens.ids)
    _write_json(path, document)
    return []


def _entries(tokens: Tokens) -> Iterator[dict[str, Any]]:
    """A mask replaces a piece with the space before it, as a piece of text has one."""
    for name in tokens.missing:
        yield {
            "id": tokens.ids[name],
            "content": name,
            "single_word": False,
            "lstrip": name == "[MASK]",
            "rstrip": False,
            "normalized": False,
            "special": True,
        }


def _frame(frame: tuple[str, ...], ids: Mapping[str, int]) -> dict[str, Any]:
    """A post-processor that puts special tokens around texts; frame: of two texts, A and B.

    One text is framed by the part before B.
    """
    steps: list[dict[str, Any]] = []
    kind, ends = 0, len(frame)
    for part in frame:
        if part == "B":
            kind, ends = 1, len(steps)
        name = "Sequence" if part in "AB" else "SpecialToken"
        steps.append({name: {"id": part, "type_id": kind}})
    named = {part: {"id": part, "ids": [ids[part]], "tokens": [part]} for part in frame if part not in "AB"}
    return {"type": "TemplateProcessing", "single": steps[:ends], "pair": steps, "special_tokens": named}


def _write_json(path: Path, document: Any) -> None:
    text = json.dumps(document, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", "utf-8")
