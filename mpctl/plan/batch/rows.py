"""From a line of untrusted input to a job that can be planned.

Lines are of bounded length, and each is one JSON object. Tables with the same text are validated
once, so that rows which share a cluster or a model cost little. Jobs of other software are
estimated even where mpctl would refuse to launch them: for a runtime other than mpctl's,
tensor-parallel groups may leave their node, and layers that do not divide over the stages, even
with embedding and loss counted as Megatron does (spec/job.py), are cut by cost. Warnings say so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

from pydantic import ValidationError

from mpctl.core.errors import InputError, Issue
from mpctl.core.units import plural
from mpctl.model.pipeline.stages import UnevenLayersError, job_stages
from mpctl.plan.estimate.makespan import GROUPS
from mpctl.plan.rules.check import Check
from mpctl.plan.rules.layout import is_countable
from mpctl.spec.job import JobSpec, complete, open_settings_of
from mpctl.spec.load import LoadedJob, Notes, partial_from_raw, resolve
from mpctl.spec.names import TABLES, with_full_names
from mpctl.spec.paths import is_config, with_preset_files_of
from mpctl.spec.presets import PresetFile
from mpctl.spec.runtime import is_launched

Raw = dict[str, Any]
LONGEST_LINE = 2**20  # bytes; a job has about two thousand


def read_lines(stream: BinaryIO, on_bytes: Callable[[int], None] | None = None) -> Iterator[bytes | None]:
    """The lines without their ends; None in place of one longer than LONGEST_LINE.

    on_bytes: called with the bytes of each line that was read.
    """
    while line := stream.readline(LONGEST_LINE + 1):
        size = len(line)
        whole: bytes | None = line
        while len(line) > LONGEST_LINE and not line.endswith(b"\n"):
            whole, line = None, stream.readline(LONGEST_LINE + 1)
            size += len(line)
        if on_bytes is not None:
            on_bytes(size)
        yield whole if whole is None else whole.rstrip(b"\r\n")


def parse_line(line: bytes | None, number: int) -> Raw:
    """The JSON object on line `number`; None is a line too long to be read. Raises InputError."""
    where = f"line {number}"
    if line is None:
        raise InputError.of(
            "line-too-long", where, f"more than {LONGEST_LINE:,} bytes", "a line is one job; long ones are no job"
        )
    if not line.strip():
        raise InputError.of("empty-line", where, "holds no job", "leave it out")
    try:
        row = json.loads(line.decode("utf-8-sig"), parse_constant=_refuse)
    except UnicodeDecodeError as error:
        raise InputError.of("bad-encoding", where, f"is not UTF-8: {error.reason}") from None
    except RecursionError:
        raise InputError.of("bad-syntax", where, "is nested too deeply") from None
    except ValueError as error:
        raise InputError.of("bad-syntax", where, f"is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise InputError.of(
            "bad-syntax",
            where,
            f"is a JSON {type(row).__name__}, not an object",
            'write {"id": ..., "model": {...}, ...}',
        )
    return row


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")


CONFIG_BYTES = 2**20
# Things that a plan counts one by one: a line with more would delay all lines after it.
LARGEST = (
    ("model.layers", 2**10),
    ("model.decoder_layers", 2**10),
    ("parallel.pp", 2**10),
    ("parallel.vpp", 2**8),
    ("cluster.nodes", 2**20),
    ("cluster.gpus_per_node", 2**16),
)
MOST_ROUNDS = 2**20  # of micro batches, over all stages
MOST_PASSES = 2**19  # of micro batches through chunks, over all stages, that may be played


def load_row(raw: Raw, folder: Path = Path()) -> LoadedJob:
    """Load a job as partial_from_raw does, but reuse tables that were validated before.

    folder: what the paths of presets' files are relative to.
    Only legal tables are cached: a row with an error or a warning is read completely.
    """
    raw = with_preset_files_of(with_full_names(raw), folder)
    _require_small_config(raw)
    tables = {key: _table(key, json.dumps(value)) for key, value in raw.items()}
    if any(table is None for table in tables.values()):
        return partial_from_raw(raw, {})
    try:
        job = JobSpec.model_validate({key: table.value for key, table in tables.items() if table})
    except ValidationError:
        return partial_from_raw(raw, {})
    presets = tuple(file for table in tables.values() if table for file in table.presets)
    return LoadedJob(complete(job), open_settings=open_settings_of(job), presets=presets)


class _Table(NamedTuple):
    """One entry of a job, expanded and validated. presets: the user's presets that it starts from."""

    value: Any
    presets: tuple[PresetFile, ...]


