"""Logs of other launchers as measured runs: rows of `mpctl calibrate`, with a layout and a step.

The layout is, in this order: a job file's or a job's tables, another launcher's flags (as
`--from` reads them), what the log prints of its settings. Ranks that none of these gives are those
of the log. A step's seconds are the log's; where it prints a rate alone, the tokens or samples of
a step, which the layout gives, divided by it. By hand, torchtitan's 5,000 tokens/s on each of 64
ranks with 128 samples of 8,192 tokens: 1,048,576 / 320,000 = 3.28 s.

What log and layout both say must agree: the ranks, the samples of a step, and its rate times its
seconds with the tokens or samples of a step, within TOLERANCE.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mpctl.core.errors import InputError, Issue, attempt
from mpctl.core.units import plural, seconds_text
from mpctl.interop.command_line import read_flags
from mpctl.interop.emitted import launcher_runtime
from mpctl.interop.log_launchers import EMITTED, LOGS, read_printed
from mpctl.interop.log_lines import plain
from mpctl.interop.logs import LogRun, read_log_file
from mpctl.interop.mapping import ReadJob
from mpctl.records.rundir.directory import RunDir
from mpctl.spec.job import JobSpec
from mpctl.spec.load import Raw, job_from_raw, nested, read_source
from mpctl.spec.names import with_full_names
from mpctl.spec.presets import find_preset, lasting_name

TOLERANCE = 0.05
"""Largest relative difference between the rate and the seconds that a log prints."""
NO_TIME = tuple(
    f"training.{key}"
    for key in (
        "steps",
        "seed",
        "lr_",
        "learning_rate",
        "min_learning_rate",
        "warmup_steps",
        "weight_decay",
        "beta1",
        "beta2",
        "epsilon",
        "init_std",
        "loss_scale",
        "min_loss_scale",
    )
)
"""Settings of flags and logs that no step's time depends on: not read, so that a benchmark with a
rate of 0 is a run too."""
LOG_ENDINGS, JOB_ENDINGS = (".log", ".out", ".txt"), (".toml", ".json")
Row = dict[str, Any]


class LogLayout(NamedTuple):
    """The layout of a logged run, as far as the user gives it; the log may print the rest.

    job: the tables of a job, or the name of its file or preset. flags: a launcher and its flags,
    `@FILE` for a file. settings: those that override both. cluster: the preset that it ran on, by
    name or file. launcher: whose lines the log has, by default found in it. group: of its row, by
    default the folder of the log.
    """

    job: Raw | str | None = None
    flags: tuple[str, str] | None = None
    settings: Mapping[str, Any] = {}
    cluster: str | None = None
    launcher: str | None = None
    group: str | None = None


class LogRows(NamedTuple):
    """Rows of logs. issues: why others are none; notes: what was read of each, then what
    is planned as something near or not read, once where several logs have it."""

    rows: list[Row]
    issues: list[Issue]
    notes: list[str]


def log_rows(sources: Iterable[tuple[Path, LogLayout]]) -> LogRows:
    """The logs that are measured runs, and the reasons why the others are none."""
    found = LogRows([], [], [])
    said: dict[str, list[str]] = {}
    for path, layout in sources:
        issues: list[Issue] = []
        name = plain(str(path))
        read = attempt(issues, partial(log_row, path, layout))
        if read is not None:
            found.rows.append(read[0])
            first, *others = read[1]
            found.notes.append(f"{name}: {first}")
            for note in others:
                said.setdefault(note, []).append(name)
        found.issues.extend(
            issue if issue.where == name else issue._replace(where=f"{name}: {issue.where}") for issue in issues
        )
    for note, names in said.items():
        more = f" (and {plural(len(names) - 1, 'log')} more)" if len(names) > 1 else ""
        found.notes.append(f"{names[0]}{more}: {note}")
    return found


def log_row(path: Path, layout: LogLayout) -> tuple[Row, list[str]]:
    """The row of a log, and notes: its lines in words, then warnings. Raises InputError with all
    issues."""
    return row_of_run(read_log_file(path, layout.launcher), path, layout)


def row_of_run(run: LogRun, path: Path, layout: LogLayout) -> tuple[Row, list[str]]:
    """The same of a log that was read. path: the log, by which its row is called."""
    where = plain(str(path))
    raw, notes = _job_tables(where, run, layout)
    raw = _with_cluster(where, raw, run, layout)
    job = job_from_raw(raw, {})
    emitted = EMITTED[run.launcher]
    if job.training.is_runtime_default and (runtime := launcher_runtime(job, emitted)):
        raw = {**raw, "training": {**raw.get("training", {}), "runtime": runtime}}
        notes.append(f"planned under runtime {runtime}; --set runtime=NAME names another")
    seconds, issues = _compared(where, job, run)
    if seconds is None:
        message = f"{run.launcher} prints a rate, and the layout's model has no length of samples"
        issues.append(Issue("log-no-seconds", where, message, "name the model"))
    if issues:
        raise InputError(issues)
    measured = {"step_seconds": seconds, "steps": len(run.steps)}
    if run.spread is not None:
        measured["spread"] = run.spread
    group = path.resolve().parent.name if layout.group is None else layout.group
    row = {"id": where, "group": group, "job": raw, "measured": measured}
    return row, [run.text, *notes]


def _job_tables(where: str, run: LogRun, layout: LogLayout) -> tuple[Raw, list[str]]:
    """The tables of the run's job, without the numbers of ranks that the log alone knows."""
    raw: Raw = {}
    read = ReadJob({}, ())
    if isinstance(layout.job, str):
        raw = read_source(layout.job)
    elif layout.job is not None:
        raw = with_full_names(layout.job)
    elif layout.flags:
        read = _read_flags(run, layout, *layout.flags)
    elif (found := read_printed(run.config)) is not None:
        read = found
    elif not any(name.partition(".")[0] == "model" for name in layout.settings):
        message = "the log does not print the settings of its run"
        hint = "name them: a job file (calibrate: --job FILE), or --from LAUNCHER @FILE with its command line"
        raise InputError.of("log-no-layout", where, message, hint)
    settings = {key: v for key, v in read.settings.items() if not key.startswith(NO_TIME)}
    for table, keys in nested({**settings, **layout.settings}).items():
        below = raw.get(table)
        below = {"preset": below} if isinstance(below, str) else below
        raw = {**raw, table: {**(below or {}), **keys} if isinstance(keys, dict) else keys}
    return raw, [f"{warning.issue}" for warning in read.warnings]


