"""Counts in the source: lengths, repeated names, importers of a file, patches."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from tests.house.source import Function, Module, Source


def repeated_classes(source: Source) -> dict[str, list[str]]:
    """Class names that stand in more than one place, with the places."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in source.modules.values():
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module.at(node))
    return {name: at for name, at in sorted(places.items()) if len(at) > 1}


def function_lengths(source: Source) -> list[tuple[int, str]]:
    """Lines of each function's body without its docstring, shortest first, with its place."""
    return sorted(
        (_body_lines(node), f"{module.at(node)} {node.name}")
        for module in source.modules.values()
        for node in module.functions
    )


def _body_lines(node: Function) -> int:
    start = node.body[0].end_lineno or 0 if ast.get_docstring(node) else node.body[0].lineno - 1
    return (node.end_lineno or 0) - start


def lone_shards(source: Source) -> list[str]:
    """Modules of at most 60 lines that one other module of their room imports, and nobody else."""
    importers: dict[str, list[Module]] = defaultdict(list)
    for module in source.modules.values():
        for name in source.imported[module.name]:
            importers[name].append(module)
    return [
        module.name
        for module in source.modules.values()
        if module.text.count("\n") <= 60 and [other.room for other in importers[module.name]] == [module.room]
    ]


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


def patches(module: Module) -> list[str]:
    """Uses of `mock`, and assignments to attributes of an imported module."""
    found = []
    for name, statement in module.imports:
        if "mock" in name.split("."):
            found.append(f"{module.at(statement)}: imports {name}")
    modules = {
        alias.asname or alias.name.split(".")[0]
        for node in module.nodes
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    for node in module.nodes:
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            root: ast.expr = target
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(target, ast.Attribute) and isinstance(root, ast.Name) and root.id in modules:
                found.append(f"{module.at(target)}: sets {ast.unparse(target)}")
    return found


def occurrences(source: Source, pattern: str) -> int:
    """How often a regular expression matches in all files together."""
    return sum(len(re.findall(pattern, module.text)) for module in source.modules.values())
