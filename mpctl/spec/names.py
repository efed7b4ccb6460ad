"""How a setting may be named, and which one is probably meant by a name that does not exist.

A setting's full name is its table and key, `parallel.tp`. Where a key stands in one table alone,
the key is enough: `tp`, `dtype`, `micro-batch-size`. Both names serve everywhere: with `--set`, in
a job file outside of its tables, in a line of a batch, and as the settings of a function.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mpctl.errors import InputError
from mpctl.spec.base import fields_at
from mpctl.spec.families import family_synonyms
from mpctl.spec.job import JobSpec
from mpctl.spec.presets import PRESET_TABLES, preset_names
from mpctl.spec.renamed import old_keys
from mpctl.spec.synonyms import LLAMA, LLAMAS, MEANT, VALUES

Raw = dict[str, Any]
DEEPEST = 3  # tables of a job within each other: cluster.device.kernels
TABLES = ("cluster", "model", "parallel", "training", "checkpoint", "data", "launch")


def full_name(key: str) -> str:
    """`tp` -> `parallel.tp`; a full name, and one that is unknown or ambiguous, as it stands."""
    name = key.replace("-", "_")
    if "." in key or name in keys_at([]):
        return key
    tables = tables_with(name)
    return f"{tables[0]}.{name}" if len(tables) == 1 else key


def tables_with(key: str) -> list[str]:
    """The tables of a job that have a key of this name; where none has, those that had it once."""
    today = [name for name in TABLES if key in keys_at([name])]
    return today or [name for name in TABLES if key in old_keys((name,))]


def full_names(settings: Mapping[str, Any]) -> Raw:
    """`{"tp": 2, "model": "gpt2"}` -> `{"parallel.tp": 2, "model": "gpt2"}`.

    Raises InputError where a setting is given under both names.
    """
    named: Raw = {}
    for key, value in settings.items():
        if (name := full_name(key)) in named:
            raise _given_twice(key if name != key else _short(settings, name), name)
        named[name] = value
    return named


def _short(settings: Mapping[str, Any], name: str) -> str:
    return next(key for key in settings if key != name and full_name(key) == name)


def with_full_names(raw: Mapping[str, Any]) -> Raw:
    """A job's tables, with each key that stands outside of them in its own:
    `{"tp": 2, "model": "gpt2", "model.layers": 4}` has the tables parallel and model.

    Raises InputError where a setting is given twice.
    """
    named = {name: key for key in raw if "." in (name := full_name(key))}
    outside = full_names({key: raw[key] for key in raw if "." in full_name(key)})
    tables = {key: value for key, value in raw.items() if "." not in full_name(key)}
    for name, value in outside.items():
        tables = _put(tables, name.split(".", DEEPEST), value, named[name])
    return tables


def _put(table: Raw, path: list[str], value: Any, key: str, above: str = "") -> Raw:
    """The table with a value at `path`. key: its name as it was given; above: the table's."""
    first, *rest = path
    name = f"{above}{first}"
    if not rest:
        if first in table:
            raise _given_twice(key, name)
        return {**table, first: value}
    inner = table.get(first) or {}
    inner = {"preset": inner} if isinstance(inner, str) else inner
    if not isinstance(inner, dict):
        raise _given_twice(key, name)
    return {**table, first: _put(inner, rest, value, key, f"{name}.")}


def _given_twice(key: str, name: str) -> InputError:
    where, message = (key, f"is given beside {name}") if key != name else (name, "is given twice")
    return InputError.of("given-twice", where, message, "leave one of them out")


def keys_at(path: list[str]) -> list[str]:
    """Keys that a file may hold in the table at `path`; [] where there is no such table."""
    fields = fields_at(JobSpec, path)
    starts = ["preset"] if fields and tuple(path) in PRESET_TABLES else []
    starts += ["hf_config"] if path == ["model"] else []
    return [*fields, *starts]


def nearest(path: list[str], value: Any = None) -> str:
    """A hint for an unknown setting: what other software calls so, or the nearest keys.

    value: what it was set to; of a table, the keys in it are looked at as well.
    """
    *table, key = path
    import difflib  # only where something is wrong

    if isinstance(value, dict) and (inner := [MEANT[k] for k in value if k in MEANT]):
        return f"use {', '.join(inner)}"
    here, name = keys_at(table), key.lower().replace("-", "_")
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


def value_hint(where: str, value: Any, legal: list[str]) -> str:
    """A hint for a value that is none of the legal words: what other software calls so."""
    if not isinstance(value, str | bool):
        return ""
    import difflib

    text = str(value).lower()
    plain = text.replace("-", "_")
    if where == "model.family" and plain.replace("_", "").replace(".", "") in LLAMAS:
        presets = [name for name in preset_names("models") if "llama" in name]
        return f"{LLAMA}: {', '.join(presets)}"
    synonyms = family_synonyms() if where == "model.family" else VALUES.get(where, {})
    meant = [ours for ours, names in synonyms.items() if plain in names]
    meant += [word for word in legal if word.replace("-", "_") == plain]
    near = difflib.get_close_matches(text, legal, n=2)
    alike = [difflib.SequenceMatcher(None, word, text).ratio() for word in near]
    if len(set(alike)) == len(alike):  # of two that are as near, neither is a guess
        meant += near[:1]
    return f"use {meant[0]}" if meant else ""
