"""The plan of the code: imports point down, torch stays in one wing, rich in another, no state is global.

A lazy import counts like any other: what a function imports, its module depends on. The one import
by name, of a command by cli/app.py, is held apart.
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
# Each wing imports from itself and from those before it.
WINGS = ("core", "spec", "model", "records", "plan", "interop", "train", "run", "measure", "render", "cli")
LEVELS = {"__init__": -1, **{wing: level for level, wing in enumerate(WINGS)}, "__main__": len(WINGS)}
# Lines: of a function's body without its docstring, and of a file. CONTRIBUTING.md asks for the same.
# A kernel in Triton's language is one function to its compiler, however long.
FUNCTION_MAX, FILE_MAX = 80, 600
# torch in train/ alone, numpy and scipy in train/ and measure/. Outside of train/ these rooms of it are
# imported in functions, before a run.
SEEN_BEFORE_A_RUN = {"train/data", "train/weights", "train/checkpoint"}
DRAWING = {"plotext", "matplotlib", "tensorboard"}  # imported where something is drawn or written


def has_torch(module: Module) -> bool:
    return module.wing == "train"


def is_lazy(node: ast.stmt) -> bool:
    return node.col_offset > 0


def may_see(module: Module, other: Module, node: ast.stmt) -> bool:
    if has_torch(other) and not has_torch(module) and not (is_lazy(node) and other.room in SEEN_BEFORE_A_RUN):
        return False
    return LEVELS[other.wing] <= LEVELS[module.wing]


def test_imports_point_down_only() -> None:
    wrong = [
        f"{module.at(node)}: {module.wing} imports {name}"
        for module in ALL
        for name, node in SOURCE.imported[module.name].items()
        if not may_see(module, MODULES[name], node)
    ]
    assert wrong == []


def test_there_is_no_import_cycle_between_files() -> None:
    assert find_cycle({name: set(targets) for name, targets in SOURCE.imported.items()}) == []


def test_there_is_no_import_cycle_between_rooms() -> None:
    assert find_cycle(SOURCE.arrows(lambda module: module.room)) == []


def test_a_cycle_is_found() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c", "d"}, "c": set(), "d": {"a"}}) == list("abda")
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_every_module_lies_in_a_wing() -> None:
    assert {module.wing for module in ALL} == set(LEVELS)


def test_a_class_name_is_defined_once() -> None:
    assert measures.repeated_classes(SOURCE) == {}


def test_nothing_is_patched() -> None:
    found = [use for module in ALL for use in measures.patches(module)]
    assert found == []


def test_functions_and_files_stay_short() -> None:
    lengths = measures.function_lengths(SOURCE)
    assert [place for lines, place in lengths if lines > FUNCTION_MAX and "/triton/jit/" not in place] == []
    assert [module.name for module in ALL if module.text.count("\n") > FILE_MAX] == []


def test_torch_numpy_and_rich_stay_in_their_rooms() -> None:
    for module in ALL:
        for name, node in module.imports:
            stack = name.split(".")[0]
            if stack == "torch":
                assert has_torch(module), f"{module.at(node)}: torch outside train/"
            if stack in ("numpy", "scipy"):
                assert module.wing in ("train", "measure"), f"{module.at(node)}: {stack} in the planning half"
            if stack == "rich":
                assert module.wing == "render", f"{module.at(node)}: rich outside render/"
            if stack in DRAWING:
                room = "records/rundir" if stack == "tensorboard" else "render"
                assert module.room == room and is_lazy(node), f"{module.at(node)}: {stack}"


def test_only_commands_public_names_families_and_backends_are_imported_by_name() -> None:
    by_name = {
        "importlib.import_module",
        "importlib",
        "importlib.metadata.entry_points",
        "runpy",
        "imp",
        "pkgutil",
        "pkgutil.resolve_name",
    }
    allowed = {
        "mpctl",
        "mpctl.cli.app",
        "mpctl.cli.documents",
        "mpctl.spec.families",
        "mpctl.train.families.implementation",
        "mpctl.model.families.description",
        "mpctl.interop.emitted",
        "mpctl.run.clusters.registry",
        "mpctl.train.runtime.program",
    }
    for module in ALL:
        if module.name not in allowed:
            assert [module.at(node) for name, node in module.imports if name in by_name] == []
        calls = [node for node in module.nodes if isinstance(node, ast.Call)]
        assert [module.at(c) for c in calls if ast.unparse(c.func) == "__import__"] == []


# ---------------------------------------------------------------- tests mirror mpctl/

TESTS = Path(__file__).parent
# Folders of tests/ that test no wing; `multinode` tests launches as a whole, over several nodes on
# real schedulers and networks, and `make test-clusters` alone runs it; `late` is a world of ranks
# whose messages behave as those of NCCL; `gpu` is what must hold on a CUDA device.
HELPERS = {"house", "recorded", "reference", "multinode", "late", "gpu"}


def test_tests_mirror_the_rooms() -> None:
    """One folder for families and one for checkpoints holds what two wings share."""
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")} - {Path()}
    tested = {folder.as_posix() for folder in folders if folder.parts[0] not in HELPERS}
    packages = {"/".join(module.parts[:-1]) for module in ALL}
    assert tested <= packages
    subjects = {module.room.split("/")[-1] for module in ALL if len(module.parts) > 2}
    assert subjects - {name.split("/")[-1] for name in tested} == set()


def test_tests_import_no_benchmark() -> None:
    """Benchmarks may use what tests use, never the other way round."""
    imports = re.compile(r"^\s*(?:from|import) benchmarks\b", re.M)
    found = [path.name for path in TESTS.rglob("*.py") if imports.search(path.read_text("utf-8"))]
    assert found == []


# ---------------------------------------------------------------- what no module does

UNSAFE_MODULES = {"pickle", "cPickle", "dill", "marshal", "shelve", "cloudpickle", "joblib"}
UNSAFE_CALLS = {
    "eval",
    "exec",
    "compile",
    "os.system",
    "os.popen",
    "torch.load",
    "numpy.load",
    "np.load",
    "yaml.load",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
}


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
                if keyword.arg == "shell" and not (isinstance(value, ast.Constant) and value.value is False):
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


def test_the_table_of_wings_is_that_of_the_design() -> None:
    """docs/design/README.md has a row for each wing, lowest first."""
    design = (ROOT.parent / "docs" / "design" / "README.md").read_text("utf-8")
    assert tuple(re.findall(r"^\| \[?`(\w+)/`", design, re.M)) == WINGS


@pytest.mark.parametrize("wing", WINGS)
def test_every_wing_has_a_page(wing: str) -> None:
    """What enters, what leaves, its laws; each file that the page names exists."""
    text = (ROOT / wing / "README.md").read_text("utf-8")
    named = re.findall(r"`((?:\w+/)*\w+\.py)`", text)
    assert named and [name for name in named if not (ROOT / wing / name).is_file()] == []


# ---------------------------------------------------------------- as a process

GOLDEN = ["plan", "--nodes", "2", "--gpus-per-node", "8", "--tp", "2", "--pp", "4"]
PROBE = """
import json, sys
from mpctl.cli.app import run
code = run(sys.argv[1:])
sys.stdout.flush()
heavy = ("torch", "numpy", "scipy", "rich", "tokenizers", "safetensors")
print(json.dumps([code, [name for name in heavy if name in sys.modules]]), file=sys.stderr)
"""


def loaded(*arguments: str) -> tuple[int, list[str]]:
    """Exit code of a command, and which of the heavy packages its process imported."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, timeout=60, check=True
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
    assert not {"torch", "numpy", "scipy", "tokenizers", "safetensors"} & set(names)


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
