"""Everything that would make a launch fail, found before a process is started.

The layout itself was checked by the plan. Here: what this version runs, whether the machine carries
the world, whether the data are there. All issues at once, as everywhere.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from mpctl.errors import InputError, Issue
from mpctl.estimate.checkpoint import most_at_once
from mpctl.families import get_family, least_tokens, special_tokens
from mpctl.launch.environment import environment_issues
from mpctl.launch.local.host import Device, host_issues, rehearsal_warnings
from mpctl.launch.local.machine import Machine
from mpctl.launch.resume import Resumption, job_before, model_issues
from mpctl.launch.tokenizers import tokenizer_warnings
from mpctl.planning.plan import Plan
from mpctl.rules.check import listed
from mpctl.rundir.checkpoints import list_checkpoints, newest_checkpoint
from mpctl.rundir.directory import RunDir, cannot_write
from mpctl.rundir.event_files import missing_tensorboard
from mpctl.rundir.shards import MANIFEST, checkpoint_bytes, find_damage
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec
from mpctl.spec.runtime import OWN_RUNTIME, get_profile, is_launched
from mpctl.units import bytes_text, plural


def chosen_device(job: JobSpec, machine: Machine) -> Device:
    """What the job asks for; `auto` follows its cluster's device, else what is present."""
    if job.launch.device != "auto":
        return job.launch.device
    if job.cluster.device is not None:
        return job.cluster.device.kind
    return "cuda" if machine.gpus else "cpu"


def check_launch(
    plan: Plan, machine: Machine, run: RunDir | None = None, *,
    resumption: Resumption | None = None, replaced: bool = False,
) -> list[Issue]:  # fmt: skip
    """Every reason not to start; empty when the job can run here.

    run: where it is going to write. resumption: what a run that is continued goes on from.
    replaced: whether the run that is there will be removed.
    """
    job = plan.job
    surroundings = list(environment_issues(job))
    if surroundings:  # data and weights could not be looked at with these
        return surroundings
    if job.model is None:
        return [Issue("no-model", "model", "a launch needs a model",
                      "name a job (mpctl launch demo), or a model: --model gpt2")]  # fmt: skip
    resumed = None if resumption is None else resumption.run
    saved = [] if resumption is None else resumption.issues
    if resumption is not None:
        saved += model_issues(job, job_before(resumption.run), resumption.run)
    done = resumption.step if resumption else 0
    disk = () if run is None else _disk(plan, run, done, replaced=replaced)
    extras = missing_tensorboard("launch.tensorboard") if job.launch.tensorboard else []
    checks = (_unsupported(job), _targets(job.model),
              host_issues(plan, machine, chosen_device(job, machine)), _data(job, resumed),
              _initial(job, resumed), extras, disk)  # fmt: skip
    return [*chain.from_iterable(checks), *saved]


def check_replaced(job: JobSpec, run: RunDir) -> list[Issue]:
    """--overwrite must not remove the weights that the new run starts from."""
    origin = job.training.init_from
    if origin is None or not Path(origin).resolve().is_relative_to(run.path.resolve()):
        return []
    return [Issue("init-from-replaced", "training.init_from", f"{origin} lies in the run that "
                  "--overwrite removes", "use another --run-dir")]  # fmt: skip


def check_run_dir(run: RunDir, *, overwrite: bool, resume: bool) -> None:
    """Raises InputError unless the directory is what the flags say and its name can be one."""
    try:
        if resume:
            run.require_run()
        elif overwrite:
            run.require_replaceable()
        else:
            run.require_free()
    except OSError as error:
        raise cannot_write(run.path, error) from None


def launch_warnings(
    job: JobSpec, machine: Machine, *, resumption: Resumption | None = None
) -> list[str]:
    """What is worth saying of a job that can start. A run that goes on from a checkpoint starts
    from no other weights."""
    found = list(_compile_warnings(job))
    if resumption is None or resumption.folder is None:
        found += tokenizer_warnings(job)
    if chosen_device(job, machine) == "cpu":
        found += rehearsal_warnings(job, machine)
    return found


