"""A diagnosis as Markdown, to be pasted into a bug report."""

from __future__ import annotations

from collections.abc import Iterator

from mpctl.doctor.diagnosis import Diagnosis, Finding
from mpctl.doctor.judge_cluster import names_text
from mpctl.render.console import say
from mpctl.render.doctor import shown_findings, title_text, verdict_text
from mpctl.render.doctor_rows import fact_rows


def print_markdown(diagnosis: Diagnosis) -> None:
    """Print a diagnosis as Markdown on stdout."""
    say("\n".join(markdown_lines(diagnosis)))


def markdown_lines(diagnosis: Diagnosis) -> Iterator[str]:
    """A heading, the verdict, the findings as a list, the facts as a table that can be unfolded."""
    yield f"### mpctl doctor ({diagnosis.mpctl}): {_escaped(title_text(diagnosis))}"
    yield ""
    yield _escaped(verdict_text(diagnosis))
    yield ""
    for finding in shown_findings(diagnosis.findings):
        yield _finding_line(finding)
    yield from ("", "<details><summary>hosts</summary>", "", "| what | value |", "|---|---|")
    for topic, text in fact_rows(diagnosis):
        yield f"| {topic} | {'<br>'.join(map(_escaped, text.splitlines()))} |"
    for host in diagnosis.hosts:
        for name, value in host.software.environment.items() if host.software else ():
            yield f"| {_escaped(host.host)}: `{_escaped(name)}` | {_escaped(value)} |"
    yield from ("", "</details>")


def _finding_line(finding: Finding) -> str:
    hosts = f" on {names_text(finding.hosts)}" if finding.hosts else ""
    words = f"{finding.where}{hosts}: {finding.message} [{finding.rule}]"
    hint = f" → {_escaped(finding.hint)}" if finding.hint else ""
    return f"- **{finding.status}** {_escaped(words)}{hint}"


def _escaped(text: str) -> str:
    """Text in which Markdown and HTML find nothing to obey."""
    for mark in "\\`*_|[]<":
        text = text.replace(mark, f"\\{mark}" if mark != "<" else "&lt;")
    return " ".join(text.split())
