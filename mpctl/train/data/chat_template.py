"""Chat templates: Jinja from a tokenizer's files turns messages into text, in a sandbox and within limits.

Rendered as by transformers (utils/chat_template_utils.py of 5.23, `render_jinja_template`): blocks trimmed, loop
controls, `{% generation %}` around what the assistant writes, `tojson` without escapes, `raise_exception`,
`strftime_now`. A template is untrusted. Jinja's sandbox allows no private attribute and changes no argument; loops,
calls and texts are counted here, so that a rendering ends: a nested range of 100,000 is refused, not waited for.

The spans of a conversation that are trained are those of the generation tag. A template without it is rendered up to
each assistant turn and behind it: what differs is the turn, with the token that ends it. By hand, "<u>hi<e><a>yo<e>"
without its last turn, asked to go on: "<u>hi<e><a>"; the turn is "yo<e>".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import wraps
from math import prod
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

from jinja2 import TemplateError, TemplateSyntaxError, nodes, pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from mpctl.core.errors import InputError

Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
MOST_STEPS = 3 * 10**5  # rounds of loops and calls of one rendering
MOST_CHARACTERS = 2**24  # of one rendering, and of each text or list that it makes on the way
LONGEST_TEMPLATE = 2**20
MOST_SECONDS = 10
# Methods and filters of texts whose result may be much longer than the text.
GROWING = frozenset(
    ("replace", "join", "ljust", "rjust", "center", "zfill", "expandtabs", "format", "format_map", "indent", "batch")
)
NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class Rendered(NamedTuple):
    """The text of a conversation, and the spans of it that the assistant writes, in characters."""

    text: str
    spans: list[Span]


class _Limits(SecurityError):
    """A rendering that takes too long or grows too large."""


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which counts: every round of a loop, every call, the size of every sum of texts."""

    intercepted_binops = frozenset({"*", "+", "**", "%"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.steps, self.began = 0, process_time()
        self.blocks: list[str] = []
        self.spans: list[Span] = []
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        for name in GROWING & self.filters.keys():
            self.filters[name] = _bounded(name, self.filters[name])
        self.filters.update(tojson=_tojson, _counted=self._counted, _sized=_sized)
        self.globals.update(
            raise_exception=_raise, strftime_now=lambda form: now().strftime(form), namespace=_Namespace
        )

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Wrap what loops run over, and sums of texts (`~`), in filters that count."""
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None)
        for joined in list(tree.find_all(nodes.Concat)):
            joined.nodes = [nodes.Filter(node, "_sized", [], [], None, None) for node in joined.nodes]
        return tree

    def count(self) -> None:
        """Count a step of the rendering. Raises _Limits when there are too many, or they take too long."""
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise _Limits(f"takes more than {MOST_STEPS:,} loop rounds and calls")
        if process_time() - self.began > MOST_SECONDS:
            raise _Limits(f"takes more than {MOST_SECONDS} s of processor time")

    def _counted(self, items: Any) -> Iterator[Any]:
        for item in items:
            self.count()
            yield item

    def call(*args: Any, **kwargs: Any) -> Any:
        """See SandboxedEnvironment; a keyword of the template may be `self`."""
        environment: Any = args[0]
        environment.count()
        method, text = getattr(args[2], "__name__", ""), getattr(args[2], "__self__", None)
        if isinstance(text, str) and method in GROWING:
            _check_growth(method, text, args[3:])
        return _sized(ImmutableSandboxedEnvironment.call(*args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """See SandboxedEnvironment."""
        if operator == "**":
            raise SecurityError("powers are not allowed in a chat template")
        if operator == "*":
            for some, times in ((left, right), (right, left)):
                if hasattr(some, "__len__") and isinstance(times, int) and len(some) * times > MOST_CHARACTERS:
                    raise _too_large()
        if operator == "%" and isinstance(left, str):
            _check_growth("format", left, ())
        return _sized(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """See SandboxedEnvironment: str.format and its kin."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_growth("format", value.__self__, ())
        return wrapped

    def rendered(self, template: Any, variables: Mapping[str, Any]) -> Rendered:
        """Render a template of this environment; the spans are those of its generation tag."""
        self.steps, self.blocks, self.spans, size = 0, [], [], 0
        self.began = process_time()
        for block in template.generate(**variables):
            self.count()
            self.blocks.append(block)
            size += len(block)
            if size > MOST_CHARACTERS:
                raise _too_large()
        return Rendered("".join(self.blocks), self.spans)


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}: notes where what it encloses stands in the text."""

    tags = {"generation"}  # noqa: RUF012 as the base class has it

    def parse(self, parser: Any) -> nodes.Node:
        """See Extension."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_noted"), [], [], body).set_lineno(line)

    @pass_eval_context
    def _noted(self, context: Any, caller: Callable[[], str]) -> str:
        environment: Any = self.environment
        start, text = sum(map(len, environment.blocks)), caller()
        environment.spans.append((start, start + len(text)))
        return text


