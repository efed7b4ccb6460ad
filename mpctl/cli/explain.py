"""`mpctl explain`: the figures of a plan with their formulas and numbers."""

from __future__ import annotations

from typing import Annotated

import typer

from mpctl.cli.options import AsJsonOption, JobSource, with_job

FiguresArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="FIGURE", help="Figures or groups of them; all when absent.", show_default=False),
]


@with_job(takes_words=True)
def explain(job: JobSource, figures: FiguresArgument = None, as_json: AsJsonOption = False) -> None:
    """Show the formula, numbers and source of a plan's figures.

    mpctl explain demo time.mfu memory.stage-0

    The exit code is 0 whether the job fits or not.
    """
    from mpctl.plan.planning.explain import explain as explained
    from mpctl.plan.planning.explain import explain_document
    from mpctl.plan.planning.summary import training_settings
    from mpctl.render.output import print_json

    job, wanted = job.with_first_word(job.with_words(figures))
    plan = job.plan()
    found, training = explained(plan, wanted), training_settings(plan.job)
    if as_json:
        print_json(explain_document(found, training))
        return
    from mpctl.render.plan import print_figures

    print_figures(found, training)
