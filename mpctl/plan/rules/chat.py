"""Rules about conversations: which models train on them, and what a plan assumes of their lengths."""

from __future__ import annotations

from collections.abc import Iterator

from mpctl.model.families import all_builtin, get_family
from mpctl.model.layout.draft import LayoutDraft
from mpctl.plan.rules.check import Check, listed
from mpctl.spec.runtime import is_launched

WHERE = "data.chat"


def chat_rules(draft: LayoutDraft) -> Iterator[Check]:
    """The model's family and layout train on conversations."""
    job, model, chat = draft.job, draft.job.model, draft.job.data.chat
    if model is None or chat is None:
        return
    if not get_family(model.family).chat_arrays:
        others = listed([family.name for family in all_builtin() if family.chat_arrays])
        message = f"family {model.family} does not train on conversations"
        yield Check("chat-family", "error", WHERE, message, f"use family {others}, or prepare text")
    if job.parallel.tensor_mode != "1d":
        message = f"tensor_mode {job.parallel.tensor_mode} does not train on conversations"
        yield Check("chat-tensor-mode", "error", "parallel.tensor_mode", message, "use tensor_mode 1d")
    if model.mtp_layers and is_launched(job.training.runtime):
        message = f"{model.mtp_layers}: further predictions would cross the ends of conversations"
        yield Check("chat-prediction", "error", "model.mtp_layers", message, "use mtp_layers 0")
    if chat.row_tokens is not None and chat.row_tokens > model.seq_length:
        message = f"{chat.row_tokens:g} tokens do not fit a row of {model.seq_length}"
        yield Check("chat-row", "error", f"{WHERE}.row_tokens", message, f"use {model.seq_length} or less")
