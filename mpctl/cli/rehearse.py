"""`mpctl launch --rehearse`: simulate ranks of a job on fake tensors."""

from __future__ import annotations

from typing import NoReturn

import typer

from mpctl.cli.options import JobSource, typed_command


def require_alone(rehearse: bool, own: str, others: list[str]) -> None:
    """Raises InputError for `own`, an option of rehearsals, without --rehearse, and for options
    that a rehearsal has no use for."""
    from mpctl.errors import InputError

    if not rehearse:
        raise InputError.of("usage", own, f"{own} is of a rehearsal only", "add --rehearse")
    if others:
        raise InputError.of("usage", "--rehearse", f"has no use for {', '.join(others)}: "
                            "a rehearsal writes nothing", "leave it out")  # fmt: skip


def run_rehearsal(
    job: JobSource, device: str | None, rank: int | None, *, audits: bool, as_json: bool
) -> NoReturn:
    """Rehearse a job, print the document, exit with its exit code (launch/rehearse.py)."""
    from mpctl.errors import InputError
    from mpctl.hosts.machine import this_machine
    from mpctl.launch.rehearse import check_rehearsal, chosen_ranks, exit_code, rehearse
    from mpctl.render.output import print_json, print_warnings
    from mpctl.render.rehearsal import RehearsalView, print_rehearsal

    plan, machine = job.plan({} if device is None else {"launch.device": device}), this_machine()
    issues = check_rehearsal(plan, machine)
    if issues:
        raise InputError(issues)
    ranks = chosen_ranks(plan.require_legal(), rank)
    print_warnings([str(check.issue) for check in plan.warnings])
    with RehearsalView(len(ranks)) as view:
        document = rehearse(
            plan, machine, ranks, command=typed_command(), on_rank=view.show, audits=audits
        )
    if as_json:
        print_json(document)
    else:
        print_rehearsal(document)
    raise typer.Exit(exit_code(document))
