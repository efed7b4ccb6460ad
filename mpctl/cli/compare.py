"""`mpctl compare` and `mpctl tensor-modes`: plans next to each other."""

from __future__ import annotations

from typing import Annotated

import typer

from mpctl.cli import complete
from mpctl.cli.gates import FailIfOption, exit_if_failed
from mpctl.cli.options import AsJsonOption, JobSource, with_job
from mpctl.core.errors import InputError

OthersArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="OTHER",
        help="Other jobs, or settings that change JOB: tp=1,dp=2.",
        autocompletion=complete.preset_of("jobs"),
        show_default=False,
    ),
]
TpArgument = Annotated[
    list[str] | None, typer.Argument(metavar="TP", help="Sizes of tp; JOB's when absent.", show_default=False)
]


MANY = 2


@with_job(takes_words=True)
def compare(
    job: JobSource, others: OthersArgument = None, fail_if: FailIfOption = None, as_json: AsJsonOption = False
) -> None:
    """Show plans next to each other: other jobs, other settings.

    mpctl compare demo tp=1,dp=2 demo-llama --fail-if "step>+5%"
    mpctl compare tp=8 tp=4,pp=2 --model llama-3-8b --gpus 8xh100

    Options of a job hold for all of them; of two or more settings the first is what others are compared
    with. Exit codes: 0 done; 2 bad input; with --fail-if 4, a gate
    failed, and 3, a job after the first does not fit.
    """
    from mpctl.plan.planning.compare import compare_document, load_variants
    from mpctl.plan.planning.gates import read_gates
    from mpctl.render.output import print_json

    gates = read_gates(fail_if or [])
    job, words = job.with_first_word(job.with_words(others))
    jobs = [*([job.source] if job.source else []), *words]
    read = (f"--from {job.read[0]}", job.others) if job.read else None
    alone = None if job.source or read else job.model_name  # options make the job, and words are its variants
    shows_read = read is not None or len(jobs) < MANY
    named = read or ((alone, {}) if alone else None)
    variants = load_variants(jobs, job.own, named, shows_read=shows_read)
    document = compare_document(variants, gates)
    if as_json:
        print_json(document)
    else:
        from mpctl.render.compare import print_comparison

        print_comparison(document)
    exit_if_failed(document)


@with_job(takes_words=True)
def tensor_modes(job: JobSource, sizes: TpArgument = None, as_json: AsJsonOption = False) -> None:
    """Compare 1d, 2d, 2.5d and 3d tensor parallelism of JOB.

    Costs are in symbols and with JOB's numbers.

    mpctl tensor-modes demo 4 8 64
    """
    from mpctl.plan.planning.tensor_modes import tensor_modes_document
    from mpctl.render.output import print_json

    more = job.with_words(sizes)
    if wrong := [word for word in more if not word.isdecimal() or int(word) < 1]:
        message = f"{wrong[0]!r} is no size of tp"
        raise InputError.of("bad-tp", "TP", message, "for example: mpctl tensor-modes demo 4 8")
    document = tensor_modes_document(job.source, job.overrides, [int(word) for word in more])
    if as_json:
        print_json(document)
        return
    from mpctl.render.compare import print_tensor_modes

    print_tensor_modes(document)