@lru_cache(maxsize=4096)
def _table(key: str, text: str) -> _Table | None:
    """An entry of a job from its JSON text; None where it must be read with the rest of its row: if
    it has an error or a former name, or names the preset of the job."""
    if key == "preset":
        return None
    notes = Notes.new()
    try:
        whole = resolve({}, {key: json.loads(text)}, notes)
        if notes.issues or notes.warnings:
            return None
        job = JobSpec.model_validate(whole)
    except (InputError, ValidationError):
        return None
    value = getattr(job, key, whole[key]) if key in TABLES else whole[key]
    return _Table(value, notes.own_presets())


def _require_small_config(raw: Raw) -> None:
    """A line may name a config.json, which must be a small file."""
    model = raw.get("model")
    named = model if isinstance(model, dict) else {"preset": model}
    paths = [named.get("hf_config"), *filter(is_config, [named.get("preset")])]
    for path in paths:
        if not isinstance(path, str):
            continue
        file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
        if file.exists() and not (file.is_file() and file.stat().st_size <= CONFIG_BYTES):
            raise InputError.of("hf-config", "model.hf_config", f"{path} is no small file")


def as_others_run(job: JobSpec) -> tuple[JobSpec, list[Check]]:
    """A job of another runtime in a form that can be planned, and what that assumes."""
    if job.model is None or is_launched(job.training.runtime) or not is_countable(job.model):
        return job, []
    layers, job = job.model.all_layers, _with(job, allow_tp_across_nodes=True)
    try:
        job_stages(job, layers)
        return job, []
    except UnevenLayersError as error:
        by_cost = _with(job, stage_balance="cost")
        if layers < job.parallel.pp * job.parallel.vpp or _says_cut(job):
            return job, []
        hint = "say how they are split: parallel.first_stage_layers, embedding_is_layer, ..."
        message = f"{error}: assumed to be split by cost"
        return by_cost, [Check("layers-assumed", "warning", "parallel", message, hint)]


def _says_cut(job: JobSpec) -> bool:
    p = job.parallel
    given = (p.first_stage_layers, p.last_stage_layers, p.embedding_is_layer, p.loss_is_layer)
    return any(given) or p.stage_balance == "cost"


def _with(job: JobSpec, **settings: Any) -> JobSpec:
    return job.model_copy(update={"parallel": job.parallel.model_copy(update=settings)})


def require_countable(job: JobSpec) -> None:
    """Raise InputError for a job so large that its estimate would delay the lines after it."""
    issues = []
    for where, most in LARGEST:
        table, key = where.split(".")
        value = getattr(getattr(job, table), key, None) or 0
        if value > most:
            issues.append(
                Issue(
                    "too-large",
                    where,
                    f"{value:,} is more than a batch accepts",
                    f"use at most {most:,}; `mpctl plan` takes more",
                )
            )
    p = job.parallel
    if p.pp > 1 and p.pp * p.vpp * min(job.num_microbatches, GROUPS * p.pp) > MOST_PASSES:
        message = f"{p.pp} stages of {plural(p.vpp, 'chunk')} are more than a batch simulates"
        issues.append(Issue("too-large", "parallel.pp", message, "use `mpctl plan`"))
    if p.pp > 1 and p.pp * job.num_microbatches > MOST_ROUNDS:
        message = f"{job.num_microbatches:,} micro batches on {p.pp} stages are too many"
        hint = f"use at most {MOST_ROUNDS // p.pp:,}"
        issues.append(Issue("too-large", "training.global_batch_size", message, hint))
    if issues:
        raise InputError(issues)
