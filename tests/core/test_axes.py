"""Orders of axes, the kinds of groups, and an axis that is added by a row."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mpctl.core.axes import AXES, AXIS_NAMES, DEFAULT_ORDER, GROUP_KINDS, parse_order
from mpctl.plan.planning.layout_settings import LayoutSettings
from mpctl.spec.parallel import ParallelSpec

BUSY = dict.fromkeys(AXIS_NAMES, 2)


@pytest.mark.parametrize(
    ("order", "sizes", "parsed"),
    [
        (DEFAULT_ORDER, BUSY, ("tp", "cp", "dp", "pp")),
        ("tp-cp-pp-dp", BUSY, ("tp", "cp", "pp", "dp")),
        ("dp-tp", {"tp": 2, "dp": 2}, ("dp", "tp", "cp", "pp")),
        ("pp", {}, ("pp", "tp", "cp", "dp")),
    ],
)
def test_an_order_names_the_axes_fastest_first(order: str, sizes: dict[str, int], parsed: tuple[str, ...]) -> None:
    assert parse_order(order, sizes) == parsed


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        ("tp-cp-dp", "missing pp"),
        ("tp-cp-dp-pp-ep", "unknown ep"),
        ("tp-tp-cp-dp-pp", "repeated tp"),
        ("tp,cp,dp,pp", "unknown tp,cp,dp,pp"),
        ("TP-cp-dp-pp", "unknown TP; missing tp"),
        ("", "unknown ; missing tp, cp, dp, pp"),
    ],
)
def test_a_bad_order_says_what_is_wrong_with_it(order: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_order(order, BUSY)


def test_group_kinds_are_made_of_axes() -> None:
    assert all(set(axes) <= set(AXIS_NAMES) for axes in GROUP_KINDS.values())
    assert GROUP_KINDS["mp"] == ("tp", "pp")


def test_what_type_checkers_see_are_the_rows() -> None:
    assert LayoutSettings._fields[: len(AXES)] == AXIS_NAMES
    assert tuple(ParallelSpec.model_fields)[: len(AXES)] == AXIS_NAMES
    assert LayoutSettings().order == ParallelSpec().order == DEFAULT_ORDER


# mpctl with one more row in AXES, and nothing else: in a process of its own, as modules make their
# tables of the rows when they are imported.
WITH_A_TOY_AXIS = """
import sys, types
from pathlib import Path

import mpctl

source = (Path(mpctl.__file__).parent / "core" / "axes.py").read_text("utf-8")
row = 'AXES = (\\n    Axis("xp", "toy", "nothing", "nothing", "toy-parallel size"),'
assert source.count("AXES = (\\n    Axis(\\"tp\\"") == 1
source = source.replace("AXES = (\\n    Axis(\\"tp\\"", row + "\\n    Axis(\\"tp\\"", 1)
axes = sys.modules["mpctl.core.axes"] = types.ModuleType("mpctl.core.axes")
exec(compile(source, "axes.py", "exec"), axes.__dict__)
"""
USES_IT = """
import json

from mpctl.core.errors import InputError
from mpctl.plan.planning.document import plan_document, rank_document
from mpctl.plan.planning.plan import load_plan
from mpctl.plan.search.result import search_layouts

JOB = {
    "cluster": "dgx-h100", "cluster.nodes": 1, "model": "gpt2", "training.global_batch_size": 512,
}
plan = load_plan(None, {**JOB, "xp": 2, "tp": 2})
topology = plan.require_legal()
document = plan_document(plan, topology, kinds=None, ranks=True)
try:
    load_plan(None, {**JOB, "xp": 3})
except InputError as error:
    refused = str(error)
given = search_layouts(None, {**JOB, "xp": 2}, top=1)
free = search_layouts(None, JOB, top=1)
print(json.dumps({
    "document": document,
    "rank": rank_document(plan, topology, 5),
    "refused": refused,
    "given": given.fastest.layout._asdict(),
    "free": free.fastest.layout._asdict(),
    "searched": free.searched,
}))
"""


@pytest.mark.slow
def test_a_row_adds_an_axis() -> None:
    """A toy axis before tp, which splits nothing: its key, the law that it divides the world, ranks
    and groups, the plan's JSON and the search follow from the row."""
    done = subprocess.run([sys.executable, "-c", WITH_A_TOY_AXIS + USES_IT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    document = found["document"]
    assert document["sizes"] == {"xp": 2, "tp": 2, "cp": 1, "dp": 2, "pp": 1}
    assert document["order"] == "xp-tp-cp-dp-pp"
    assert document["groups"]["xp"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert document["groups"]["dp"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert found["rank"]["coords"] == {"xp": 1, "tp": 0, "cp": 0, "dp": 1, "pp": 0}
    assert "xp 3 x tp 1 x cp 1 x pp 1 = 3 does not divide" in found["refused"]
    assert "use xp 1, 2 or 4" in found["refused"]
    assert found["given"]["xp"] == 2 and found["given"]["dp"] < 8
    assert found["free"]["xp"] == 1, "an axis that splits nothing gains nothing"
    assert "xp" in found["searched"]


@pytest.mark.slow
def test_a_row_is_an_option_and_is_printed() -> None:
    command = "from mpctl.cli.entry import main; import sys; "
    words = ["plan", "--nodes", "2", "--gpus-per-node", "4", "--xp", "2", "--model", "gpt2"]
    run = f"sys.argv = ['mpctl', *{words!r}]; main()"
    done = subprocess.run([sys.executable, "-c", WITH_A_TOY_AXIS + command + run], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "xp 2 x dp 4" in done.stdout
