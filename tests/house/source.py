"""The source of mpctl/, each file parsed once: modules, wings, rooms, and who imports whom.

A wing is a folder of mpctl/ (`plan/`), a room a folder or a module of a wing (`plan/search/`,
`core/errors.py`); a wing of one subject (FLAT) is one room. An arrow between two rooms or wings is
one or more imports; imports inside functions count like any other.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

Import = ast.Import | ast.ImportFrom
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
Function = ast.FunctionDef | ast.AsyncFunctionDef
FLAT = {"spec", "interop", "render", "cli"}


@dataclass(frozen=True)
class Module:
    """One file of the package at `root`."""

    root: Path
    path: Path

    @cached_property
    def parts(self) -> tuple[str, ...]:
        return self.path.relative_to(self.root).with_suffix("").parts

    @cached_property
    def name(self) -> str:
        """`mpctl.plan.rules.check`; a package goes by its own name."""
        return ".".join([self.root.name, *(part for part in self.parts if part != "__init__")])

    @cached_property
    def wing(self) -> str:
        return self.parts[0]

    @cached_property
    def room(self) -> str:
        is_whole = self.wing in FLAT or self.parts[1:] == ("__init__",)
        return self.wing if is_whole else "/".join(self.parts[:2])

    @cached_property
    def text(self) -> str:
        return self.path.read_text("utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        return tuple(ast.walk(self.tree))

    @cached_property
    def imports(self) -> list[tuple[str, Import]]:
        """Every imported name with its statement; `from a import b` gives `a.b`."""
        names: list[tuple[str, Import]] = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                names += [(alias.name, node) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.at(node)}: a relative import"
                names += [(f"{node.module}.{alias.name}", node) for alias in node.names]
        return names

    @cached_property
    def definitions(self) -> list[tuple[str, Definition]]:
        """Classes, functions and methods by dotted name; not those inside of functions."""
        return list(_definitions(self.tree, ""))

    @cached_property
    def functions(self) -> list[Function]:
        """Every function, also those inside of others."""
        return [node for node in self.nodes if isinstance(node, Function)]

    def at(self, node: ast.stmt | ast.expr) -> str:
        """`mpctl/plan/rules/check.py:12`."""
        return f"{self.path.relative_to(self.root.parent)}:{node.lineno}"


def _definitions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, Definition]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Definition):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from _definitions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.If | ast.Try):
            yield from _definitions(node, prefix)


@dataclass(frozen=True)
class Source:
    """All modules of the package at `root`."""

    root: Path

    @cached_property
    def modules(self) -> dict[str, Module]:
        paths = [path for path in sorted(self.root.rglob("*.py")) if "_presets" not in path.parts]
        return {module.name: module for module in (Module(self.root, path) for path in paths)}

    @cached_property
    def imported(self) -> dict[str, dict[str, Import]]:
        """For each module, the package's modules that it imports, with one statement of each."""
        return {name: self._imported(module) for name, module in self.modules.items()}

    def _imported(self, module: Module) -> dict[str, Import]:
        targets = {}
        for name, node in module.imports:
            target = name if name in self.modules else name.rpartition(".")[0]
            if target in self.modules and target != module.name:
                targets[target] = node
        return targets

    def arrows(self, place: Callable[[Module], str]) -> dict[str, set[str]]:
        """For each wing or room, as `place` names a module's, the others that it imports from."""
        arrows: dict[str, set[str]] = {place(module): set() for module in self.modules.values()}
        for name, targets in self.imported.items():
            here = place(self.modules[name])
            arrows[here] |= {place(self.modules[target]) for target in targets} - {here}
        return dict(sorted(arrows.items()))

    @cached_property
    def exported(self) -> set[str]:
        """Names (`mpctl.spec.load.load_job`) that a module of another room imports."""
        return {
            name
            for module in self.modules.values()
            for name, _ in module.imports
            if name.startswith(f"{self.root.name}.")
            and not name.startswith(f"{self.root.name}.{module.room.replace('/', '.')}.")
        }


def find_cycle(arrows: dict[str, set[str]]) -> list[str]:
    """The first cycle met by depth-first search, its first room repeated at its end, or []."""
    done: set[str] = set()

    def follow(room: str, trail: tuple[str, ...]) -> list[str]:
        if room in trail:
            return [*trail[trail.index(room) :], room]
        if room not in done:
            for target in sorted(arrows.get(room, ())):
                if cycle := follow(target, (*trail, room)):
                    return cycle
            done.add(room)
        return []

    for room in sorted(arrows):
        if cycle := follow(room, ()):
            return cycle
    return []
