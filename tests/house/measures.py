"""Counts in the source: lengths, repeated names, missing docstrings, loose types, patches."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from tests.house.source import Definition, Function, Module, Source

# A docstring says what the thing is or does. These beginnings leave out the subject.
RIDDLES = re.compile(
    r"(Of|Those|These|That|Whole|And|Or|But|So|Its|Theirs|Also|Beside|Besides)\b(?! is | are )"
)
LOOSE = re.compile(r"\b(dict|Mapping|MutableMapping)\[str, (Any|object)\]")


def repeated_classes(source: Source) -> dict[str, list[str]]:
    """Class names that stand in more than one place, with the places."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in source.modules.values():
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module.at(node))
    return {name: at for name, at in sorted(places.items()) if len(at) > 1}


def function_lengths(source: Source) -> list[tuple[int, str]]:
    """Lines of every function without its docstring, shortest first, with its place."""
    return sorted(
        (_lines(node) - (_lines(node.body[0]) if ast.get_docstring(node) else 0),
         f"{module.at(node)} {node.name}")
        for module in source.modules.values()
        for node in module.functions
    )  # fmt: skip


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or 0) - node.lineno + 1


def parameter_counts(source: Source) -> list[tuple[int, str]]:
    """Parameters of every written constructor (`__init__`), fewest first, with its class."""
    return sorted(
        (_parameters(node), f"{module.name}.{name.removesuffix('.__init__')}")
        for module in source.modules.values()
        for name, node in module.definitions
        if isinstance(node, Function) and name.endswith(".__init__")
    )


def _parameters(node: Function) -> int:
    args = node.args
    named = len(args.posonlyargs) + len(args.args) - 1 + len(args.kwonlyargs)
    return named + (args.vararg is not None) + (args.kwarg is not None)


def public(module: Module) -> Iterator[tuple[str, Definition]]:
    """Classes, functions and methods whose dotted name has no part that begins with `_`.

    Overrides of a special method (`__init__`, `__len__`) are documented by the language.
    """
    for name, node in module.definitions:
        if not any(part.startswith("_") for part in name.split(".")):
            yield name, node


def undocumented(module: Module) -> list[str]:
    """Public definitions without a docstring.

    A method that overrides one of a documented base in the same package is not excused; a setter
    and an `@overload` are, since their first definition has the docstring.
    """
    return [
        f"{module.at(node)} {name}"
        for name, node in public(module)
        if ast.get_docstring(node) is None and not _is_second(node)
    ]


def _is_second(node: Definition) -> bool:
    marks = {ast.unparse(mark) for mark in node.decorator_list}
    return any(mark.endswith(".setter") or mark.endswith("overload") for mark in marks)


def riddles(module: Module) -> list[str]:
    """Docstrings, also private ones, that begin with a word like "Of" or "Those"."""
    found = []
    for name, node in module.definitions:
        text = ast.get_docstring(node)
        if text and RIDDLES.match(text):
            found.append(f"{module.at(node)} {name}: {text.splitlines()[0]}")
    return found


def loose_signatures(source: Source, module: Module) -> list[str]:
    """Functions whose signature holds `dict[str, Any]` and which other rooms can call.

    Those are public functions, and public methods of public classes, that are imported by name or
    through their module by a module of another room.
    """
    found = []
    for name, node in public(module):
        exported = f"{module.name}.{name.split('.')[0]}" in source.exported
        if isinstance(node, Function) and (exported or module.name in source.exported):
            hints = [a.annotation for a in ast.walk(node.args) if isinstance(a, ast.arg)]
            text = " ".join(ast.unparse(hint) for hint in [*hints, node.returns] if hint)
            if LOOSE.search(text):
                found.append(f"{module.at(node)} {name}")
    return found


def patches(module: Module) -> list[str]:
    """Uses of `mock`, and assignments to attributes of an imported module."""
    found = []
    for name, statement in module.imports:
        if "mock" in name.split("."):
            found.append(f"{module.at(statement)}: imports {name}")
    modules = {alias.asname or alias.name.split(".")[0] for node in module.nodes
               if isinstance(node, ast.Import) for alias in node.names}  # fmt: skip
    for node in module.nodes:
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            root: ast.expr = target
            while isinstance(root, ast.Attribute):
                root = root.value
            is_attribute = isinstance(target, ast.Attribute) and isinstance(root, ast.Name)
            if is_attribute and root.id in modules:
                found.append(f"{module.at(target)}: sets {ast.unparse(target)}")
    return found


def occurrences(source: Source, pattern: str) -> int:
    """How often a regular expression matches in all files together."""
    return sum(len(re.findall(pattern, module.text)) for module in source.modules.values())