class _Namespace(Namespace):
    """A namespace of a template, without private names."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        given = dict(*args[1:], **kwargs)
        for name in given:
            _check_name(name)
        Namespace.__init__(args[0], given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no private name {name!r:.40}")


def _too_large() -> _Limits:
    return _Limits(f"makes a text or list of more than {MOST_CHARACTERS:,} elements")


def _sized(value: Any) -> Any:
    if isinstance(value, (str, list, tuple, dict, bytes)) and len(value) > MOST_CHARACTERS:
        raise _too_large()
    return value


def _check_growth(method: str, text: Any, given: Sequence[Any]) -> None:
    """Raise _Limits before a method or filter of a text makes one that is too large."""
    sizes = [len(text) + 1 if hasattr(text, "__len__") else 1]
    sizes += [
        len(one) if hasattr(one, "__len__") else abs(one)
        for one in given
        if hasattr(one, "__len__") or type(one) is int
    ]
    if method == "format":
        is_fine = not re.search(r"\d{7}", str(text))
    else:
        is_fine = prod(max(1, size) for size in sizes) <= MOST_CHARACTERS * 64
    if not is_fine:
        raise _too_large()


def _bounded(name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose result may grow, within the limits."""

    @wraps(apply)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        own = args[passed:]
        _check_growth(name, own[0] if own else "", (*own[1:], *kwargs.values()))
        return _sized(apply(*args, **kwargs))

    passed = int(hasattr(apply, "jinja_pass_arg"))  # whether Jinja gives it a context first
    return bounded


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    if indent is not None and indent > 64:
        raise _too_large()
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


