"""The public names of `mpctl`: all there, the same for type checkers, imported when first used."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mpctl
from mpctl.plan.batch.answers import figures
from mpctl.plan.planning.summary import plan_summary, verdict

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
        (node.module, alias.name) for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imported == {(module, name) for module, names in mpctl.PUBLIC.items() for name in names}


def test_importing_mpctl_imports_nothing_heavy() -> None:
    assert heavy_after("import mpctl") == []


def test_planning_by_the_public_names_imports_no_torch() -> None:
    code = "from mpctl import Topology, load_plan; load_plan('two-nodes-16-gpus')"
    assert heavy_after(code) == ["pydantic"]


def defaults() -> dict[str, object]:
    """Default values of the public functions and classes, by name."""
    values = {name: getattr(mpctl, name) for name in mpctl.__all__ if name != "__version__"}
    values |= {
        f"{name}.{key}": method
        for name, value in values.items()
        if inspect.isclass(value)
        for key in vars(value)
        if key[0] != "_" and callable(method := getattr(value, key))
    }
    return {
        f"{name}({key})": parameter.default
        for name, value in values.items()
        for key, parameter in inspect.signature(value).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }


def test_help_shows_defaults_that_can_be_read() -> None:
    shown = {name: repr(value) for name, value in defaults().items()}
    assert len(shown) > 100
    assert {n: text for n, text in shown.items() if " at 0x" in text or len(text) > 200} == {}


@pytest.mark.parametrize("job", ["demo", "gpt3-175b-1024"])
def test_results_are_shown_in_a_line_or_two(job: str) -> None:
    plan = mpctl.load_plan(job)
    results = [plan, plan.estimate, plan.layout, plan.topology, plan.job, plan.job.model]
    assert all(len(repr(result)) < 450 for result in results)
    assert plan.job.label in repr(plan) and plan.estimate.verdict in repr(plan)


def test_a_search_and_its_layouts_are_shown_in_a_line() -> None:
    found = mpctl.search_layouts("demo", top=2)
    assert len(repr(found)) < 250 and repr(found.rows[0]) in repr(found)
    assert found.rows[0].verdict in repr(found.rows[0])


@pytest.mark.parametrize("job", ["demo", "gpt3-175b-1024", "tp8-dp192"])
def test_the_figures_of_an_estimate_are_those_of_every_other_output(job: str) -> None:
    plan = mpctl.load_plan(job)
    estimate, summary = plan.estimate, plan_summary(plan)
    for name in ("step_seconds", "tokens_per_second", "mfu", "hfu", "device_bytes", "fits"):
        assert getattr(estimate, name) == getattr(summary, name)
    assert (estimate.verdict, estimate.fits) == (verdict(plan), plan.fits)
    answer = figures(plan)
    assert (estimate.mfu, estimate.tokens_per_second) == (answer["mfu"], answer["tokens_per_second"])


def test_without_a_device_an_estimate_has_no_time_and_no_answer_whether_it_fits() -> None:
    estimate = mpctl.load_plan(None, {"model": "gpt2"}).estimate
    assert (estimate.step_seconds, estimate.mfu, estimate.hfu, estimate.tokens_per_second) == (None, None, None, None)
    assert estimate.fits is None and "no device is named" in estimate.verdict
    assert repr(estimate).startswith("Estimate(no step time, legal; not known whether it fits")


def test_another_name_is_refused_with_a_way_out() -> None:
    with pytest.raises(AttributeError, match=r"no public name 'Topologie'; mpctl.__all__"):
        _ = mpctl.Topologie  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_search_in_one_call_finds_what_the_command_finds() -> None:
    job = {"cluster": "dgx-h100", "model": "gpt2", "training.dtype": "bf16", "training.global_batch_size": 8}
    found = mpctl.search_layouts(None, job, fix=["tp=2"], top=2)
    assert {choice.layout.tp for choice in found.rows} == {2}
    assert found.fastest == found.rows[0] and found.suggested in found.rows
    assert found.rows[0].time.total <= found.rows[1].time.total
    with pytest.raises(mpctl.InputError, match="model"):
        mpctl.search_layouts(None, {"cluster": "dgx-h100"})


PROGRAM = """\
from mpctl import Topology, load_plan, search_layouts

