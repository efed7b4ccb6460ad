"""The public names of `mpctl`: all there, the same for type checkers, imported when first used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mpctl

STUB = Path(mpctl.__file__).with_suffix(".pyi")
HEAVY = ("torch", "numpy", "pydantic", "rich", "typer")


def heavy_after(code: str) -> list[str]:
    """Which heavy packages a fresh interpreter has imported after running `code`."""
    probe = f"import sys\n{code}\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize("name", mpctl.__all__)
def test_every_public_name_is_there_and_explained(name: str) -> None:
    value = getattr(mpctl, name)
    assert name == "__version__" or value.__doc__


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(STUB.read_text("utf-8"))
    imported = {
        (node.module, alias.name)
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == {(module, name) for module, names in mpctl.PUBLIC.items() for name in names}


def test_importing_mpctl_imports_nothing_heavy() -> None:
    assert heavy_after("import mpctl") == []


def test_planning_by_the_public_names_imports_no_torch() -> None:
    code = "from mpctl import Topology, load_plan; load_plan('two-nodes-16-gpus')"
    assert heavy_after(code) == ["pydantic"]


def test_another_name_is_refused_with_a_way_out() -> None:
    with pytest.raises(AttributeError, match=r"no public name 'Topologie'; mpctl.__all__"):
        _ = mpctl.Topologie  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_search_in_one_call_finds_what_the_command_finds() -> None:
    job = {"cluster": "dgx-h100", "model": "gpt2", "training.dtype": "bf16",
           "training.global_batch_size": 8}  # fmt: skip
    found = mpctl.search_layouts(None, job, fix=["tp=2"], top=2)
    assert [choice.layout.tp for choice in found.best] == [2, 2]
    assert found.best[0].time.total <= found.best[1].time.total
    with pytest.raises(mpctl.InputError, match="model"):
        mpctl.search_layouts(None, {"cluster": "dgx-h100"})


PROGRAM = """\
from mpctl import Topology, load_plan, search_layouts

plan = load_plan("demo", {"tp": 1})
reveal_type(plan.estimate)
reveal_type(Topology.of({"tp": 2}).group(0, "tp"))
reveal_type(search_layouts("demo").best)
plan.no_such_field
"""


@pytest.mark.slow
def test_a_type_checker_sees_the_types_of_the_library(tmp_path: Path) -> None:
    (tmp_path / "use.py").write_text(PROGRAM)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), "use.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    told = [line.split(": ", 1)[1] for line in checked.stdout.splitlines() if line[:6] == "use.py"]
    assert told == [
        'note: Revealed type is "mpctl.estimate.job.Estimate | None"',
        'note: Revealed type is "typing.Sequence[int]"',
        'note: Revealed type is "list[mpctl.search.report.LayoutReport]"',
        'error: "Plan" has no attribute "no_such_field"  [attr-defined]',
    ]
