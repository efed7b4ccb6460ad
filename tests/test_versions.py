"""What mpctl relies on and another version of Python, torch or Triton may change.

tests/recorded/private_names.tsv lists every private name of theirs that mpctl uses: the name, the
arguments that mpctl gives it (`-`: a type, a value, or a method without a signature) and the files.
`make test-matrix` runs this file in each version: a name that is gone, or that has lost an
argument, fails here and not in the middle of a training.
"""

from __future__ import annotations

import ast
import inspect
import pkgutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mpctl
from mpctl.train.runtime.forked_agent import REPLACED, unknown_torch
from tests.matrix import TESTED

PACKAGE = Path(mpctl.__file__).parent

PRIVATE = Path(__file__).parent / "recorded" / "private_names.tsv"

# A method of an object, whose type no reader of the text knows.
OWNERS = {
    "._cdata": "torch:Tensor._cdata",
    "._destroy": "torch:library.Library._destroy",
    "._schema": "torch:ops.aten.add.Tensor._schema",
    "._sequence_nr": "torch:_C._functions.AccumulateGrad._sequence_nr",
    "._timeout": "torch._C._distributed_c10d:Backend.Options._timeout",
}
# Documented, though they begin so.
NAMED_TUPLES = frozenset({"_asdict", "_field_defaults", "_fields", "_make", "_replace"})

# Public, but known to change: where it is imported from, and its arguments.
PUBLIC = {
    "torch.distributed.elastic.agent.server.api:WorkerSpec": "local_world_size",
    "torch.distributed.elastic.multiprocessing:LogsSpecs": "log_dir redirects tee",
    "torch.distributed.run:config_from_args": "args",
    "torch.distributed.run:parse_args": "args",
    "torch:mm": "self mat2 out_dtype out",
    "torch:addmm": "self mat1 mat2 out_dtype out",
}


def _rows() -> Iterator[tuple[str, str, str]]:
    for line in PRIVATE.read_text("utf-8").splitlines():
        if not line.startswith("#"):
            name, arguments, files = line.split("\t")
            yield name, arguments, files


def _modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text("utf-8"))


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def _own_names(module: ast.Module) -> set[str]:
    """Names that a module defines or assigns."""
    found: set[str] = set()
    for node in ast.walk(module):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.Name(ctx=ast.Store()):
                found.add(node.id)
            case ast.Attribute(ctx=ast.Store()):
                found.add(node.attr)
    return found


def _dotted(node: ast.expr, names: dict[str, str]) -> str:
    """The full name of an expression a.b.c, by what the module has imported; "" of another."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute) and (owner := _dotted(node.value, names)):
        return f"{owner}.{node.attr}"
    return ""


def _assigned(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """What a statement assigns, each with its value: of a = b.c, and of a, d = b.c, e."""
    if not isinstance(node, ast.Assign):
        return []
    target, value = node.targets[0], node.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=False))
    return [(target, value)]


def _foreign(module: ast.Module, own: set[str]) -> Iterator[str]:
    """Private names of others that a module uses; `.name` of an object of unknown type. own: names
    that mpctl defines."""
    names: dict[str, str] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names |= {
                a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names
            }
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    for node in ast.walk(module):
        for target, value in _assigned(node):
            if isinstance(target, ast.Name) and (name := _dotted(value, names)):
                names[target.id] = name
    yield from (n for n in names.values() if _is_private(n) and not n.startswith("mpctl."))
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            name = _dotted(node, names)
            if name and not name.startswith("mpctl."):
                yield name
            elif not name and (f".{node.attr}" in OWNERS or node.attr not in own | NAMED_TUPLES):
                yield f".{node.attr}"


def test_every_private_name_is_in_the_table_with_its_files() -> None:
    modules = dict(_modules())
    own = set().union(*map(_own_names, modules.values()))
    used: dict[str, set[str]] = defaultdict(set)
    for file, module in modules.items():
        for name in _foreign(module, own):
            used[name].add(file)
    found = {name: " ".join(sorted(files)) for name, files in used.items()}
    assert found == {name: files for name, _, files in _rows()}


def test_the_table_names_the_versions_that_are_tested() -> None:
    first = PRIVATE.read_text("utf-8").splitlines()[0]
    assert first == f"# Seen to work with torch {', '.join(TESTED.values())}."


def test_a_private_name_is_found_however_it_is_reached() -> None:
    text = "import torch\nfrom torch._ops import X\nops = torch.ops.aten\n"
    text += "def f(x):\n    ops._a(x)\n    torch._b(x)\n    x._c\n    x._own\n    x._replace()\n"
    assert {*_foreign(ast.parse(text), {"_own"})} == {"torch._ops.X", "torch.ops.aten._a", "torch._b", "._c"}


def _arguments(name: str, found: Any) -> set[str]:
    """Names of the arguments that a function takes; those of all forms of an operation in C."""
    last = name.rpartition(".")[2].rpartition(":")[2]
    operation = getattr(torch.ops.aten, last, None)
    if operation is not None and not inspect.isfunction(found):
        forms = [getattr(operation, form)._schema for form in operation.overloads()]
        return {a.name for form in forms for a in form.arguments}
    return set(inspect.signature(found).parameters)


@pytest.mark.parametrize(
    ("name", "arguments"), [*((name, arguments) for name, arguments, _ in _rows()), *PUBLIC.items()]
)
def test_it_is_there_and_takes_these_arguments(name: str, arguments: str) -> None:
    found = pkgutil.resolve_name(OWNERS.get(name, name))
    if arguments != "-":
        assert {*arguments.split()} <= _arguments(name, found)


def test_torchruns_methods_have_the_parameters_that_forked_ranks_replace() -> None:
    assert unknown_torch() == "" and len(REPLACED) == 4


def test_messages_have_one_of_their_two_names() -> None:
    """torch 2.13 renames them; train/transport/group.py takes the one that is there."""
    import torch.distributed as dist

    for now, before in (
        ("all_gather_single", "all_gather_into_tensor"),
        ("reduce_scatter_single", "reduce_scatter_tensor"),
    ):
        function = getattr(dist, now, None) or getattr(dist, before)
        assert {"group", "async_op"} <= set(inspect.signature(function).parameters)


def test_a_compiled_kernel_is_launched_by_its_grid() -> None:
    """`compiled[grid](*arguments)`, as train/kernels/triton/launch.py keeps it."""
    compiler = pytest.importorskip("triton.compiler")
    assert [*inspect.signature(compiler.CompiledKernel.__getitem__).parameters] == ["self", "grid"]


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
    found = {file: members for file, module in _modules() if (members := _data_members(module))}
    assert not found, "make it a method, or an ABC that its classes name as a base"


def test_a_protocol_with_an_attribute_is_found() -> None:
    text = "@runtime_checkable\nclass A(Protocol):\n    'text'\n    w: int\n    def f(self): ...\n"
    assert _data_members(ast.parse(text)) == ["A: w: int"]
    text = "@t.runtime_checkable\nclass A(Protocol):\n    @property\n    def f(self): ...\n"
    assert _data_members(ast.parse(text)) == ["A: @property"]