def _compile_warnings(job: JobSpec) -> Iterator[str]:
    """torch.compile ends its graph at a layer's collectives and random masks, and captures next to
    nothing of a layer that is recomputed: such a job gains nothing, and pays for the attempt."""
    t, tp = job.training, job.parallel.tp
    settings = (
        (tp > 1, f"parallel.tp {tp}", "parallel.tp 1"),
        (t.dropout > 0, f"training.dropout {t.dropout:g}", "dropout 0"),
        (t.attention_dropout > 0, f"training.attention_dropout {t.attention_dropout:g}",
         "attention_dropout 0"),
        (t.recompute == "full", "training.recompute full", "recompute none or selective"),
    )  # fmt: skip
    held = [(now, better) for is_held, now, better in settings if is_held]
    if job.launch.compile and held:
        now, better = (" and ".join(words) for words in zip(*held, strict=True))
        yield (f"launch.compile does not help with {now}: layers run mostly uncompiled; use "
               f"{better}, or launch.compile false")  # fmt: skip


def _unsupported(job: JobSpec) -> Iterator[Issue]:
    runs, training, mode = get_profile(OWN_RUNTIME).runs, job.training, job.parallel.tensor_mode
    if mode not in runs.tensor_modes:
        yield Issue("not-run-yet", "parallel.tensor_mode",
                    f"{mode!r} is planned but not run by this version",
                    f"use {listed([repr(known) for known in runs.tensor_modes])}; "
                    "`mpctl plan` takes it as it stands")  # fmt: skip
    for key, dtype in (("dtype", training.dtype), ("gradient_dtype", training.reduced_dtype)):
        if dtype not in runs.dtypes:
            yield Issue("not-run-yet", f"training.{key}", f"{dtype} is planned but not run by this "
                        "version", f"use {', '.join(runs.dtypes)}")  # fmt: skip


def _targets(model: ModelSpec) -> Iterator[Issue]:
    """A decoder must hold the targets that its family's samples have for an input."""
    target_length = get_family(model.family).target_length
    if target_length is None:
        return
    least = target_length(model.seq_length)
    if (model.decoder_seq_length or 0) < least:
        yield Issue("decoder-holds-targets", "model.decoder_seq_length",
                    f"{model.decoder_seq_length} tokens, but inputs of {model.seq_length} have "
                    f"{least} targets", f"use {least} or more")  # fmt: skip


def _disk(plan: Plan, run: RunDir, done: int, *, replaced: bool) -> Iterator[Issue]:
    """The checkpoints that will lie on the disk at the same time must fit there."""
    if plan.estimate is None or not is_launched(plan.job.training.runtime):
        return
    training, each = plan.job.training, plan.estimate.checkpoint_bytes
    copies = most_at_once(training, done=done)
    paths = (run.path, *run.path.parents)
    place = next((path for path in paths if os.path.exists(path)), Path("/"))  # noqa: PTH110
    usage = shutil.disk_usage(place)
    free = usage.free
    if replaced and place == run.path:
        free += sum(
            checkpoint_bytes(path) for _, path in list_checkpoints(run.path / "checkpoints")
        )
    if copies * each <= free or not usage.total:  # 0: a file system that does not tell
        return
    few = "training.keep_last 1, " if copies > 2 else ""
    yield Issue("disk-holds-checkpoints", "--run-dir", f"{plural(copies, 'checkpoint')} of "
                f"{bytes_text(each)} will lie in {run.path} at once: {bytes_text(copies * each)}, "
                f"but {bytes_text(free)} are free there",
                f"use {few}a larger training.checkpoint_interval, or a --run-dir on a larger disk",
                )  # fmt: skip


