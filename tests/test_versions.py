"""What mpctl relies on and another version of Python or torch may change."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import mpctl

PACKAGE = Path(mpctl.__file__).parent


def _modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE.parent)), ast.parse(path.read_text())


def _data_members(module: ast.Module) -> list[str]:
    """Members that are not methods, of the classes that are decorated with runtime_checkable."""
    return [
        f"{node.name}: {ast.unparse(member).splitlines()[0]}"
        for node in ast.walk(module)
        if isinstance(node, ast.ClassDef)
        and any("runtime_checkable" in ast.unparse(one) for one in node.decorator_list)
        for member in node.body
        if not (
            (isinstance(member, ast.FunctionDef) and not member.decorator_list)
            or (isinstance(member, ast.Expr) and isinstance(member.value, ast.Constant))
        )
    ]


def test_isinstance_asks_for_methods_alone() -> None:
    """Since Python 3.12, isinstance on a Protocol does not see what __getattr__ gives, as the
    parameters of an nn.Module: a Protocol with an attribute is then never met."""
    found = {name: members for name, module in _modules() if (members := _data_members(module))}
    assert not found, "make it a method, or an ABC that its classes name as a base"


def test_a_protocol_with_an_attribute_is_found() -> None:
    text = "@runtime_checkable\nclass A(Protocol):\n    'text'\n    w: int\n    def f(self): ...\n"
    assert _data_members(ast.parse(text)) == ["A: w: int"]
    text = "@t.runtime_checkable\nclass A(Protocol):\n    @property\n    def f(self): ...\n"
    assert _data_members(ast.parse(text)) == ["A: @property"]
