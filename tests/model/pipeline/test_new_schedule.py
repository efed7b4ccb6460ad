"""A schedule is added by one row: a toy one is then named, refused, ordered, timed and searched."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

SCRIPT = """
import json

from mpctl.spec import schedules

# Twice 1f1b's warm-up: a stage keeps more micro batches and waits less for messages.
eager = schedules.PipelineSchedule(lambda s, p, m: min(2 * (p - s - 1), m))
schedules.SCHEDULES["eager"] = eager

from mpctl.core.errors import InputError
from mpctl.model.pipeline.schedule.orders import actions, show
from mpctl.plan.planning.plan import load_plan
from mpctl.plan.search.bound import StepTimeBound
from mpctl.plan.search.evaluate import LayoutEvaluator
from mpctl.plan.search.space import SearchSpace

plan = load_plan("two-nodes-16-gpus", {"parallel.schedule": "eager"})
usual = load_plan("two-nodes-16-gpus")
try:
    load_plan("two-nodes-16-gpus", {"parallel.schedule": "eager", "parallel.vpp": 2})
    refusals = []
except InputError as error:
    refusals = [issue.message for issue in error.issues]
try:
    load_plan("two-nodes-16-gpus", {"parallel.schedule": "eagre"})
    hints = []
except InputError as error:
    hints = [issue.hint for issue in error.issues]
space = SearchSpace(plan.job, {"schedule": "eager", "pp": 4, "tp": 2})
evaluator = LayoutEvaluator(space)
bound = StepTimeBound(evaluator)
layouts = list(space.layouts())
times = [evaluator.step_time(layout).total for layout in layouts]
floors = [bound.of_family(layout) for layout in layouts]
print(json.dumps({
    "order": show(actions("eager", stage=1, stages=3, microbatches=3)),
    "in_flight": [stage.in_flight for stage in plan.estimate.memory],
    "usual_in_flight": [stage.in_flight for stage in usual.estimate.memory],
    "seconds": [plan.estimate.time.total, usual.estimate.time.total],
    "refusals": refusals, "hints": hints,
    "searched": len(layouts), "schedules": sorted({layout.schedule for layout in layouts}),
    "is_bound": all(floor <= time for floor, time in zip(floors, times)),
}))
"""


def test_a_schedule_is_one_row() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    assert found["order"] == "F0 F1 F2 B0 B1 B2"  # stage 1 of 3 runs 2 forwards ahead, then F2 B0
    assert found["usual_in_flight"] == [4, 3, 2, 1]
    assert found["in_flight"] == [7, 5, 3, 1]
    toy, usual = found["seconds"]
    assert 0.8 * usual < toy < 1.2 * usual
    assert found["refusals"] == ["eager cannot run with 2 chunks a stage"]
    assert found["hints"] and "eager" in found["hints"][0]
    assert found["searched"] > 0 and found["schedules"] == ["eager"]
    assert found["is_bound"]
