"""Write the run directory, its files and prepared data before the ranks start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mpctl.core.durable import write_whole
from mpctl.model.families import special_tokens
from mpctl.records.checkpoint.folder import set_aside
from mpctl.records.rundir.directory import cannot_write
from mpctl.records.rundir.launcher import write_launcher
from mpctl.records.rundir.origin import Origin
from mpctl.records.rundir.program import ATTEMPT
from mpctl.run.launch.launch_plan import LaunchPlan
from mpctl.run.launch.preflight import check_run_dir

if TYPE_CHECKING:
    from mpctl.train.data.manifest import Prepared

Progress = Callable[[str, int, int], None]


def set_up_run(plan: LaunchPlan, *, overwrite: bool, resume: bool, on_progress: Progress) -> Prepared | None:
    """Write the files that the workers read; returns the data that were prepared, if any.

    Raises InputError when the directory is occupied or cannot be written, or the corpus cannot be
    prepared; nothing of a new run is left then.
    """
    run = plan.run
    check_run_dir(run, overwrite=overwrite, resume=resume)
    try:
        if overwrite:
            run.clear()
        run.claim()
        run.stop_request.unlink(missing_ok=True)
        run.bench.unlink(missing_ok=True)  # among the plan's files where this is a bench
        for folder in plan.damaged:
            set_aside(folder)
        write_documents(plan)
        trains = plan.request is None and not plan.runs_program
        return prepare_data(plan, on_progress, run.data) if trains else None
    except BaseException as error:
        if not resume:
            run.abandon()
        if isinstance(error, OSError):
            raise cannot_write(run.path, error) from None
        raise


def write_documents(plan: LaunchPlan) -> None:
    """Write the files of the launch that ranks and other commands read, unless they are unchanged.
    Raises OSError."""
    write_launcher(plan.run.launcher, plan.launcher)
    for name, text in plan.files.items():
        path = plan.run.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_bytes() != text.encode():
            write_whole(path, text, mode=0o644)  # whoever can change it runs what they like


def name_origin(plan: LaunchPlan) -> LaunchPlan:
    """The plan of an attempt that names what its ranks start from: the job, which is written once
    more if it was lost, and the newest checkpoint. Raises OSError."""
    write_documents(plan)
    origin = Origin.of_attempt(plan.run.checkpoints, plan.files["job.json"])
    counted = {ATTEMPT: str(max(0, plan.run.num_starts() - 1))} if plan.runs_program else {}
    return replace(plan, env={**plan.env, **origin.variables, **counted})


def prepare_data(plan: LaunchPlan, on_progress: Progress, out: Path) -> Prepared | None:
    """Prepare the job's corpus in `out`, such as RUN/data; None when it is already prepared or the
    job names prepared data. The tokenizer leaves the ids of the family's special tokens free."""
    from mpctl.train.data.manifest import MANIFEST
    from mpctl.train.data.prepare import prepare
    from mpctl.train.data.tokenizer import added_tokens, find_tokenizer, missing_tokens

    data, model = plan.job.data, plan.job.model
    if data.path is not None or (out / MANIFEST).exists():
        return None
    assert model is not None and data.corpus is not None
    if data.chat is not None:
        from mpctl.train.data.chat_prepare import ChatSettings, prepare_chat

        settings = ChatSettings(
            tokenizer=data.tokenizer or "",
            seq_length=model.seq_length,
            template=data.chat.template,
            loss_on=data.chat.loss_on,
            packing=data.chat.packing,
            overflow=data.chat.overflow,
            vocab_size=model.vocab,
            validation_fraction=data.validation_fraction,
            seed=plan.job.training.seed,
            encoding=data.encoding,
        )
        return prepare_chat(data.corpus, out, settings, on_progress=on_progress)
    tokenizer = None if data.tokenizer is None else Path(data.tokenizer)
    known = {} if tokenizer is None else added_tokens(find_tokenizer(tokenizer))
    reserved = len(missing_tokens(known, special_tokens(model)))
    return prepare(
        sources=data.corpus,
        out=out,
        vocab_size=model.vocab - reserved,
        tokenizer=tokenizer,
        validation_fraction=data.validation_fraction,
        max_bytes=data.max_bytes,
        seed=plan.job.training.seed,
        text_key=data.text_key,
        encoding=data.encoding,
        on_progress=on_progress,
    )
