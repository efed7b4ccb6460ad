"""Runs what `mpctl bench verify` compares, and keeps the report up to date after every run.

Whatever ends the runs early, Ctrl-C, a run that fails or the budget, the report of those before it
lies in the folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mpctl.bench.budget import Budget
from mpctl.bench.cases import PlannedCase
from mpctl.bench.folder import save_report
from mpctl.bench.report import SCHEMA, BenchEnvironment, environment_on
from mpctl.bench.runner import CaseRun, Watch, group_runs, hosts_of, run_cases
from mpctl.bench.verify import VerifyReport, verify_findings, verify_row


@dataclass
class Verification:
    """Cases that are run and compared with their plans, with the runs so far.

    job: the name of the one job whose layouts they are, None for several; rounds: how often each is
    to run; command: as typed; within: the largest mean error that passes, a share of 1; left_out:
    layouts that are not run, with the reason.
    """

    cases: Sequence[PlannedCase]
    rounds: int
    job: str | None
    environment: BenchEnvironment
    command: str
    within: float | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    runs: list[CaseRun] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether every case ran in every round."""
        return len(self.runs) == self.rounds * len(self.cases)

    def run(self, out: Path, *, budget: Budget, watch: Watch) -> None:
        """Run all rounds, and write the report into the folder `out` after every run. Raises as
        `run_cases` does, and InputError where the report cannot be written."""
        runs = run_cases(
            self.cases, out, command=self.command, rounds=self.rounds, budget=budget, watch=watch
        )
        for run in runs:
            self.runs.append(run)
            save_report(out, self.report())

    def report(self) -> VerifyReport:
        """The report of the runs so far; cases that have not run yet have no row."""
        rows = [verify_row(own) for own in group_runs(self.runs).values()]
        return {
            "schema": SCHEMA,
            "bench": "verify",
            "job": self.job,
            "is_complete": self.is_complete,
            "environment": environment_on(self.environment, hosts_of(self.runs)),
            "command": self.command,
            "results": rows,
            "findings": verify_findings(rows, within=self.within, left_out=self.left_out),
        }