plan = load_plan("demo", {"tp": 1})
reveal_type(plan.estimate)
reveal_type(Topology.of({"tp": 2}).group(0, "tp"))
reveal_type(search_layouts("demo").rows)
plan.no_such_field
"""


@pytest.mark.slow
def test_a_type_checker_sees_the_types_of_the_library(tmp_path: Path) -> None:
    (tmp_path / "use.py").write_text(PROGRAM)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), "use.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    told = [line.split(": ", 1)[1] for line in checked.stdout.splitlines() if line[:6] == "use.py"]
    assert told == [
        'note: Revealed type is "mpctl.plan.estimate.job.Estimate | None"',
        'note: Revealed type is "typing.Sequence[int]"',
        'note: Revealed type is "list[mpctl.plan.search.result.LayoutReport]"',
        'error: "Plan" has no attribute "no_such_field"  [attr-defined]',
    ]


JOB = {"cluster": {"preset": "dgx-h100", "nodes": 1}, "model": "gpt2", "parallel": {"tp": 2}}


def test_a_job_is_a_file_a_name_or_tables(tmp_path: Path) -> None:
    """The tables of a line of a batch, a file with them, and the same as settings are one plan."""
    path = tmp_path / "job.json"
    path.write_text(json.dumps(JOB), "utf-8")
    settings = {"cluster": "dgx-h100", "cluster.nodes": 1, "model": "gpt2", "tp": 2}
    plans = [mpctl.load_plan(source) for source in (JOB, path, str(path))]
    plans.append(mpctl.load_plan(None, settings))
    assert len({plan.estimate.step_seconds for plan in plans if plan.estimate}) == 1
    assert mpctl.load_plan(JOB, {"tp": 4}).job.parallel.tp == 4
    fastest = mpctl.search_layouts(JOB, {"pp": 1, "tp": 1}, top=1).fastest
    assert fastest and fastest.job.parallel.tp == 1
    assert JOB["parallel"] == {"tp": 2}  # unchanged


WRONG: tuple[Any, ...] = (5, 2.5, b"x", [5], {5: 1}, object(), ("tp", 2), {"tp": {"x": 1}}, {"parallel": 5})
TEXT: tuple[Any, ...] = (5, 2.5, b"x", [5], {"a": 1}, object())
GRID = mpctl.Topology.of({"tp": 2, "pp": 2})
CALLS: dict[str, tuple[Callable[[Any], object], tuple[Any, ...]]] = {
    "source": (mpctl.load_plan, WRONG),
    "overrides": (lambda value: mpctl.load_plan("demo", value), WRONG),
    "job": (mpctl.load_job, WRONG),
    "tp": (lambda value: mpctl.load_plan("demo", {"tp": value}), ("x", 2.5, [2], {"a": 1}, object())),
    "cluster": (lambda value: mpctl.load_plan("demo", {"cluster": value}), (5, [5], {"a": 1}, object())),
    "search": (mpctl.search_layouts, WRONG),
    "gpus": (lambda value: mpctl.search_layouts("demo", gpus=value), (5, 2.5, ["x"], [{}], object())),
    "fix": (lambda value: mpctl.search_layouts("demo", fix=value), (5, "pp=1", [5], None)),
    "price": (lambda value: mpctl.search_layouts("demo", price=value), ("x", [5], object())),
    "tokens": (lambda value: mpctl.search_layouts("demo", tokens=value), ("x", 2.5, [5])),
    "objective": (lambda value: mpctl.search_layouts("demo", objective=value), TEXT),
    "sort": (lambda value: mpctl.search_layouts("demo", sort=value), TEXT),
    "sizes": (mpctl.Topology.of, (5, [5], {"tp": "2"}, {"tp": 2.5}, {5: 1}, "tp")),
    "order": (lambda value: mpctl.Topology.of({"tp": 2}, order=value), TEXT),
    "gpus_per_node": (lambda value: mpctl.Topology.of({"tp": 2}, gpus_per_node=value), ("8", 2.5, [8])),
    "split_stage": (lambda value: mpctl.Topology.of({"pp": 2}, split_stage=value), ("0", 0.5, [0])),
    "rank": (GRID.coords, ("0", 0.5, [0], None)),
    "group": (lambda value: GRID.group(0, value), TEXT),
    "kind": (lambda value: list(GRID.kind_groups(value)), TEXT),
    "factored": (lambda value: GRID.factored(value, {"a": 2}), TEXT),
    "parts": (lambda value: GRID.factored("tp", value), (5, [5], "tp", {"a": "2"})),
    "view": (lambda value: GRID.view(value, order="ep-edp"), (5, [5], "tp", {"ep": "4"})),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_value_of_a_wrong_type_is_an_input_error(name: str) -> None:
    call, values = CALLS[name]
    for value in values:
        with pytest.raises(mpctl.InputError):
            call(value)
