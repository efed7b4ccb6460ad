"""What the documents say of the repository holds: links, paths, modules, targets, examples."""

from __future__ import annotations

import ast
import re
from doctest import DocTestParser, DocTestRunner
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mpctl.plan.planning.plan import load_plan
from tests.cli.calls import caller

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md"), *ROOT.glob("benchmarks/**/*.md")]
)
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in DOCUMENTS}
DESIGN = [name for name in TEXTS if name.startswith("docs/design/") and "README" not in name]
# Code in backticks or blocks that looks like a path of the repository: lower case, with a slash
# or an ending. RUN/job.json and tests/ROOM are patterns; a user's own files have no slash.
PATH = re.compile(r"`((?:[a-z_][\w.-]*/)+(?:[\w.-]+\.(?:py|toml|json|md|pyi))?)`")
MADE_BY_USERS = (
    "runs/",
    "data/",
    "toy_family/",
    "imported/",
    "my-texts/",
    "checkpoints/",
    "logs/",
    "ranks/",
    "failures/",
    "runtimes/",
)


def anchors(text: str) -> set[str]:
    """GitHub's names of the headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_somewhere(name: str) -> None:
    text = re.sub(r"```.*?```", "", TEXTS[name], flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        if file.startswith(("http://", "https://")):
            continue
        path = (ROOT / name).parent / file if file else ROOT / name
        assert path.exists(), target
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path.read_text("utf-8")), target


@pytest.mark.parametrize("name", TEXTS)
def test_paths_exist(name: str) -> None:
    paths = {
        path
        for path in PATH.findall(TEXTS[name])
        if not path.startswith(MADE_BY_USERS) or (ROOT / "mpctl" / path).exists()
    }
    missing = [p for p in paths if not ((ROOT / p).exists() or (ROOT / "mpctl" / p).exists())]
    assert sorted(missing) == []


def test_no_document_has_the_marks_of_a_merge() -> None:
    marks = re.compile(r"^(<{7} |={7}$|>{7} )", re.M)
    assert [name for name, text in TEXTS.items() if marks.search(text)] == []


def test_there_are_paths_to_check() -> None:
    assert len(PATH.findall("".join(TEXTS[name] for name in DESIGN))) > 50


LIBRARY = re.findall(r"```python\n(.*?)```", TEXTS["docs/library.md"], flags=re.S)


def test_the_examples_of_the_library_s_page_print_what_it_shows() -> None:
    """One after the other, as a reader types them."""
    parser, runner, names = DocTestParser(), DocTestRunner(), dict[str, object]()
    for number, block in enumerate(LIBRARY, 1):
        test = parser.get_doctest(block, names, f"example {number}", "docs/library.md", 0)
        runner.run(test, clear_globs=False)
        names = test.globs
    assert runner.tries > 30 and runner.failures == 0


@pytest.mark.parametrize("name", TEXTS)
def test_modules_and_targets_that_are_typed_exist(name: str) -> None:
    modules = re.findall(r"python -m ((?:benchmarks|tests|mpctl)[\w.]*)", TEXTS[name])
    assert [module for module in modules if find_spec(module) is None] == []
    makefile = (ROOT / "Makefile").read_text("utf-8")
    rules = {target for line in re.findall(r"^([\w -]+):(?!=)", makefile, re.M) for target in line.split()}
    typed = re.findall(r"(?:`|^)make ([a-z-]+(?: [a-z-]+)*?)(?:`|  |$)", TEXTS[name], re.M)
    assert {target for line in typed for target in line.split()} <= rules


def test_every_design_page_is_listed() -> None:
    readme = TEXTS["docs/design/README.md"]
    assert {f"docs/design/{page}" for page in re.findall(r"\]\((\w+\.md)\)", readme)} == {*DESIGN}


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    """Once; `make docs` checks it too, and the links and anchors as the site has them."""
    _, navigation = (ROOT / "mkdocs.yml").read_text("utf-8").split("\nnav:\n")
    pages = re.findall(r"^ *- (?:[^:\n]+: )?(\S+\.md)$", navigation, re.M)
    shown = [f"docs/{page}" if (ROOT / "docs" / page).exists() else page for page in pages]
    assert sorted(shown) == sorted({*shown}) and [page for page in shown if not (ROOT / page).exists()] == []
    assert {name for name in TEXTS if name.startswith("docs/")} <= {*shown}


def test_every_job_of_the_page_on_tensor_modes_can_be_planned(tmp_path: Path) -> None:
    jobs = re.findall(r"^```toml\n(.*?)^```", TEXTS["docs/tensor-modes.md"], re.M | re.S)
    assert jobs
    for text in jobs:
        path = tmp_path / "job.toml"
        path.write_text(text, "utf-8")
        load_plan(str(path), {}).require_legal()


def constant(path: str, name: str) -> Any:
    """A constant of a module, read and not imported."""
    nodes = ast.walk(ast.parse((ROOT / path).read_text("utf-8")))
    assigned = (node for node in nodes if isinstance(node, ast.Assign | ast.AnnAssign))
    values = {ast.unparse(n.targets[0] if isinstance(n, ast.Assign) else n.target): n.value for n in assigned}
    return ast.literal_eval(values[name])


def test_the_page_on_layouts_is_its_generator_s() -> None:
    """All but the tables, which are measured."""
    literals = re.split(r"\{\w+\}", constant("benchmarks/layouts.py", "TEXT"))
    page, at = TEXTS["docs/layouts.md"], 0
    for literal in literals:
        assert literal in page[at:], literal
        at = page.index(literal, at) + len(literal)


def test_losses_are_compared_with_those_of_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    mpctl, layouts = caller(capsys), constant("benchmarks/layouts.py", "LAYOUTS")
    plans = {name: mpctl("plan", "demo", *layout, "--json") for name, layout in layouts.items()}
    sizes = {name: said.document["world_size"] for name, said in plans.items()}
    assert sizes == {name: 1 if name == "1" else 2 for name in layouts}
