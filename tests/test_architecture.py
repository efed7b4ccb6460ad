"""The house's plan: imports point down only, torch and rich stay in their rooms, nothing is global.

Rooms as docs/design.md lists them. A lazy import counts like any other: what a function
imports, its module depends on. The one import by name, of a command by cli/app.py, is held apart.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

import mpctl

ROOT = Path(mpctl.__file__).parent
# Rooms, lowest first: each imports from earlier rows only, or from its own row as BESIDE says.
FLOORS = (
    ("__init__", "errors", "units", "durable", "axes"),
    ("sharding", "spec"),
    ("topology", "operators", "rundir"),
    ("transport", "kernels", "data"),
    ("families",),
    ("pipeline",),
    ("layout",),
    ("rules", "weights"),
    ("estimate",),
    ("planning", "runtime"),
    ("search", "batch", "calibrate", "rehearsal"),
    ("launch",),
    ("runs", "bench"),
    ("render",),
    ("cli", "__main__"),
)
LEVELS = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
BESIDE = {("kernels", "transport"), ("batch", "search"), ("__main__", "cli")}
NOT_YET = {("data", "families"), ("planning", "search"), ("search", "launch")}  # to be taken apart
# torch is imported here, and in the modules of families; the planning half never gets there.
TORCH_ROOMS = {"transport", "kernels", "data", "weights", "runtime", "rehearsal"}
TORCH_FILES = ("module", "batch", "modules", "parts", "samples")  # of families
LOOKS_INTO_TORCH = {"launch", "cli", "render"}  # in functions: before a run; a launch has no torch
SEEN_BEFORE_A_RUN = {"data", "weights"}
DRAWING = {"plotext", "matplotlib", "tensorboard"}  # imported where something is drawn or written


@dataclass(frozen=True)
class Module:
    path: Path

    @cached_property
    def name(self) -> str:
        """`mpctl.rules.check`; a package goes by its own name."""
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(["mpctl", *(part for part in parts if part != "__init__")])

    @cached_property
    def room(self) -> str:
        return self.path.relative_to(ROOT).with_suffix("").parts[0]

    @cached_property
    def has_torch(self) -> bool:
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return self.room in TORCH_ROOMS or (self.room == "families" and parts[-1] in TORCH_FILES)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text("utf-8"))

    @cached_property
    def imports(self) -> list[tuple[str, ast.Import | ast.ImportFrom]]:
        """Every imported name with its statement; `from a import b` gives `a.b` and `a`."""
        found: list[tuple[str, ast.Import | ast.ImportFrom]] = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found += [(alias.name, node) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.name}:{node.lineno}: a relative import"
                found += [(f"{node.module}.{alias.name}", node) for alias in node.names]
        return found

    @cached_property
    def own(self) -> dict[str, ast.Import | ast.ImportFrom]:
        """Modules of mpctl that this one imports."""
        found = {}
        for name, node in self.imports:
            target = name if name in MODULES else name.rpartition(".")[0]
            if target in MODULES and target != self.name:
                found[target] = node
        return found

    def at(self, node: ast.stmt | ast.expr) -> str:
        return f"{self.path.relative_to(ROOT.parent)}:{node.lineno}"


ALL = [Module(path) for path in sorted(ROOT.rglob("*.py")) if "_presets" not in path.parts]
MODULES = {module.name: module for module in ALL}
every = pytest.mark.parametrize("module", ALL, ids=lambda module: module.name)


def level(module: Module) -> int:
    assert module.room in LEVELS, f"{module.name}: give its room a level, here and in design.md"
    return LEVELS[module.room]


def is_lazy(node: ast.stmt) -> bool:
    return node.col_offset > 0


def may_see(module: Module, other: Module, node: ast.stmt) -> bool:
    edge = (module.room, other.room)
    if other.has_torch and not module.has_torch:
        seen = other.room in SEEN_BEFORE_A_RUN
        return seen and module.room in LOOKS_INTO_TORCH and is_lazy(node)
    return (
        module.room == other.room
        or level(other) < level(module)
        or edge in BESIDE
        or edge in NOT_YET
    )


@every
def test_imports_point_down_only(module: Module) -> None:
    wrong = [
        f"{module.at(node)}: {module.room} imports {name}"
        for name, node in module.own.items()
        if not may_see(module, MODULES[name], node)
    ]
    assert wrong == []


def test_there_is_no_import_cycle() -> None:
    """Depth first; a module met again while its own imports are being followed closes a cycle."""
    done: set[str] = set()

    def follow(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for target in MODULES[name].own:
                follow(target, (*trail, name))
            done.add(name)

    for name in MODULES:
        follow(name, ())
    assert done == set(MODULES)


@every
def test_torch_numpy_and_rich_stay_in_their_rooms(module: Module) -> None:
    for name, node in module.imports:
        stack = name.split(".")[0]
        if stack in ("torch", "numpy"):
            assert module.has_torch, f"{module.at(node)}: {stack} in the planning half"
        if stack == "rich":
            assert module.room == "render", f"{module.at(node)}: rich outside render/"
        if stack in DRAWING:
            room = "rundir" if stack == "tensorboard" else "render"
            assert module.room == room and is_lazy(node), f"{module.at(node)}: {stack}"


@every
def test_imports_by_name_are_only_those_of_commands_and_public_names(module: Module) -> None:
    by_name = {"importlib.import_module", "importlib", "runpy", "imp"}
    if module.name not in ("mpctl", "mpctl.cli.app"):
        assert [module.at(node) for name, node in module.imports if name in by_name] == []
    calls = [node for node in ast.walk(module.tree) if isinstance(node, ast.Call)]
    assert [module.at(c) for c in calls if ast.unparse(c.func) == "__import__"] == []


# ---------------------------------------------------------------- what no module does

UNSAFE_MODULES = {"pickle", "cPickle", "dill", "marshal", "shelve", "cloudpickle", "joblib"}
UNSAFE_CALLS = {
    "eval", "exec", "compile", "os.system", "os.popen", "torch.load", "numpy.load", "np.load",
    "yaml.load", "subprocess.getoutput", "subprocess.getstatusoutput",
}  # fmt: skip


def unsafe(tree: ast.AST) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield node, f"global {', '.join(node.names)}"
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
            yield from ((node, name) for name in names if name in UNSAFE_MODULES)
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ((node, name) for name in names if name in UNSAFE_CALLS)
            if (node.module or "").split(".")[0] in UNSAFE_MODULES:
                yield node, str(node.module)
        elif isinstance(node, ast.Call):
            if ast.unparse(node.func) in UNSAFE_CALLS:
                yield node, ast.unparse(node.func)
            for keyword in node.keywords:
                value = keyword.value
                if keyword.arg == "shell" and not (
                    isinstance(value, ast.Constant) and value.value is False
                ):
                    yield node, "shell=True"
                if keyword.arg == "allow_pickle" and ast.unparse(value) != "False":
                    yield node, "allow_pickle"


@every
def test_nothing_is_global_and_nothing_read_can_run_code(module: Module) -> None:
    assert [f"{module.at(node)}: {what}" for node, what in unsafe(module.tree)] == []


@pytest.mark.parametrize(
    "line",
    [
        "def f():\n    global x",
        "import pickle",
        "from pickle import loads",
        "from torch import load",
        "torch.load(p, weights_only=True)",
        "eval('1')",
        "exec(code)",
        "subprocess.run(line, shell=True)",
        "subprocess.run(line, shell=wanted)",
        "os.system('ls')",
        "np.load(p, allow_pickle=True)",
    ],
)
def test_the_scan_sees(line: str) -> None:
    assert list(unsafe(ast.parse(line)))


@every
def test_every_module_says_what_it_is(module: Module) -> None:
    text = ast.get_docstring(module.tree)
    assert text, module.name
    assert text.strip()[0].isupper() or text.strip()[0] in "`'\"", module.name


def test_every_room_of_the_plan_is_known_to_design_md() -> None:
    design = (ROOT.parent / "docs" / "design.md").read_text("utf-8")
    rooms = {module.room for module in ALL} - {"__init__", "__main__"}
    assert [room for room in sorted(rooms) if f"`{room}/`" not in design
            and f"`{room}.py`" not in design and f"`{room}/" not in design] == []  # fmt: skip


# ---------------------------------------------------------------- as a process

GOLDEN = ["plan", "--nodes", "2", "--gpus-per-node", "8", "--tp", "2", "--pp", "4"]
PROBE = """
import json, sys
from mpctl.cli.app import run
code = run(sys.argv[1:])
sys.stdout.flush()
heavy = ("torch", "numpy", "rich", "tokenizers", "safetensors")
print(json.dumps([code, [name for name in heavy if name in sys.modules]]), file=sys.stderr)
"""


def loaded(*arguments: str) -> tuple[int, list[str]]:
    """Exit code of a command, and which of the heavy packages its process imported."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    code, names = json.loads(done.stderr.splitlines()[-1])
    return code, names


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["plan", "--help"],
        [*GOLDEN, "--json"],
        GOLDEN,
        ["plan", "two-nodes-16-gpus", "--json"],
        ["launch", "--help"],
        ["presets"],
        ["schema"],
    ],
    ids=" ".join,
)
def test_the_planning_half_never_imports_torch(arguments: list[str]) -> None:
    code, names = loaded(*arguments)
    assert code == 0
    assert not {"torch", "numpy", "tokenizers", "safetensors"} & set(names)


def test_json_needs_no_rich() -> None:
    assert loaded(*GOLDEN, "--json") == (0, [])


def test_every_console_leaves_control_characters_out() -> None:
    """Only render/console.py makes one of rich's: its own class writes no ESC from outside."""
    makers = [
        module.name
        for module in MODULES.values()
        if module.name != "mpctl.render.console"
        and any(name in ("rich.console.Console", "rich.print") for name, _ in module.imports)
    ]
    assert makers == [], "import Console or get_console from mpctl.render.console instead"