def _initial(job: JobSpec, resumed: RunDir | None) -> list[Issue]:
    """The weights to start from, by their headers; a run with a checkpoint needs them no more."""
    if job.training.init_from is None or (resumed is not None and resumed.last_checkpoint()):
        return []
    from mpctl.data.extension import find_extension
    from mpctl.data.special import added_tokens, missing_tokens
    from mpctl.data.tokenizer import find_tokenizer
    from mpctl.weights.origin import origin_issues

    assert job.model is not None
    origin, place = Path(job.training.init_from), job.data.path or job.data.tokenizer
    issues = _origin_damage(origin)
    if issues or place is None:
        return issues or origin_issues(origin, job.model)
    tokenizer = find_tokenizer(Path(place))
    try:
        extension, known = find_extension(tokenizer), added_tokens(tokenizer)
    except (InputError, OSError):  # _data says what is wrong with it
        return []
    reserved = len(missing_tokens(known, special_tokens(job.model)))
    return origin_issues(origin, job.model, extension, reserved=reserved)


def _origin_damage(origin: Path) -> list[Issue]:
    """What is wrong with mpctl's own checkpoint in `origin`. It is hashed here, once; ranks compare
    sizes only."""
    if (origin / "config.json").is_file():
        return []
    folder = origin if (origin / MANIFEST).is_file() else newest_checkpoint(origin)
    return [] if folder is None else find_damage(folder)


def _data(job: JobSpec, resumed: RunDir | None) -> Iterator[Issue]:
    if job.data.path is not None:
        yield from _prepared(job, Path(job.data.path))
    elif resumed is not None and (resumed.path / "data").is_dir():
        yield from _prepared(job, resumed.path / "data")
    elif job.data.corpus is None:
        yield Issue("no-data", "data", "neither data.path nor data.corpus says what to train on",
                    "use --set 'data.corpus=[\"python-stdlib\"]', or `mpctl data prepare` and "
                    "--set data.path=FOLDER")  # fmt: skip
    else:
        yield from _corpus(job)


def _prepared(job: JobSpec, path: Path) -> Iterator[Issue]:
    from mpctl.data.manifest import open_prepared, open_validations

    assert job.model is not None
    try:
        prepared = open_prepared(path)
        folders = {name: Path(folder) for name, folder in job.data.validation.items()}
        others = open_validations(prepared, folders)
    except InputError as error:
        yield from error.issues
        return
    yield from _vocabulary(job.model, prepared.tokenizer_path, prepared.tokenizer_vocab_size)
    validations = [other.validation for other in (prepared, *others.values())]
    for split in (prepared.train, *validations):
        is_needed = split is prepared.train or job.training.eval_samples > 0
        if is_needed and split.tokens < (least := least_tokens(job.model)):
            yield Issue("too-few-tokens", "model.seq_length", f"{split.prefix} holds "
                        f"{split.tokens} tokens, fewer than the {least} that samples of "
                        f"{job.model.seq_length} take",
                        "prepare more text, or use a shorter sequence")  # fmt: skip


def _vocabulary(model: ModelSpec, tokenizer: Path, words: int) -> Iterator[Issue]:
    """Text and the family's special tokens must fit the model's table."""
    from mpctl.data.special import added_tokens, special_ids

    if words > model.vocab:
        yield Issue("vocabulary-fits-model", "model.vocab", f"{model.vocab} rows, but the "
                    f"tokenizer {tokenizer} has {words} pieces",
                    f"use model.vocab {words} or more")  # fmt: skip
        return
    try:
        special_ids(added_tokens(tokenizer), special_tokens(model), vocab=model.vocab, words=words)
    except InputError as error:
        yield from error.issues


def _corpus(job: JobSpec) -> Iterator[Issue]:
    from mpctl.data.corpus import find_files

    data = job.data
    try:
        find_files(data.corpus or [], max_bytes=data.max_bytes, encoding=data.encoding)
    except InputError as error:
        yield from error.issues
    if job.data.tokenizer is not None:
        from mpctl.data.tokenizer import find_tokenizer

        if not find_tokenizer(Path(job.data.tokenizer)).is_file():
            yield Issue("no-such-file", "data.tokenizer", f"{job.data.tokenizer} is neither a "
                        "file nor a folder that holds a tokenizer.json")  # fmt: skip
