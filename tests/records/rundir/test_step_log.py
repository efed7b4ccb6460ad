"""What a rank logs of its last steps, and what its host reads."""

from __future__ import annotations

from pathlib import Path

from mpctl.records.rundir.breadcrumb import Breadcrumb, HostBreadcrumbs, rank_memory
from mpctl.records.rundir.step_log import NOT_COMPARED, ROWS, STEP_LOG_BYTES, StepLog, read_step_times
from tests.run.launch.attempts import new_breadcrumb, state_of


def add(log: StepLog, step: int, computing: float | None = 0.03, wait: float = 0.01) -> None:
    waits, sizes = {0: wait, -1: 1.0, 2: 0.001}, {0: 4096, 2: 8}
    log.add(step, seconds=0.05, computing=computing, processor=0.04, waits=waits, sizes=sizes)


def test_what_a_rank_logged_is_read_with_its_breadcrumb() -> None:
    shared_state = new_breadcrumb()
    for name in ("tp", "dp_cp", "world"):
        shared_state.collectives.group(name, (0, 1))
    for step in range(8, 12):
        add(shared_state.steps, step, wait=step / 1e3)
    times = state_of(shared_state).steps
    assert (times.last, times.computing, times.steps) == (11, (30_000,) * 4, range(8, 12))
    assert (times.length, times.processor, times.is_full) == (50_000, 40_000, False)
    assert times.waits == (9_500, 0, 1_000) and times.sizes == (4096, 0, 8)
    shared_state.end()
    assert state_of(shared_state).steps.last == 0


def test_the_last_rows_stay_and_a_step_with_a_save_is_marked() -> None:
    log = StepLog(memory := memoryview(bytearray(STEP_LOG_BYTES)))
    for step in range(1, 3 * ROWS):
        add(log, step, computing=None if step == 3 * ROWS - 2 else step / 1e6)
    times = read_step_times(memory, 3)
    assert times.steps == range(2 * ROWS, 3 * ROWS) and times.of(2 * ROWS) == 2 * ROWS
    assert times.of(3 * ROWS - 2) == NOT_COMPARED and times.is_full


def test_a_row_that_is_being_written_and_steps_before_a_gap_are_left_out() -> None:
    log = StepLog(memory := memoryview(bytearray(STEP_LOG_BYTES)))
    for step in (3, 4, 9, 10, 11):
        add(log, step)
    assert read_step_times(memory, 0).steps == range(9, 12)
    at = next(n for n, word in enumerate(log.words) if word == 11)
    log.words[at] = 0
    assert read_step_times(memory, 0).steps == range(9, 11)


def test_nothing_is_read_from_other_memory() -> None:
    assert read_step_times(bytes(STEP_LOG_BYTES), 4).computing == ()
    assert read_step_times(bytes(9), 4).last == 0


def test_two_ranks_of_a_host_have_logs_of_their_own(tmp_path: Path) -> None:
    host = HostBreadcrumbs(range(2, 4), tmp_path)
    add(Breadcrumb(rank_memory(3, host.environment)).steps, 5)
    assert (host.state(2).steps.last, host.state(3).steps.last) == (0, 5)
