"""The words of a shell script expanded without a shell: variables, arrays, defaults, sums of integers.

A variable that the script does not set, and a value that only a run would give (`$(...)`, a
function's, a loop's), stays as it is written, `$NAME`, so that a reader can refuse it where it
matters. Nothing is run, and no file is read.

>>> variables = Variables({"TP": "8", "ARGS": ("--bf16", "--lr 1e-4")})
>>> variables.fields("${ARGS[@]}"), variables.fields('x"$TP"${PP:-2}$((TP*4))$NOWHERE')
(['--bf16', '--lr', '1e-4'], ['x8232$NOWHERE'])
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from mpctl.interop.config_text import unreadable
from mpctl.interop.shell_syntax import NAME, skip_part

LONGEST = 200_000
"""Letters of a value: `A=$A$A` doubles it."""
Value = str | tuple[str, ...]
_FORM = re.compile(r"(#?)([A-Za-z_]\w*|[0-9@*#?$!-])(?:\[([@*]|\d+|-1)\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
_PLAIN = re.compile(r"[^\"'\\$`<>]+")
_LITERAL = re.compile(r"[^\\$`]+")
"""Letters that mean nothing outside, and inside of double quotes."""
_SUM = re.compile(r"[\d\s()+*/%-]{1,200}")
_SIGNS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


class Doubt(NamedTuple):
    """Why a value is not known: the line that sets it, and its text."""

    line: int
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}"


@dataclass
class Variables:
    """The variables of a script. doubts: those whose value only a run would give; asked: names that
    were looked up, unset: those of them that had no value; defaults: those of names without one."""

    values: dict[str, Value] = field(default_factory=dict)
    doubts: dict[str, Doubt] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    unset: set[str] = field(default_factory=set)
    defaults: dict[str, str] = field(default_factory=dict)

    def find(self, name: str) -> Value | None:
        """The value of a variable; None where it has none, or an unknown one."""
        self.asked.add(name)
        if name in ("@", "*"):
            return ()
        if name == "#":
            return "0"
        if name not in self.values:
            self.unset.add(name)
        return self.values.get(name)

    def put(self, name: str, value: Value, *, adds: bool = False) -> None:
        """Set a variable, or add to it as `+=` does."""
        if adds and name in self.doubts:
            return
        old = self.values.get(name, ())
        if adds and isinstance(value, tuple):
            value = (*((old,) if isinstance(old, str) else old), *value)
        elif adds and isinstance(value, str):
            value = f"{old if isinstance(old, str) else ' '.join(old)}{value}"
        if len(value) > LONGEST or sum(map(len, value)) > LONGEST:
            raise unreadable(f"{name} grows beyond {LONGEST:,} letters", "give the flags themselves")
        self.values[name] = value
        self.doubts.pop(name, None)

    def forget(self, name: str, doubt: Doubt) -> None:
        """Note that only a run would give the variable's value."""
        self.values.pop(name, None)
        self.doubts[name] = doubt

    def text(self, raw: str) -> str:
        """A word as one text, as in an assignment."""
        return "".join(text for text, _ in self._parts(raw, joins=True))

    def document(self, raw: str) -> str:
        """The text of a here-document, in which quotes mean nothing."""
        return "".join(text for text, _ in self._quoted(raw, joins=True))

    def fields(self, raw: str) -> list[str]:
        """The words that a word becomes: none, one or several."""
        fields: list[str] = []
        is_open = False
        for text, splits in self._parts(raw, joins=False):
            if splits is None:  # between two elements of "${ARGS[@]}"
                is_open = False
                continue
            words = text.split() if splits else [text]
            if splits and text[:1].isspace():
                is_open = False
            for number, word in enumerate(words):
                if is_open and not number:
                    fields[-1] += word
                else:
                    fields.append(word)
                is_open = True
            if splits and text[-1:].isspace():
                is_open = False
        if sum(map(len, fields)) > LONGEST:
            raise unreadable(f"{raw[:40]!r} grows beyond {LONGEST:,} letters", "give the flags themselves")
        return fields

    def _parts(self, raw: str, *, joins: bool) -> list[tuple[str, bool | None]]:
        """The parts of a word: text, and whether it is split at blanks, None for a break between
        words. joins: elements of an array become one text."""
        parts: list[tuple[str, bool | None]] = []
        at = 0
        while at < len(raw):
            plain = _PLAIN.match(raw, at)
            stop = plain.end() if plain else self._end(raw, at)
            part = raw[at:stop]
            if part[0] == '"' and len(part) > 1:
                inner = self._quoted(part[1:-1], joins=joins)
                parts += inner
            elif part[0] == "'":
                parts.append((part[1:-1], False))
            elif part.startswith("$'"):
                parts.append((part[2:-1], False))
            elif part[0] == "\\":
                parts.append((part[1:], False))
            elif part[0] == "$" and len(part) > 1:
                parts += self._value(part, is_quoted=False, joins=joins)
            else:
                parts.append((part, False))
            at = stop
        return parts

    def _quoted(self, inner: str, *, joins: bool) -> list[tuple[str, bool | None]]:
        parts: list[tuple[str, bool | None]] = [("", False)]
        at = 0
        while at < len(inner):
            if inner[at] == "\\" and inner[at + 1 : at + 2] in ('"', "$", "`", "\\", "\n"):
                parts.append((inner[at + 1 : at + 2].strip("\n"), False))
                at += 2
                continue
            plain = _LITERAL.match(inner, at)
            stop = plain.end() if plain else self._end(inner, at) if inner[at] in "$`" else at + 1
            part = inner[at:stop]
            parts += (
                self._value(part, is_quoted=True, joins=joins) if part[0] == "$" and stop > at + 1 else [(part, False)]
            )
            at = stop
        if inner in ("$@", "${@}") or (len(parts) == 1 and "[@]" in inner):
            return []  # an array without elements is no word
        return parts

    @staticmethod
    def _end(raw: str, at: int) -> int:
        if raw[at] == "$" and (found := NAME.match(raw, at + 1)):
            return found.end()
        if raw[at] == "$" and raw[at + 1 : at + 2] in tuple("0123456789@*#?$!-"):
            return at + 2
        return skip_part(raw, at)

    def _value(self, part: str, *, is_quoted: bool, joins: bool) -> list[tuple[str, bool | None]]:
        """A substitution as parts of a word; as it is written where its value is not known."""
        found = self._substituted(part)
        if found is None:
            return [(part, False)]
        if isinstance(found, str):
            return [(found, not is_quoted)]
        if joins or (is_quoted and "[*]" in part):
            return [(" ".join(found), not is_quoted)]
        parts: list[tuple[str, bool | None]] = []
        for element in found:
            parts += [(element, not is_quoted), ("", None)]
        return parts[:-1]

    def _substituted(self, part: str) -> Value | None:
        if part.startswith("$(("):
            return self.sum(part[3:-2])
        if part.startswith("$("):
            return None
        form = _FORM.fullmatch(part[2:-1] if part.startswith("${") else part[1:])
        if form is None:
            return None
        counts, name, index, sign, word = form.groups()
        value = self.find(name)
        if isinstance(value, tuple) and index not in ("@", "*") and name not in ("@", "*"):
            value = next(iter(value[int(index or 0) :]), None) if index != "-1" else (value or (None,))[-1]
        if counts and value is not None:
            return str(len(value))
        if sign and name not in self.doubts:
            is_there = value is not None and not (sign.startswith(":") and not value)
            if sign[-1] == "+":
                return self.text(word) if is_there else ""
            if not is_there and sign[-1] in "-=":
                self.defaults[name] = value = self.text(word)
                if sign[-1] == "=":
                    self.put(name, value)
        if value is None and index in ("@", "*") and name not in self.doubts:
            return ()
        return value

    def sum(self, text: str) -> str | None:
        """The value of an expression of integers; None where it has others or is too large."""
        plain = self.text(text)
        for name in sorted(set(NAME.findall(plain)), key=len, reverse=True):
            value = self.find(name)
            if not isinstance(value, str) or not re.fullmatch(r"\s*-?\d{1,12}\s*", value):
                return None
            plain = re.sub(rf"\$?\b{name}\b", value, plain)
        if not _SUM.fullmatch(plain):
            return None
        try:
            return str(_evaluated(ast.parse(plain.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return None


def _evaluated(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluated(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
        value: int = _SIGNS[type(node.op)](_evaluated(node.left), _evaluated(node.right))
        if abs(value) < 10**15:
            return value
    raise ValueError("no sum of integers")


def is_unexpanded(word: str) -> bool:
    """Whether a shell would expand the word."""
    return "$" in word or "`" in word


def doubts_of(word: str, doubts: Mapping[str, Doubt]) -> list[str]:
    """Where the variables in a word that could not be expanded are set: `line 3: N=$(wc -l < hosts)`."""
    return [str(doubts[name]) for name in NAME.findall(word) if name in doubts]
