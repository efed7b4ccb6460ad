"""Conversations of .jsonl files: a line is one, checked as it is read, faults by file and line.

A line has `messages`, a list of {"role", "content"} (also `tools`, which the template gets); or ShareGPT's
`conversations` of {"from", "value"}; or `prompt` and `completion`, two texts or two lists of messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mpctl.core.errors import InputError, Issue
from mpctl.core.units import plural
from mpctl.train.data.corpus import File, find_files
from mpctl.train.data.streams import READ_ERRORS, OnBytes, format_of, ignore_bytes
from mpctl.train.data.texts import Findings, Reading, parsed, record_lines

ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names
MOST_ISSUES = 10
FORMS = '{"messages": [{"role": "user", "content": "..."}, ...]}, or {"prompt": "...", "completion": "..."}'
Message = dict[str, Any]


class Conversation(NamedTuple):
    """messages, of which the first `given` are never trained; or text, of which the first `given` characters are not.
    tools: what a template is told of tools. place: `file:line`."""

    place: str
    messages: list[Message]
    given: int = 0
    text: str | None = None
    tools: Any = None


@dataclass
class Faults:
    """Faults of lines: the first ones as issues, the rest as a count."""

    issues: list[Issue] = field(default_factory=list)
    count: int = 0

    def add(self, rule: str, place: str, message: str, hint: str) -> None:
        """Note the fault of a line."""
        self.count += 1
        if len(self.issues) < MOST_ISSUES:
            self.issues.append(Issue(rule, place, message, hint))

    def raise_any(self) -> None:
        """Raise InputError where there is a fault."""
        if not self.issues:
            return
        if rest := self.count - len(self.issues):
            message = f"{plural(rest, 'more line')} with a fault"
            self.issues.append(Issue("chat-lines", "data.corpus", message, "mend those first"))
        raise InputError(self.issues)


def find_chat_files(sources: Sequence[str | Path], findings: Findings, encoding: str = "utf-8") -> list[File]:
    """The .jsonl files of the sources. Raises InputError for another file that is named, and where there are none."""
    found = find_files(sources, encoding=encoding, findings=findings)
    files = [file for file in found if format_of(file.path) == "jsonl"]
    named = set(map(Path, sources))
    others = [file.path for file in found if file not in files and (file.path in named or not files)]
    if others:
        message, hint = "is no .jsonl file", f"conversations are lines of .jsonl files: {FORMS}"
        raise InputError([Issue("chat-format", str(path), message, hint) for path in others[:MOST_ISSUES]])
    return files


def read_conversations(
    path: Path, reading: Reading, findings: Findings, faults: Faults, on_bytes: OnBytes = ignore_bytes
) -> Iterator[Conversation]:
    """Yield the conversations of a file; faults of lines go to `faults`, those of the file to `findings`."""
    try:
        for place, line in record_lines(path, reading, findings, on_bytes):
            record = parsed(line)
            if not isinstance(record, dict):
                faults.add("chat-json", place, "is no JSON object", f"write {FORMS}")
                continue
            try:
                yield conversation_of(record, place)
            except ValueError as error:
                faults.add("chat-record", place, str(error), f"write {FORMS}")
    except READ_ERRORS as error:
        findings.unreadable(path, error)


def conversation_of(record: dict[str, Any], place: str) -> Conversation:
    """A line's conversation. Raises ValueError that says what it lacks."""
    tools = record.get("tools")
    for key in ("messages", "conversations"):
        if key in record:
            return Conversation(place, _messages(record[key], key), tools=tools)
    if "prompt" not in record or "completion" not in record:
        keys = ", ".join(map(str, list(record)[:8])) or "none"
        raise ValueError(f"has neither messages nor prompt and completion; keys there: {keys}")
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise ValueError("completion is empty")
        return Conversation(place, [], len(prompt), prompt + completion)
    given = _messages(prompt, "prompt")
    return Conversation(place, given + _messages(completion, "completion"), len(given), tools=tools)


def _messages(value: Any, key: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{key} is no list of messages" if value or not isinstance(value, list) else f"{key} is empty")
    return [_message(one, f"{key}[{number}]") for number, one in enumerate(value)]


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is no object with role and content")
    if "from" in value and "role" not in value:
        value = {"role": ROLES.get(str(value["from"]), value["from"]), "content": value.get("value")}
    role, content = value.get("role"), value.get("content")
    if not isinstance(role, str) or not role:
        raise ValueError(
            f"{where} lacks a role" if role is None else f"{where} has the role {role!r:.40}, which is no name"
        )
    if not isinstance(content, (str, list)) and not value.get("tool_calls"):
        raise ValueError(f"{where} lacks content" if content is None else f"{where} has content that is no text")
    return value
