"""The result of `mpctl doctor`: what was measured and what follows from it, schema
mpctl.doctor/1."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from mpctl.doctor.documents import CollectiveReport, HostReport, PairResult, ReportModel


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
    the time that the host took to answer. pairs: of the hosts, by their places in `hosts`;
    all_pairs: how many there are, of which `pairs` may be a sample.
    """

    model_config = ConfigDict(populate_by_name=True)

    format: Literal["mpctl.doctor/1"] = Field("mpctl.doctor/1", alias="schema")
    mpctl: str
    backend: str
    job: str | None
    hosts: list[HostReport]
    skew: list[float]
    pairs: list[PairResult]
    all_pairs: int
    collectives: list[CollectiveReport]
    findings: list[Finding]

    @property
    def has_errors(self) -> bool:
        """Whether something would break a launch."""
        return any(finding.status == "error" for finding in self.findings)
