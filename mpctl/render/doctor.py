"""A diagnosis on the terminal: what the hosts have, what is wrong with it, the verdict."""

from __future__ import annotations

from rich.text import Text

from mpctl.doctor.diagnosis import Diagnosis, Finding
from mpctl.doctor.judge_cluster import names_text
from mpctl.render.console import NamedRows, get_console
from mpctl.render.doctor_rows import fact_rows
from mpctl.units import plural

MARKS = {"error": ("✗ ", "bold red"), "warning": ("! ", "bold yellow")}
MOST_OF_A_RULE = 5


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Print a diagnosis on stdout, the findings last."""
    console = get_console()
    console.print(Text(title_text(diagnosis), "bold"), soft_wrap=True)
    console.print(NamedRows(fact_rows(diagnosis)))
    several = len(diagnosis.hosts) > 1
    for finding in shown_findings(diagnosis.findings):
        console.print(_finding_text(finding, several=several), soft_wrap=True)
    style = "bold red" if diagnosis.has_errors else "bold green"
    console.print(Text(verdict_text(diagnosis), style), soft_wrap=True)


def title_text(diagnosis: Diagnosis) -> str:
    """`2 hosts (ssh): n1, n2, for demo`; without hosts, `hosts (ssh) could not be looked at`."""
    names = [host.host for host in diagnosis.hosts]
    job = "" if diagnosis.job is None else f", for {diagnosis.job}"
    if not names:
        return f"hosts ({diagnosis.backend}) could not be looked at{job}"
    return f"{plural(len(names), 'host')} ({diagnosis.backend}): {names_text(names)}{job}"


def verdict_text(diagnosis: Diagnosis) -> str:
    """Whether a launch would get through, and how many warnings there are."""
    errors = sum(finding.status == "error" for finding in diagnosis.findings)
    warnings = len(diagnosis.findings) - errors
    what = f"a launch of {diagnosis.job}" if diagnosis.job else "a launch"
    counts = f" ({plural(warnings, 'warning')})" if warnings else ""
    if errors:
        return f"✗ {plural(errors, 'error')} would break {what}{counts}"
    return f"✓ nothing found that would break {what}{counts}"


def shown_findings(findings: list[Finding]) -> list[Finding]:
    """At most five of each rule; the last one shown counts the others."""
    shown: list[Finding] = []
    for finding in findings:
        alike = [other for other in findings if other.rule == finding.rule]
        place = alike.index(finding)
        if place == MOST_OF_A_RULE - 1 and len(alike) > MOST_OF_A_RULE:
            more = f"{finding.message} (and {len(alike) - MOST_OF_A_RULE:,} more like this)"
            shown.append(finding.model_copy(update={"message": more}))
        elif place < MOST_OF_A_RULE:
            shown.append(finding)
    return shown


def _finding_text(finding: Finding, *, several: bool) -> Text:
    """`✗ n2 network: message  [rule]`, and the way out in a line of its own."""
    hosts = f"{names_text(finding.hosts)} " if several and finding.hosts else ""
    text = Text.assemble(MARKS[finding.status], (f"{hosts}{finding.where}", "bold"),
                         f": {finding.message}", (f"  [{finding.rule}]", "dim"))  # fmt: skip
    return text.append("\n  → ", "cyan").append(finding.hint) if finding.hint else text
