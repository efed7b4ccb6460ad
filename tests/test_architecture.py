"""The house's plan: imports point down only, torch and rich stay in their rooms, nothing is global.

Rooms as docs/design/README.md lists them. A lazy import counts like any other: what a function
imports, its module depends on. The one import by name, of a command by cli/app.py, is held apart.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpctl
from tests.house import measures
from tests.house.source import Module, Source, find_cycle

SOURCE = Source(Path(mpctl.__file__).parent)
ROOT, MODULES = SOURCE.root, SOURCE.modules
ALL = tuple(MODULES.values())
# Rooms, lowest first: each imports from earlier rows only, or from its own row as BESIDE says.
FLOORS = (
    (
        "__init__",
        "errors",
        "units",
        "cores",
        "durable",
        "locks",
        "axes",
        "collectives",
        "records",
        "tensor_grid",
        "shard",
    ),
    ("sharding", "spec"),
    ("topology", "operators"),
    ("transport", "kernels", "data"),
    ("layers",),
    ("families",),
    ("pipeline",),
    ("layout",),
    ("rules", "checkpoint"),
    ("weights", "rundir", "estimate"),
    ("planning", "runtime"),
    ("search", "batch", "calibrate", "rehearsal", "interop", "hosts"),
    ("launch",),
    ("clusters", "inference"),
    ("runs", "bench", "doctor"),
    ("tune",),
    ("render",),
    ("cli", "__main__"),
)
LEVELS = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
BESIDE = {("batch", "search"), ("__main__", "cli")}
# The modules that lie in mpctl/ itself; everything else has a room.
TOP_LEVEL = {
    "__init__", "__main__", "errors", "units", "cores", "durable", "locks", "axes", "collectives",
    "records", "tensor_grid", "shard", "sharding", "topology",
}  # fmt: skip
# Lines, docstrings not counted; the longest functions are commands: an option is a parameter.
FUNCTION_MAX, FILE_MAX = 80, 700
# torch is imported here, and in these files of two other rooms; the planning half never gets there.
TORCH_ROOMS = {"transport", "kernels", "layers", "data", "weights", "runtime", "rehearsal"}
TORCH_FILES = {
    "families": (
        "module", "parts", "samples", "implementation",
    ),
    "checkpoint": ("tensor_file", "reader", "snapshot", "writer", "saver", "reshard"),
}  # fmt: skip
# In functions: before a run. A launch has no torch.
LOOKS_INTO_TORCH = {"launch", "inference", "cli", "render"}
SEEN_BEFORE_A_RUN = {"data", "weights", "checkpoint"}
DRAWING = {"plotext", "matplotlib", "tensorboard"}  # imported where something is drawn or written


def has_torch(module: Module) -> bool:
    return module.room in TORCH_ROOMS or module.parts[-1] in TORCH_FILES.get(module.room, ())


def level(module: Module) -> int:
    assert module.room in LEVELS, (
        f"{module.name}: give its room a level, here and in docs/design/README.md"
    )
    return LEVELS[module.room]


def is_lazy(node: ast.stmt) -> bool:
    return node.col_offset > 0


def may_see(module: Module, other: Module, node: ast.stmt) -> bool:
    edge = (module.room, other.room)
    if has_torch(other) and not has_torch(module):
        seen = other.room in SEEN_BEFORE_A_RUN
        return seen and module.room in LOOKS_INTO_TORCH and is_lazy(node)
    return module.room == other.room or level(other) < level(module) or edge in BESIDE


def test_imports_point_down_only() -> None:
    wrong = [
        f"{module.at(node)}: {module.room} imports {name}"
        for module in ALL
        for name, node in SOURCE.imported[module.name].items()
        if not may_see(module, MODULES[name], node)
    ]
    assert wrong == []


def test_there_is_no_import_cycle_between_files() -> None:
    assert find_cycle({name: set(targets) for name, targets in SOURCE.imported.items()}) == []


def test_there_is_no_import_cycle_between_rooms() -> None:
    assert find_cycle(SOURCE.arrows) == []


def test_a_cycle_is_found() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c", "d"}, "c": set(), "d": {"a"}}) == list("abda")
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_only_the_agreed_modules_lie_outside_of_a_room() -> None:
    assert {module.parts[0] for module in ALL if len(module.parts) == 1} == TOP_LEVEL


def test_a_class_name_is_defined_once() -> None:
    assert measures.repeated_classes(SOURCE) == {}


def test_nothing_is_patched() -> None:
    found = [use for module in ALL for use in measures.patches(module)]
    assert found == []


def test_functions_and_files_stay_short() -> None:
    lengths = measures.function_lengths(SOURCE)
    assert [place for lines, place in lengths if lines > FUNCTION_MAX] == []
    assert [module.name for module in ALL if module.text.count("\n") > FILE_MAX] == []


def test_torch_numpy_and_rich_stay_in_their_rooms() -> None:
    for module in ALL:
        for name, node in module.imports:
            stack = name.split(".")[0]
            if stack in ("torch", "numpy"):
                assert has_torch(module), f"{module.at(node)}: {stack} in the planning half"
            if stack == "rich":
                assert module.room == "render", f"{module.at(node)}: rich outside render/"
            if stack in DRAWING:
                room = "rundir" if stack == "tensorboard" else "render"
                assert module.room == room and is_lazy(node), f"{module.at(node)}: {stack}"


def test_only_commands_public_names_families_and_backends_are_imported_by_name() -> None:
    by_name = {
        "importlib.import_module", "importlib", "importlib.metadata.entry_points", "runpy", "imp",
        "pkgutil", "pkgutil.resolve_name",
    }  # fmt: skip
    allowed = {"mpctl", "mpctl.cli.app", "mpctl.spec.families", "mpctl.families.implementation",
               "mpctl.families.description", "mpctl.clusters.registry",
               "mpctl.runtime.program"}  # fmt: skip
    for module in ALL:
        if module.name not in allowed:
            assert [module.at(node) for name, node in module.imports if name in by_name] == []
        calls = [node for node in module.nodes if isinstance(node, ast.Call)]
        assert [module.at(c) for c in calls if ast.unparse(c.func) == "__import__"] == []


# ---------------------------------------------------------------- tests mirror mpctl/

TESTS = Path(__file__).parent
# Folders of tests/ that test no room; `multinode` tests launches as a whole, over several nodes on
# real schedulers and networks, and `make test-clusters` alone runs it; `late` is a world of ranks
# whose messages behave as those of NCCL; `gpu` is what must hold on a CUDA device.
HELPERS = {"house", "recorded", "reference", "multinode", "late", "gpu"}
OF_THE_WHOLE = {
    "architecture",
    "benchmarks",
    "doctests",
    "documents",
    "matrix",
    "versions",
    "packages",
    "workflows",
    "public",
    "rank_groups",
}  # tests/test_X.py that test no X.py


def test_tests_mirror_the_rooms() -> None:
    packages = {module.parts[0] for module in ALL if len(module.parts) > 1}
    folders = {path.parent.name for path in TESTS.glob("*/test_*.py")}
    assert folders - HELPERS == packages
    files = {path.stem.removeprefix("test_") for path in TESTS.glob("test_*.py")}
    assert files - OF_THE_WHOLE <= TOP_LEVEL


def test_tests_import_no_benchmark() -> None:
    """Benchmarks may use what tests use, never the other way round."""
    imports = re.compile(r"^\s*(?:from|import) benchmarks\b", re.M)
    found = [path.name for path in TESTS.rglob("*.py") if imports.search(path.read_text("utf-8"))]
    assert found == []


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


def test_nothing_is_global_and_nothing_read_can_run_code() -> None:
    assert [f"{m.at(node)}: {what}" for m in ALL for node, what in unsafe(m.tree)] == []


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


def test_every_module_says_what_it_is() -> None:
    for module in ALL:
        text = ast.get_docstring(module.tree)
        assert text, module.name


def test_the_table_of_rooms_is_that_of_the_design() -> None:
    """docs/design/README.md has a row for each row of FLOORS, with the same rooms in it."""
    design = (ROOT.parent / "docs" / "design" / "README.md").read_text("utf-8")
    rows = [line.split("|")[1] for line in design.splitlines() if line.startswith("| `")]
    told = [sorted(re.findall(r"`(\w+)(?:\.py|/)`", row)) for row in rows]
    assert told == [sorted({*rooms} - {"__init__", "__main__"}) for rooms in FLOORS]


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
