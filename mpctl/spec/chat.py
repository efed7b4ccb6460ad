"""Chat data: which tokens of a conversation are trained, and how conversations fill rows of seq_length tokens.

A conversation of l tokens takes l places of a row; its last place predicts nothing. By hand, lengths 5, 2, 3, 1 in
rows of 8: best-fit makes [5, 3], [2, 1], wrapped [5, 2, 1], [2, 1], none four rows.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from annotated_types import Ge, Le, MinLen
from pydantic import Field

from mpctl.core.errors import InputError
from mpctl.spec.base import StrictModel


class PackedAttention(NamedTuple):
    """Attention over a row of several samples. has_mask: by a mask of all pairs; segment: mean number of keys that
    a query could see of its own sample, where kernels skip the others; 0 if unknown."""

    has_mask: bool
    segment: float = 0.0


LossOn = Literal["completions", "all"]
Packing = Literal["best-fit", "wrapped", "none"]
Overflow = Literal["refuse", "drop", "truncate", "split"]
LOSS_ON, PACKINGS, OVERFLOWS = (get_args(one) for one in (LossOn, Packing, Overflow))


class ChatSpec(StrictModel):
    """Conversations to train on instead of text, and what a plan knows of them.

    Prepared chat data fills in all of it from its manifest.
    """

    template: Annotated[str, MinLen(1)] | None = Field(
        None, description="chat template (Jinja) to render conversations with; the tokenizer's when absent"
    )
    loss_on: LossOn = Field(
        "completions", description="completions: only what the assistant writes counts; all: every token"
    )
    packing: Packing = Field(
        "best-fit",
        description="best-fit: several conversations a row, none cut; wrapped: end to end, cut at the end of a row; "
        "none: one a row, padded. Attention never crosses from one conversation to another",
    )
    overflow: Overflow = Field(
        "refuse", description="conversations longer than model.seq_length: refuse the data, drop, truncate or split"
    )
    row_tokens: Annotated[float, Ge(0), Le(2**31)] | None = Field(
        None, description="mean tokens of a row of model.seq_length that are no padding; known of prepared data"
    )
    row_counted: Annotated[float, Ge(0), Le(2**31)] | None = Field(
        None, description="mean tokens of a row that the loss counts; known of prepared data"
    )
    mean_length: Annotated[float, Ge(1), Le(2**31)] | None = Field(
        None,
        description="mean length of the conversation that a token is in, tokens: the sum of squared lengths by their "
        "sum; known of prepared data",
    )

    @property
    def is_packed(self) -> bool:
        """Whether a row holds several conversations, which attention keeps apart by a mask."""
        return self.packing != "none"

    def real_tokens(self, row: int) -> float | None:
        """Mean tokens of a row that are no padding; None if unknown. By the mean length where rows hold one."""
        if self.row_tokens is None and not self.is_packed and self.mean_length is not None:
            return min(self.mean_length, row)
        return self.row_tokens

    @classmethod
    def of_manifest(cls, record: Mapping[str, Any]) -> Self:
        """The settings of prepared data by the `chat` table of its manifest. Raises KeyError, TypeError,
        ZeroDivisionError or ValueError for a damaged one."""
        train = record["splits"]["train"]
        return cls(
            **{key: record[key] for key in AS_PREPARED},
            row_tokens=train["tokens"] / train["rows"],
            row_counted=train["counted"] / train["rows"],
            mean_length=train["squares"] / train["tokens"],
        )


AS_PREPARED = ("loss_on", "packing", "overflow")
MANIFEST, LONGEST_MANIFEST = "data.json", 2**20


def with_prepared_chat(data: Mapping[str, Any]) -> dict[str, Any]:
    """The raw [data] of a job with [data.chat] as the manifest of the prepared data at `path` says it; unchanged
    without such data. Raises InputError where the job says otherwise."""
    found = _prepared(data.get("path"))
    if found is None:
        return dict(data)
    named = data.get("chat") or {}
    for key in AS_PREPARED:
        value = getattr(found, key)
        if isinstance(named, dict) and named.get(key, value) != value:
            raise InputError.of(
                "chat-as-prepared",
                f"data.chat.{key}",
                f"{named[key]!r}, but {data['path']} was prepared with {value!r}",
                f"leave it out, or prepare the data again: mpctl data chat --{key.replace('_', '-')} {named[key]}",
            )
    return {**data, "chat": found.model_dump()}


def _prepared(path: Any) -> ChatSpec | None:
    """The settings of prepared chat data; None where a path has none, or is damaged, which a launch reports."""
    if not isinstance(path, str):
        return None
    try:
        file = Path(path) / MANIFEST
        record = json.loads(file.read_text("utf-8")) if file.stat().st_size <= LONGEST_MANIFEST else {}
        return ChatSpec.of_manifest(record["chat"])
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError):
        return None
