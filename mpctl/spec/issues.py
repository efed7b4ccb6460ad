"""pydantic's errors about a job as issues in the words of a job file, each with a way out."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from mpctl.core.errors import Issue
from mpctl.spec.families import family_synonyms
from mpctl.spec.model import DERIVED
from mpctl.spec.names import TABLES, keys_at, tables_with
from mpctl.spec.presets import preset_names
from mpctl.spec.releases import release_hint
from mpctl.spec.synonyms import LLAMA, LLAMAS, MEANT, NOT_OFFERED, VALUES

LONGEST_VALUE = 60
# Ways out where TOML has another type, by pydantic's name of the error.
TYPES = {
    "list_type": "write a list: --set '{where}=[{value}]'",
    "dict_type": "write a table: --set '{where}={{name = \"value\"}}'",
    "model_type": "write a table: --set '{where}={{name = \"value\"}}'",
    "string_type": "write a text: --set '{where}=\"{text}\"'",
}


def schema_issues(details: Iterable[dict[str, Any]]) -> list[Issue]:
    """The issues for pydantic's errors, one for each cause."""
    return [_issue_of(detail) for detail in details if not _is_consequence(detail)]


def joined_details(error: ValidationError) -> list[dict[str, Any]]:
    """pydantic's errors. Where a value may be a boolean or a word, its two errors are joined:
    `model.qk_norm.bool` and `model.qk_norm.literal['width']` become `model.qk_norm`."""
    details: list[dict[str, Any]] = [dict(d) for d in error.errors(include_url=False)]
    flags = {detail["loc"][:-1] for detail in details if detail["type"] == "bool_type"}
    joined = []
    for detail in details:
        key, branch = detail["loc"][:-1], str(detail["loc"][-1])
        if key in flags and branch.startswith("literal["):
            words = detail["msg"].removeprefix("Input should be ")
            before = "true, false, " if " or " in words else "true, false or "
            message = f"Input should be {before}{words}"
            joined.append({**detail, "loc": key, "msg": message})
        elif not (key in flags and branch == "bool"):
            joined.append(detail)
    return joined


def key_path(detail: dict[str, Any]) -> list[Any]:
    """The path in the job; pydantic adds one more part for a bad key of a free table."""
    return [part for part in detail["loc"] if part != "[key]"]


def _is_consequence(detail: dict[str, Any]) -> bool:
    """Whether it is a model key that follows from another one, whose absence is reported."""
    path = key_path(detail)
    return detail["type"] == "missing" and path[0] == "model" and path[-1] in DERIVED


def _issue_of(detail: dict[str, Any]) -> Issue:
    path = [str(part) for part in key_path(detail)]
    where = ".".join(path)
    if detail["type"] == "extra_forbidden":
        hint = nearest(path, detail.get("input"))
        return Issue("unknown-key", where, "there is no such setting", hint)
    if detail["type"] == "missing":
        start = "; or start from a preset, --model gpt2" if path[0] == "model" else ""
        hint = f"give {where}{start}"
        return Issue("missing", where, "is required and was not given", hint)
    as_key = " as a key" if detail["loc"][-1] == "[key]" else ""
    message = detail["msg"][0].lower() + detail["msg"][1:]
    message = re.sub(r"valid dictionary( or instance of \w+)?", "table", message)
    shown = _shown(detail.get("input"))
    context = detail.get("ctx", {})
    legal = context.get("expected", "") if detail["type"] == "literal_error" else ""
    hint = str(context.get("hint", ""))
    if detail["type"] in TYPES and isinstance(value := detail.get("input"), str | int | float):
        hint = TYPES[detail["type"]].format(where=where, value=json.dumps(value), text=value)
    if legal:
        hint = _value_hint(where, detail.get("input"), re.findall(r"'([^']*)'", legal))
    bounds = (("le", "at most"), ("ge", "at least"))
    allowed = [f"{words} {context[key]}" for key, words in bounds if key in context]
    hint = hint or (f"use {allowed[0]}" if allowed else "")
    return Issue("bad-value", where, f"{shown} is not allowed{as_key}: {message}", hint)


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and value.bit_length() > 128:  # Python may refuse to print it
        return f"an integer of {value.bit_length()} bits"
    text = "null" if value is None else repr(value)  # as in JSON, the only format that has it
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def nearest(path: list[str], value: Any = None) -> str:
    """A hint for an unknown setting: the setting that other software calls so, or the nearest keys.

    value: what it was set to; if it is a table, its keys are looked up as well.
    """
    *table, key = path
    here, name = keys_at(table), key.lower().replace("-", "_")
    if name in NOT_OFFERED:
        return NOT_OFFERED[name]
    if isinstance(value, dict) and (inner := [MEANT[k] for k in value if k in MEANT]):
        return f"use {', '.join(inner)}"
    if name in MEANT and MEANT[name] != ".".join(path):
        return f"use {MEANT[name]}"
    if near := difflib.get_close_matches(name, here, n=2):
        return _did_you_mean(".".join([*table, key]) for key in near)
    if tables := tables_with(name):
        return _did_you_mean(f"{found}.{name}" for found in tables)
    others = {key: f"{table}.{key}" for table in TABLES for key in keys_at([table])}
    others = others if len(name) < 4 else MEANT | others
    if near := difflib.get_close_matches(name, others, n=1, cutoff=0.5 if len(name) < 4 else 0.75):
        return _did_you_mean([others[near[0]]])
    return f"keys here: {', '.join(here)}" if here else ""


def _did_you_mean(names: Iterable[str]) -> str:
    return f"did you mean {' or '.join(names)}?"


def _value_hint(where: str, value: Any, legal: list[str]) -> str:
    """A hint for a value that is not a legal word: the word for what other software calls so."""
    if not isinstance(value, str | bool):
        return ""
    text = str(value).lower()
    plain = text.replace("-", "_")
    if where == "model.family" and plain.replace("_", "").replace(".", "") in LLAMAS:
        presets = [name for name in preset_names("models") if "llama" in name]
        return f"{LLAMA}: {', '.join(presets)}"
    if where == "training.runtime" and (release := release_hint(text)):
        return f"use {release}"
    synonyms = family_synonyms() if where == "model.family" else VALUES.get(where, {})
    meant = [ours for ours, names in synonyms.items() if plain in names]
    meant += [word for word in legal if word.replace("-", "_") == plain]
    near = difflib.get_close_matches(text, legal, n=2)
    alike = [difflib.SequenceMatcher(None, word, text).ratio() for word in near]
    if len(set(alike)) == len(alike):  # of two that are equally near, guess neither
        meant += near[:1]
    return f"use {meant[0]}" if meant else ""
