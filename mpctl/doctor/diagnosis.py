"""The result of `mpctl doctor`: what was measured and what follows from it, schema
mpctl.doctor/1."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import ConfigDict, Field

from mpctl import __version__
from mpctl.doctor.documents import CollectiveReport, HostReport, PairResult, ReportModel
from mpctl.errors import Issue


class Finding(ReportModel):
    """Something that would break a launch (error) or is worth knowing before one (warning).

    rule: a stable id to search for; where: its subject, such as `memory`; hosts: where it was
    found; message: value and bound in words; hint: a way out.
    """

    status: Literal["error", "warning"]
    rule: str
    where: str
    hosts: list[str]
    message: str
    hint: str = ""


class Diagnosis(ReportModel):
    """Everything that `mpctl doctor` has found: schema mpctl.doctor/1.

    skew: each host's clock minus the launcher's in seconds, 0 where the difference is smaller than
    the time that the host took to answer. connect_seconds: until each host's node agent was there;
    empty on the launcher's host alone. pairs: of the hosts, by their places in `hosts`;
    all_pairs: how many there are, of which `pairs` may be a sample.
    """

    model_config = ConfigDict(populate_by_name=True)

    format: Literal["mpctl.doctor/1"] = Field("mpctl.doctor/1", alias="schema")
    mpctl: str
    backend: str
    job: str | None
    hosts: list[HostReport]
    skew: list[float]
    connect_seconds: list[float] = Field(default_factory=list)
    pairs: list[PairResult]
    all_pairs: int
    collectives: list[CollectiveReport]
    findings: list[Finding]

    @property
    def has_errors(self) -> bool:
        """Whether something would break a launch."""
        return any(finding.status == "error" for finding in self.findings)


def findings_of(issues: Iterable[Issue]) -> list[Finding]:
    """Reasons why a launch would be refused, as errors."""
    return [
        Finding(
            status="error",
            rule=issue.rule,
            where=issue.where,
            hosts=[],
            message=issue.message,
            hint=issue.hint,
        )
        for issue in issues
    ]


def of_issues(issues: Iterable[Issue], *, backend: str, job: str | None) -> Diagnosis:
    """The diagnosis where the hosts could not be used: the reasons are all that is known."""
    return Diagnosis(
        mpctl=__version__,
        backend=backend,
        job=job,
        hosts=[],
        skew=[],
        pairs=[],
        all_pairs=0,
        collectives=[],
        findings=findings_of(issues),
    )


def with_issues(diagnosis: Diagnosis, issues: Iterable[Issue]) -> Diagnosis:
    """The diagnosis with the reasons why a launch would be refused, first; without those whose rule
    was found to be broken by the hosts' own reports."""
    known = {finding.rule for finding in diagnosis.findings}
    new = [finding for finding in findings_of(issues) if finding.rule not in known]
    return diagnosis.model_copy(update={"findings": [*new, *diagnosis.findings]})
