"""What is kept of a verification that does not reach its end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mpctl.bench.cases import plan_cases
from mpctl.bench.runner import Budget, Watch
from mpctl.bench.verify import Verification
from mpctl.errors import RunFailed
from mpctl.hosts.machine import Machine
from tests.bench.small_jobs import small_case
from tests.bench.verify_runs import TWO_CORES


@pytest.mark.slow
def test_runs_before_a_failure_and_before_ctrl_c_are_in_the_report(
    tmp_path: Path, texts: Path
) -> None:
    """The second run fails when its data are gone, and is interrupted before it begins."""
    out = tmp_path / "out"
    cases = [small_case(name, texts) for name in ("first", "second")]

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    causes: dict[type[BaseException], Callable[[Path], None]] = {
        RunFailed: shutil.rmtree,
        KeyboardInterrupt: interrupt,
    }
    for error, cause in causes.items():

        def at_second(title: str, cause: Callable[[Path], None] = cause) -> None:
            if title.startswith("second"):
                cause(out / "data")

        planned = plan_cases(cases, out, Machine(2, 0, 2**40), overwrite=True)
        verification = Verification(planned, 1, None, TWO_CORES, "mpctl bench verify")
        watch = Watch(lambda *progress: None, at_second)
        with pytest.raises(error):
            verification.run(out, budget=Budget(), watch=watch)
        report = json.loads((out / "report.json").read_text())
        assert [row["name"] for row in report["results"]] == ["first"]
        assert not report["is_complete"] and report["results"][0]["agrees"]
