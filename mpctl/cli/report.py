"""`mpctl report`: one page on the layout to run, for those who decide."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from mpctl.cli.options import AsJsonOption, JobSource, TokensOption, with_job
from mpctl.cli.search import layout_line

OutOption = Annotated[Path | None, typer.Option(help="Also write the report as an HTML page that prints on one sheet.")]


@with_job
def report(job: JobSource, tokens: TokensOption = None, out: OutOption = None, as_json: AsJsonOption = False) -> None:
    """Recommend a layout of JOB on one page: cost, why not the next two, risk, what to measure first.

    mpctl report --model llama-3-70b --gpus 64xh100 --tokens 300B --price 2.5 --out report.html

    Exit codes: as of mpctl search.
    """
    from mpctl.plan.planning.whole_run import read_tokens
    from mpctl.plan.search.report import report_document
    from mpctl.plan.search.request import gpu_counts, read_request
    from mpctl.plan.search.result import answer_search
    from mpctl.render.markup import write_text
    from mpctl.render.output import print_json
    from mpctl.render.progress import PATIENCE, TaskBar
    from mpctl.render.report import print_report, report_page

    amount = None if tokens is None else read_tokens(tokens)
    request = read_request(job.source, job.own, [], {}, tokens=amount, read=job.others)
    request = replace(request, warnings=(*(check.issue for check in job.warnings), *request.warnings))
    with TaskBar(after=PATIENCE) as bar:
        result = answer_search(
            request,
            gpu_counts(None, "tokens", request.job),
            top=5,
            objective="tokens",
            exhaustive=False,
            on_progress=bar.update,
            on_note=bar.note,
        )
    if not result.is_complete:  # what it has found so far is no recommendation
        raise KeyboardInterrupt
    document = report_document(result, lambda choice, verb: layout_line(job, request, choice, verb))
    if out is not None:
        again = job.line("report") + (f" --tokens {quote(tokens)}" if tokens else "") + f" --out {quote(str(out))}"
        write_text(out, report_page(document, again), option="--out")
    if as_json:
        print_json(document)
        return
    print_report(document)
