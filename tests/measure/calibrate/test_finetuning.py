"""Plans of fine-tuning against published runs: the errors that they reach, by source.

`python -m benchmarks.finetuning` prints the table. Bounds are what was reached, a point above; the
sources that miss a gate of STEP or MEMORY are named here as the table names them.
"""

from __future__ import annotations

import pytest

from tests.finetuning import Judged, finetuning_rows, judge, judged_rows, summary
from tests.published import BAND

STEP = 15.0  # percent, mean absolute error of a step with adapters
# Mean absolute error of steps and of peaks with adapters by source, percent; None: no row has it.
REACHED: dict[str, tuple[float | None, float | None]] = {
    "deepspeed_lora": (37.0, None),
    "fsdp_qlora": (16.5, 13.0),
    "litgpt_memory": (None, 10.5),
    "mlperf6_lora": (10.5, None),
    "mlperf_lora": (6.5, None),
    "qwen_readme": (11.7, 10.8),
    "swift": (None, 84.0),
    "torchtune": (15.8, 141.0),
}


@pytest.fixture(scope="module")
def adapters() -> list[Judged]:
    """Planned where a test asks: each process that collects the tests would plan all rows."""
    return [row for row in judged_rows() if row.has_adapter]


def test_every_row_is_planned() -> None:
    assert len(judged_rows()) == len(finetuning_rows()) == 175
    assert [row.id for row in judged_rows() if row.why] == []


def test_steps_with_adapters_hold_the_gate_and_their_bands(adapters: list[Judged]) -> None:
    found = summary(adapters)
    assert found.step is not None and found.step <= STEP
    assert found.inside is not None and 100 * BAND[0] <= found.inside <= 100 * BAND[1]


def test_runs_that_ran_fit(adapters: list[Judged]) -> None:
    """All of MLPerf's; the batches of fsdp_qlora's were chosen to fill their devices."""
    assert all(row.fits for row in adapters if row.group.startswith("mlperf"))
    assert sum(bool(row.fits) for row in adapters) >= 0.95 * len(adapters)


@pytest.mark.parametrize("source", REACHED)
def test_no_source_is_worse_than_it_was(adapters: list[Judged], source: str) -> None:
    found = summary([row for row in adapters if row.group == source])
    for reached, bound in zip((found.step, found.memory), REACHED[source], strict=True):
        assert (reached is None) is (bound is None)
        assert reached is None or bound is None or reached <= bound


def test_every_source_with_adapters_is_held(adapters: list[Judged]) -> None:
    assert {row.group for row in adapters} == REACHED.keys()


def test_a_wrong_plan_is_found() -> None:
    """A row whose measured step is halved is twice as long as planned, and outside its band."""
    row = next(row for row in finetuning_rows() if row["id"].startswith("mlperf_v41_lora_dell_XE9680x8H100"))
    half = {**row, "measured": {"step_seconds": row["measured"]["step_seconds"] / 2}}
    right, wrong = judge(row), judge(half)
    assert right.inside and not wrong.inside
    assert wrong.step_error == pytest.approx(1 + 2 * right.step_error)