def _read_flags(run: LogRun, layout: LogLayout, launcher: str, text: str) -> ReadJob:
    """The job of flags beside a log, which seldom have the tokenizer's vocabulary or the ranks."""
    rows = run.config.values.get("vocab_size", "")
    vocab = {"model.vocab": int(rows)} if rows.isdecimal() and len(rows) < 10 else {}
    world: Raw = {"cluster": layout.cluster}
    if run.world_size:
        world = {"cluster.nodes": 1, "cluster.gpus_per_node": run.world_size}
    launcher = launcher or run.launcher
    read = read_flags(launcher, text, {**vocab, **world, **layout.settings})
    return read._replace(settings={**vocab, **read.settings})


def _with_cluster(where: str, raw: Raw, run: LogRun, layout: LogLayout) -> Raw:
    """The tables on their cluster, with the ranks of the log where nothing else says how many."""
    own = raw.get("cluster", {})
    own = {"preset": own} if isinstance(own, str) else own if isinstance(own, dict) else {}
    preset = layout.cluster or own.get("preset")
    if not isinstance(preset, str):
        raise InputError.of(
            "unknown-cluster", where, "no cluster is named that it ran on", "name its preset: --cluster NAME or FILE"
        )
    kept = {key: own[key] for key in ("nodes", "gpus_per_node", "headroom") if key in own}
    if "nodes" not in kept and (ranks := run.world_size):
        of_preset = (find_preset("clusters", preset) or {}).get("gpus_per_node", 8)
        per_node = kept.get("gpus_per_node") or of_preset
        if ranks < per_node:
            kept |= {"nodes": 1, "gpus_per_node": ranks}
        elif ranks % per_node == 0:
            kept["nodes"] = ranks // per_node
    return {**raw, "cluster": {**kept, "preset": lasting_name("clusters", preset)}}


