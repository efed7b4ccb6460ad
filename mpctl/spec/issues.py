"""What pydantic says of a job, in the words of a job file: one issue a cause, with a way out."""

from __future__ import annotations

import re
from typing import Any

from pydantic import ValidationError

from mpctl.errors import InputError, Issue
from mpctl.spec.model import DERIVED
from mpctl.spec.names import nearest, value_hint

LONGEST_VALUE = 60
EXPERTS, LATENT = "mixtures of experts", "multi-head latent attention (MLA)"
# Keys of models that are not planned yet: one issue tells all of a job.
NOT_PLANNED = {
    **dict.fromkeys(
        ("model.experts", "model.experts_per_token", "model.expert_ffn", "model.shared_expert_ffn",
         "model.dense_layers", "model.moe_layer_every", "parallel.ep", "parallel.etp"), EXPERTS),
    **dict.fromkeys(
        ("model.attention_kind", "model.q_lora_rank", "model.kv_lora_rank",
         "model.qk_nope_head_dim", "model.qk_rope_head_dim", "model.v_head_dim"), LATENT),
}  # fmt: skip


class SchemaError(InputError):
    """What the schema refuses. locations: pydantic's type of each error, with its key's path."""

    def __init__(self, error: ValidationError) -> None:
        details = [dict(detail) for detail in error.errors(include_url=False)]
        told: list[dict[str, Any]] = []
        experts: list[dict[str, Any]] = []
        for detail in details:
            is_theirs = detail["type"] == "extra_forbidden" and _name(detail) in NOT_PLANNED
            (experts if is_theirs else told).append(detail)
        issues = [_issue_of(d) for d in told if not _is_consequence(d)]
        super().__init__([*_not_planned(list(map(_name, experts))), *issues])
        self.locations = [(detail["type"], _path(detail)) for detail in details]


def _name(detail: dict[str, Any]) -> str:
    return ".".join(map(str, _path(detail)))


def _not_planned(keys: list[str]) -> list[Issue]:
    """One issue for all keys of models that are not planned yet."""
    if not keys:
        return []
    what = " and ".join(dict.fromkeys(NOT_PLANNED[key] for key in keys))
    names = ", ".join(key.split(".")[1] if key.startswith("model.") else key for key in keys)
    message = f"{what} are not planned yet: {names}"
    hint = "leave these keys out to plan the dense model of the other keys"
    return [Issue("not-planned", keys[0], message, hint)]


def _path(detail: dict[str, Any]) -> list[Any]:
    """Where it stands in the job; pydantic marks a bad key of a free table by one more part."""
    return [part for part in detail["loc"] if part != "[key]"]


def _is_consequence(detail: dict[str, Any]) -> bool:
    """A model key that follows from another one, whose own absence is what is reported."""
    path = _path(detail)
    return detail["type"] == "missing" and path[0] == "model" and path[-1] in DERIVED


def _issue_of(detail: dict[str, Any]) -> Issue:
    path = [str(part) for part in _path(detail)]
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
    shown = _shown(detail.get("input"))
    legal = detail.get("ctx", {}).get("expected", "") if detail["type"] == "literal_error" else ""
    hint = str(detail.get("ctx", {}).get("hint", ""))
    if legal:
        hint = value_hint(where, detail.get("input"), re.findall(r"'([^']*)'", legal))
    return Issue("bad-value", where, f"{shown} is not allowed{as_key}: {message}", hint)


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and value.bit_length() > 128:  # its digits may be past counting
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."