class ChatTemplate:
    """A chat template, compiled.

    text: its Jinja. variables: named tokens of the tokenizer (bos_token, ..) that it reads. specials: texts of the
    tokenizer's special tokens. date: what `strftime_now` gives, for data that can be made again. Raises InputError
    for wrong syntax.
    """

    def __init__(
        self,
        text: str,
        *,
        source: str = "the chat template",
        variables: Mapping[str, str] | None = None,
        specials: Iterable[str] = (),
        date: datetime | None = None,
    ) -> None:
        self.text, self.source, self.variables = text, source, dict(variables or {})
        self.specials = tuple(token for token in specials if token)
        self.has_tag = "endgeneration" in text
        self._environment = _Environment(datetime.now if date is None else lambda: date)
        try:
            self._template = self._environment.from_string(text)
        except TemplateSyntaxError as error:
            message = f"line {error.lineno}: {error.message}"
            raise InputError.of("chat-template", source, message, "mend it, or name another: --template FILE") from None
        except Exception as error:  # a nesting that Python's compiler refuses
            message, hint = f"cannot be compiled: {_words(error)}", "name another: --template FILE"
            raise InputError.of("chat-template", source, message, hint) from None

    @property
    def reads_date(self) -> bool:
        """Whether its text depends on the date."""
        return "strftime_now" in self.text

    def render(self, messages: Messages, *, tools: Any = None, goes_on: bool = False) -> Rendered:
        """Render messages; goes_on: with the words that open an assistant's turn.

        Raises ValueError with the template's message, or with what it does that is not allowed.
        """
        variables = {**self.variables, "messages": messages, "tools": tools, "documents": None}
        try:
            return self._environment.rendered(self._template, {**variables, "add_generation_prompt": goes_on})
        except _Limits as error:
            raise ValueError(f"the chat template {error.message}") from None
        except Exception as error:  # whatever a template does to the values that it gets
            raise ValueError(f"the chat template failed: {_words(error)}") from None

    def conversation(self, messages: Messages, *, tools: Any = None, first: int = 0) -> Rendered:
        """Render messages with the spans that the assistant writes in those from number `first` on.

        Raises ValueError as `render`, and where turns cannot be told apart.
        """
        whole = self.render(messages, tools=tools)
        if not self.has_tag:
            turns = [i for i in range(first, len(messages)) if messages[i].get("role") == "assistant"]
            return Rendered(whole.text, [self._turn(messages, i, whole.text, tools) for i in turns])
        start = _shared(self._opening(messages, first, tools), whole.text) if first else 0
        spans = ((max(begin, start), end) for begin, end in whole.spans)
        return Rendered(whole.text, [(begin, end) for begin, end in spans if begin < end])

    def _opening(self, messages: Messages, count: int, tools: Any) -> str:
        """The text of the first messages, with the words that open the assistant's turn."""
        if not count:  # templates may look at the first message
            return ""
        return self.render(messages[:count], tools=tools, goes_on=True).text

    def _turn(self, messages: Messages, number: int, whole: str, tools: Any) -> Span:
        before = self._opening(messages, number, tools)
        through = self.render(messages[: number + 1], tools=tools).text
        start, end = _shared(before, whole), _shared(through, whole)
        content = messages[number].get("content")
        kept = content.strip() if isinstance(content, str) else ""
        if end <= start or kept not in whole[start:end]:
            raise ValueError(
                f"the chat template writes message {number + 1} otherwise when others follow, so that its words "
                "cannot be told from the rest"
            )
        stripped = whole[start:end].rstrip()  # what follows the token that ends the turn is not the assistant's
        ends = any(stripped.endswith(token) for token in self.specials)
        return start, start + len(stripped) if ends else end


def _shared(first: str, second: str) -> int:
    """Length of the text that both begin with."""
    if second.startswith(first):
        return len(first)
    unequal = (i for i, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
    return next(unequal, len(second))


def _words(error: Exception) -> str:
    """An exception's message, on one line; its class where it has none."""
    message = error.message if isinstance(error, TemplateError) else str(error)
    return " ".join(str(message or type(error).__name__).split())[:300]


class TokenizerFiles(NamedTuple):
    """Files next to a tokenizer.json. template: the chat template's text and its file, None if there is none;
    named: texts of named tokens, bos_token, eos_token, .."""

    template: tuple[str, str] | None
    named: dict[str, str]


def read_tokenizer_files(tokenizer: Path) -> TokenizerFiles:
    """Read chat_template.jinja and tokenizer_config.json next to a tokenizer. Raises InputError for damaged ones."""
    path = tokenizer.parent / CONFIG_FILE
    config = _config(path) if path.is_file() else {}
    named = {name: text for name in NAMED_TOKENS if (text := _token_text(config.get(name))) is not None}
    beside = tokenizer.parent / TEMPLATE_FILE
    if beside.is_file():
        return TokenizerFiles((read_template(beside), str(beside)), named)
    text = config.get("chat_template")
    if isinstance(text, list):  # several, by name
        found = {one.get("name"): one.get("template") for one in text if isinstance(one, dict)}
        text = found.get("default")
    return TokenizerFiles((text, str(path)) if isinstance(text, str) else None, named)


def read_template(path: Path) -> str:
    """The text of a template's file; InputError where it cannot be read or is too long."""
    try:
        if path.stat().st_size > LONGEST_TEMPLATE:
            raise ValueError(f"longer than {LONGEST_TEMPLATE:,} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        message = f"not readable: {error}"
        raise InputError.of("chat-template", str(path), message, "name a Jinja file: --template FILE") from None


def _config(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        read = error
    if isinstance(read, dict):
        return read
    message = f"damaged: {read}" if isinstance(read, Exception) else "holds no JSON object"
    raise InputError.of("tokenizer-config", str(path), message, "copy it again from the model's folder")


def _token_text(value: Any) -> str | None:
    """A named token: its text, or a table with it."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) and value else None