def _compared(where: str, job: JobSpec, run: LogRun) -> tuple[float | None, list[Issue]]:
    """Seconds of a step, None where they follow from a rate of tokens and a sample's length is not
    known; and issues of what log and layout say differently."""
    issues = []
    if run.world_size and run.world_size != job.world_size:
        message = f"the log is of {plural(run.world_size, 'rank')}, the layout of {job.world_size}"
        issues.append(Issue("log-ranks", where, message, "give the layout of this log, or its --set nodes=N"))
    run = replace(run, world_size=run.world_size or job.world_size)
    batch, printed = job.training.global_batch_size or 0, int(run.figure("batch") or 0)
    if printed and batch and printed != batch:
        message = f"steps of {plural(printed, 'sample')}, and the layout has {batch}"
        issues.append(Issue("log-batch", where, message, f"--set global_batch_size={printed}, if it is that run's"))
    seconds = run.step_seconds
    tokens = batch * job.model.seq_length if job.model else 0
    for unit, rate, of_step in (
        ("samples", run.figure("samples_per_second"), batch),
        ("tokens", run.tokens_per_second, tokens),
    ):
        if not rate or not of_step or (unit == "samples" and printed and seconds):
            continue
        seconds = seconds or of_step / rate
        if abs(rate * seconds / of_step - 1) > TOLERANCE:
            message = (
                f"{rate:,.0f} {unit}/s in {seconds_text(seconds)} are {rate * seconds:,.0f} "
                f"{unit}, and a step of the layout has {of_step:,}"
            )
            issues.append(Issue("log-tokens", where, message, "check batch, length and ranks of the layout"))
    return seconds, issues


def is_log_folder(folder: Path) -> bool:
    """Whether logs lie in a folder that is no run directory."""
    if not folder.is_dir() or RunDir(folder).job.exists():
        return False
    return any(path.suffix in LOG_ENDINGS for path in folder.iterdir())


def folder_logs(folder: Path, layout: LogLayout) -> list[tuple[Path, LogLayout]]:
    """The logs that lie in a folder, each with the job (NAME.toml) or the flags (NAME.sh) beside
    it; layout: what holds of all of them, and for logs without either."""
    found = []
    for path in sorted(folder.iterdir()):
        if path.suffix not in LOG_ENDINGS or not path.is_file():
            continue
        own, script = layout, path.with_suffix(".sh")
        jobs = [job for end in JOB_ENDINGS if (job := path.with_suffix(end)).is_file()]
        if jobs:
            own = layout._replace(job=str(jobs[0]), flags=None)
        elif script.is_file():
            launcher = layout.flags[0] if layout.flags else ""
            own = layout._replace(job=None, flags=(launcher, f"@{script}"))
        found.append((path, own))
    return found


def logs_of_rows(
    rows: Iterable[Mapping[str, Any]], folder: Path, common: LogLayout, issues: list[Issue]
) -> list[tuple[Path, LogLayout]]:
    """The logs of the rows of a list in a folder; those that are wrong become issues."""
    found = (attempt(issues, partial(layout_of_row, row, folder, common)) for row in rows)
    return [log for log in found if log is not None]


def layout_of_row(row: Mapping[str, Any], folder: Path, common: LogLayout) -> tuple[Path, LogLayout]:
    """The log of a row of a list, and its layout. Paths are relative to the list's folder.

    `log`: the path; `job`: tables of a job, or its file; or `from`: {launcher: flags}, or `flags`
    of the log's own launcher; `cluster`, `set` and `launcher` win over those of all rows. Raises
    InputError for a row that says it in another way.
    """
    path, job, flags = row.get("log"), row.get("job"), row.get("from")
    if isinstance(row.get("flags"), str):
        flags = {str(row.get("launcher") or ""): row["flags"]}
    is_flags = isinstance(flags, dict) and [*map(type, flags.values())] == [str]
    settings, launcher = row.get("set", {}), row.get("launcher", common.launcher)
    if (
        not isinstance(path, str)
        or not isinstance(job, dict | str | None)
        or not (flags is None or is_flags)
        or not isinstance(settings, dict)
        or not isinstance(launcher, str | None)
        or (job and flags)
    ):
        message = "a row with a log has `log`, a path, and `job`, tables or a file, or `from`, "
        message += f"a launcher and its flags; launchers are {', '.join(LOGS)}"
        raise InputError.of("not-a-run", plain(str(row.get("id") or path)), message)
    layout = common._replace(
        settings={**common.settings, **settings},
        launcher=launcher,
        cluster=row.get("cluster", common.cluster),
        group=str(row.get("group", common.group or "")),
    )
    if job:
        layout = layout._replace(job=str(folder / job) if isinstance(job, str) else job, flags=None)
    elif isinstance(flags, dict):
        ((name, text),) = flags.items()
        text = f"@{folder / text[1:]}" if text.startswith("@") else text
        layout = layout._replace(job=None, flags=(name, text))
    return folder / path, layout
