"""The syntax of a shell script: its commands, conditions, loops and functions, each with its line.

Nothing is expanded or run here: a word keeps its quotes and variables (shell.py expands them). An
array `NAME=( ... )` is a word with elements; a here-document belongs to its command; other
redirections are left out.

>>> [(node.line, [word.raw for word in node.words]) for node in parse_script("A=8\\ntorchrun a.py --tp $A | tee log")]
[(1, ['A=8']), (2, ['torchrun', 'a.py', '--tp', '$A']), (2, ['tee', 'log'])]
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from mpctl.core.errors import InputError
from mpctl.interop.config_text import unreadable

NAME = re.compile(r"[A-Za-z_]\w*")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=\(")
_REDIRECTION = re.compile(r"\d*(?:<<<|<<-?|>>|[<>]&|>\||<>|[<>])|&>>?")
_OPERATOR = re.compile(r"&&|\|\||;;&?|;&|\|&|[;&|()\n]")
_ENDS_A_WORD = frozenset(" \t\n;&|()<>")
_ENDS_A_COMMAND = frozenset(("\n", ";", "&", "&&", "||", "|", "|&", ";;", ";&", ";;&", ")"))
_CLOSING = {"(": ")", "{": "}"}


@dataclass(frozen=True, slots=True)
class Word:
    """A word as written. elements: of an array that it assigns, None for other words."""

    raw: str
    line: int
    elements: tuple[Word, ...] | None = None


@dataclass(frozen=True, slots=True)
class Separator:
    """`;`, `&&`, a line's end, ...; or a redirection, whose target is the next word, with the text
    of a here-document."""

    raw: str
    line: int
    is_redirection: bool = False
    document: str | None = None


Token = Word | Separator


@dataclass(frozen=True, slots=True)
class Node:
    """A command or a compound of commands.

    kind: command, if, while, for, case, function or group. joined: the operator before it: empty,
    `&&`, `||` or `|`. words: of a command; the list of a for with its variable first; the subject
    of a case. branches: condition and body of each arm of an if; the condition and body of a loop;
    the patterns of a case's arm are the words of its condition. documents: here-documents by the
    file that they are written to.
    """

    kind: str
    line: int
    joined: str = ""
    words: tuple[Word, ...] = ()
    branches: tuple[tuple[tuple[Node, ...], tuple[Node, ...]], ...] = ()
    documents: tuple[str, ...] = ()


def parse_script(text: str) -> tuple[Node, ...]:
    """The commands of a script. Raises InputError, with the line, where a quote, a bracket or a
    compound is not closed."""
    parser = _Parser(list(_tokens(text)))
    try:
        nodes = parser.commands(())
    except RecursionError:
        raise unreadable("the script's conditions and loops lie too deep in each other", "") from None
    if parser.peek() is not None:
        raise unclosed(parser.line(), f"{parser.peek_raw()!r} closes nothing")
    return nodes


def unclosed(line: int, message: str) -> InputError:
    """The error of a script that is not complete."""
    return unreadable(f"line {line}: {message}", "check that the script is complete: bash -n FILE")


def _tokens(text: str, at: int = 0, line: int = 1, end: str = "") -> Iterator[Token]:
    """The words and operators from `at`; end: the bracket that ends them."""
    while at < len(text):
        if text[at] in " \t\r" or text.startswith("\\\n", at):
            step = 2 if text[at] == "\\" else 1
            line += step == 2
            at += step
        elif text[at] == "#":
            at = _find(text, "\n", at)
        elif end and text[at] == end:
            return
        elif text.startswith("((", at) and not end:
            stop = _matching(text, at, line)
            yield Word(text[at:stop], line)
            line, at = line + text.count("\n", at, stop), stop
        elif (found := _REDIRECTION.match(text, at)) and not text.startswith(("<(", ">("), at):
            at = found.end()
            if found[0].lstrip("0123456789") not in ("<<", "<<-"):
                yield Separator(found[0], line, is_redirection=True)
                continue
            while text[at : at + 1] in (" ", "\t"):
                at += 1
            stop = _word_end(text, at, line)
            body, after = _document(text, _find(text, "\n", at), re.sub(r"['\"\\]", "", text[at:stop]))
            yield Separator("<<", line, is_redirection=True, document=body)
            yield Word(text[at:stop], line)
            rest = text[stop : _find(text, "\n", at)]
            yield from _tokens(rest, 0, line)
            line, at = line + text.count("\n", at, after), after
            yield Separator("\n", line - 1)
        elif found := _OPERATOR.match(text, at):
            yield Separator(found[0], line)
            line, at = line + (found[0] == "\n"), found.end()
        elif found := _ARRAY.match(text, at):
            stop = _matching(text, found.end() - 1, line)
            inner = _tokens(text[found.end() : stop - 1], 0, line)
            elements = tuple(token for token in inner if isinstance(token, Word))
            yield Word(found[0][:-1], line, elements)
            line, at = line + text.count("\n", at, stop), stop
        else:
            stop = _word_end(text, at, line)
            yield Word(text[at:stop], line)
            line, at = line + text.count("\n", at, stop), stop


def _find(text: str, what: str, at: int) -> int:
    found = text.find(what, at)
    return len(text) if found < 0 else found


def _document(text: str, at: int, delimiter: str) -> tuple[str, int]:
    """The lines of a here-document after `at`, and the position behind it."""
    start = at = min(at + 1, len(text))
    while at < len(text):
        stop = _find(text, "\n", at)
        if text[at:stop].strip() == delimiter:
            return text[start:at], min(stop + 1, len(text))
        at = stop + 1
    return text[start:], len(text)


def _word_end(text: str, at: int, line: int) -> int:
    """The position behind the word that begins at `at`."""
    start = at
    while at < len(text) and (text[at] not in _ENDS_A_WORD or text.startswith(("<(", ">("), at)):
        at = skip_part(text, at, line)
    return at if at > start else at + 1


def skip_part(text: str, at: int, line: int = 0) -> int:
    """The position behind the quoted text, the substitution, the escape or the letter at `at`."""
    if text[at] == "\\":
        return min(at + 2, len(text))
    if text[at] == "'" or text.startswith("$'", at):
        start = text.index("'", at)
        stop = text.find("'", start + 1)
        if stop < 0:
            raise unclosed(line, "a quote ' is not closed")
        return stop + 1
    if text[at] in '"`':
        mark, stop = text[at], at + 1
        while stop < len(text) and text[stop] != mark:
            stop = (
                skip_part(text, stop, line) if text[stop] == "\\" or text.startswith(("$(", "${"), stop) else stop + 1
            )
        if stop >= len(text):
            raise unclosed(line, f"a quote {mark} is not closed")
        return stop + 1
    if text[at : at + 2] in ("$(", "${", "<(", ">("):
        return _matching(text, at + 1, line)
    return at + 1


def _matching(text: str, at: int, line: int) -> int:
    """The position behind the bracket that closes the one at `at`."""
    opening, depth = text[at], 0
    closing = _CLOSING[opening]
    while at < len(text):
        if text[at] == opening:
            depth += 1
        elif text[at] == closing:
            depth -= 1
            if not depth:
                return at + 1
        elif text[at] == "#" and opening == "(" and text[at - 1] in " \t\n(":
            at = _find(text, "\n", at)
            continue
        elif text[at] in "\"'`\\":
            at = skip_part(text, at, line)
            continue
        at += 1
    raise unclosed(line, f"a bracket {opening} is not closed")


class _Parser:
    """The tokens of a script while they become nodes."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.at = 0

    def peek(self) -> Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def peek_raw(self) -> str:
        token = self.peek()
        return token.raw if token is not None and not (isinstance(token, Word) and token.elements) else ""

    def line(self) -> int:
        return self.tokens[min(self.at, len(self.tokens) - 1)].line if self.tokens else 1

    def is_operator(self, *raws: str) -> bool:
        token = self.peek()
        return isinstance(token, Separator) and not token.is_redirection and token.raw in raws

    def skip(self, *raws: str) -> None:
        while self.is_operator(*raws):
            self.at += 1

    def commands(self, ends: Collection[str]) -> tuple[Node, ...]:
        """The commands up to one of these words or brackets, which is not taken."""
        nodes: list[Node] = []
        joined = ""
        while True:
            self.skip("\n", ";", "&") if not joined else self.skip("\n")
            if self.peek() is None or self.peek_raw() in ends:
                return tuple(nodes)
            if self.is_operator(*_ENDS_A_COMMAND):
                return tuple(nodes)
            nodes.append(self.command(joined))
            joined = ""
            if self.is_operator("&&", "||", "|", "|&"):
                joined = self.peek_raw().rstrip("&") if self.peek_raw() == "|&" else self.peek_raw()
                self.at += 1

    def command(self, joined: str) -> Node:
        raw, line = self.peek_raw(), self.line()
        if raw == "(" or raw == "{":
            self.at += 1
            body = self.commands((_CLOSING[raw],))
            self.expect(_CLOSING[raw], raw, line)
            return Node("group", line, joined, branches=(((), body),))
        if raw == "if":
            return self.condition(joined)
        if raw in ("while", "until", "for", "select"):
            return self.loop(joined)
        if raw == "case":
            return self.case(joined)
        follows = self.tokens[self.at + 1 : self.at + 3]
        is_named = [token.raw for token in follows] == ["(", ")"]
        if raw == "function" or is_named:
            self.at += 2 if raw == "function" else 1
            self.skip("(", ")", "\n")
            inner = (self.command(""),)
            return Node("function", line, joined, branches=(((), inner),))
        return self.simple(joined)

    def expect(self, raw: str, opened: str, line: int) -> None:
        self.skip("\n", ";")
        if self.peek_raw() != raw:
            raise unclosed(line, f"{opened!r} has no {raw!r}")
        self.at += 1
        while isinstance(token := self.peek(), Separator) and token.is_redirection:
            self.at += 2

    def simple(self, joined: str) -> Node:
        line, words, documents = self.line(), [], []
        is_test = self.peek_raw() == "[["
        target = ""
        while (token := self.peek()) is not None:
            if isinstance(token, Separator) and token.is_redirection and not is_test:
                self.at += 2
                if token.document is not None:
                    documents.append(token.document)
                elif self.at <= len(self.tokens) and token.raw.startswith(">"):
                    target = self.tokens[self.at - 1].raw
                continue
            if isinstance(token, Separator) and (not is_test or token.raw == "\n") and token.raw in _ENDS_A_COMMAND:
                break
            words.append(token if isinstance(token, Word) else Word(token.raw, token.line))
            self.at += 1
            if is_test and token.raw == "]]":
                break
        if not words and (token := self.peek()) is not None and not documents:
            self.at += 1  # `)` of nothing
        return Node("command", line, joined, tuple(words), documents=(target, *documents) if documents else ())

    def condition(self, joined: str) -> Node:
        line, branches = self.line(), []
        while self.peek_raw() in ("if", "elif"):
            self.at += 1
            asked = self.commands(("then",))
            self.expect("then", "if", line)
            branches.append((asked, self.commands(("elif", "else", "fi"))))
        if self.peek_raw() == "else":
            self.at += 1
            branches.append(((), self.commands(("fi",))))
        self.expect("fi", "if", line)
        return Node("if", line, joined, branches=tuple(branches))

    def loop(self, joined: str) -> Node:
        kind, line = self.peek_raw(), self.line()
        self.at += 1
        words: list[Word] = []
        asked: tuple[Node, ...] = ()
        if kind in ("for", "select"):
            while isinstance(token := self.peek(), Word) and token.raw != "do":
                words.append(token)
                self.at += 1
        else:
            asked = self.commands(("do",))
        self.expect("do", kind, line)
        body = self.commands(("done",))
        self.expect("done", kind, line)
        return Node("for" if words else "while", line, joined, tuple(words), ((asked, body),))

    def case(self, joined: str) -> Node:
        line = self.line()
        self.at += 1
        subject = self.peek()
        if not isinstance(subject, Word):
            raise unclosed(line, "a case has no subject")
        self.at += 2  # and `in`
        branches = []
        self.skip("\n")
        while self.peek() is not None and self.peek_raw() != "esac":
            patterns = []
            while self.peek() is not None and not self.is_operator(")"):
                if isinstance(token := self.peek(), Word):
                    patterns.append(token)
                self.at += 1
            self.at += 1
            body = self.commands(("esac",))
            branches.append(((Node("command", line, words=tuple(patterns)),), body))
            self.skip(";;", ";&", ";;&", "\n")
        self.expect("esac", "case", line)
        return Node("case", line, joined, (subject,), tuple(branches))
