"""Logs of other launchers as measured runs: rows of `mpctl calibrate`, with a layout and a step.

The layout is, in this order: a job file's or a job's tables, another launcher's flags (as
`--from` reads them), what the log prints of its settings. Ranks that none of these gives are those
of the log. A step's seconds are the log's; where it prints a rate alone, the tokens or samples of
a step, which the layout gives, divided by it. By hand, torchtitan's 5,000 tokens/s on each of 64
ranks with 128 samples of 8,192 tokens: 1,048,576 / 320,000 = 3.28 s.

What log and layout both say must agree: the ranks, the samples of a step, and tokens a second
times seconds with the tokens of a step, within TOLERANCE.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mpctl.errors import InputError, Issue, attempt
from mpctl.interop.log_lines import plain
from mpctl.interop.logs import LAUNCHERS, LogRun, read_log_file
from mpctl.interop.printed_settings import read_printed
from mpctl.interop.registry import launcher_runtime, read_flags
from mpctl.rundir.directory import RunDir
from mpctl.spec.job import JobSpec
from mpctl.spec.load import Raw, job_from_raw, nested, read_source
from mpctl.spec.names import with_full_names
from mpctl.spec.presets import find_preset, lasting_name
from mpctl.units import plural, seconds_text

TOLERANCE = 0.05
"""Largest relative difference between the tokens/s and the seconds that a log prints."""
NO_TIME = tuple(f"training.{key}" for key in (
    "steps", "seed", "lr_", "learning_rate", "min_learning_rate", "warmup_steps", "weight_decay",
    "beta1", "beta2", "epsilon", "init_std", "loss_scale", "min_loss_scale",
))  # fmt: skip
"""Settings of flags and logs that no step's time depends on: not read, so that a benchmark with a
rate of 0 is a run too."""
EMITTED = {"nemo": "megatron-bridge", "trainer": "accelerate"}
"""Launchers of logs by their name in `--emit`, where it is another."""
LOG_ENDINGS, JOB_ENDINGS, FLAG_ENDINGS = (".log", ".out", ".txt"), (".toml", ".json"), (".sh",)
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
            issue if issue.where == name else issue._replace(where=f"{name}: {issue.where}")
            for issue in issues
        )
    for note, names in said.items():
        more = f" (and {plural(len(names) - 1, 'log')} more)" if len(names) > 1 else ""
        found.notes.append(f"{names[0]}{more}: {note}")
    return found


def log_row(path: Path, layout: LogLayout) -> tuple[Row, list[str]]:
    """The row of a log, and notes: its lines in words, then warnings. Raises InputError with all
    issues."""
    run = read_log_file(path, layout.launcher)
    raw, notes = _job_tables(path, run, layout)
    raw = _placed(path, raw, run, layout)
    job = job_from_raw(raw, {})
    if not job.training.is_runtime_default:
        pass
    elif runtime := launcher_runtime(job, EMITTED.get(run.launcher, run.launcher)):
        raw = _with(raw, "training", runtime=runtime)
        notes.append(f"planned under runtime {runtime}; --set runtime=NAME names another")
    seconds, issues = _seconds(job, run), list(_disagreements(plain(str(path)), job, run))
    if seconds is None:
        message = f"{run.launcher} prints a rate, and the layout's model has no length of samples"
        issues.append(Issue("log-no-seconds", plain(str(path)), message, "name the model"))
    if issues:
        raise InputError(issues)
    measured = {"step_seconds": seconds, "steps": len(run.steps)}
    if run.spread is not None:
        measured["spread"] = run.spread
    group = path.resolve().parent.name if layout.group is None else layout.group
    return {"id": plain(str(path)), "group": group, "job": raw, "measured": measured}, [
        run.text,
        *notes,
    ]


def folder_logs(folder: Path, layout: LogLayout) -> list[tuple[Path, LogLayout]]:
    """The logs that lie in a folder, each with the job (NAME.toml) or the flags (NAME.sh) beside
    it; layout: what holds of all of them, and for logs without either."""
    return [
        (path, _beside(path, layout))
        for path in sorted(folder.iterdir())
        if path.suffix in LOG_ENDINGS and path.is_file()
    ]


def is_log_folder(folder: Path) -> bool:
    """Whether logs lie in a folder that is no run directory."""
    if not folder.is_dir() or RunDir(folder).job.exists():
        return False
    return any(path.suffix in LOG_ENDINGS for path in folder.iterdir())


def _beside(path: Path, layout: LogLayout) -> LogLayout:
    for ending in JOB_ENDINGS:
        if (job := path.with_suffix(ending)).is_file():
            return layout._replace(job=str(job), flags=None)
    for ending in FLAG_ENDINGS:
        if (script := path.with_suffix(ending)).is_file():
            launcher = layout.flags[0] if layout.flags else ""
            return layout._replace(job=None, flags=(launcher, f"@{script}"))
    return layout


def _job_tables(path: Path, run: LogRun, layout: LogLayout) -> tuple[Raw, list[str]]:
    """The tables of the run's job, without the numbers of ranks that the log alone knows."""
    notes: list[str] = []
    if layout.job is not None:
        job = layout.job
        raw = read_source(job) if isinstance(job, str) else with_full_names(job)
        settings: Mapping[str, Any] = {}
    else:
        if layout.flags:
            launcher = layout.flags[0] or run.launcher.removesuffix("-bridge")
            vocab = _vocabulary(run)
            world: Raw = {"cluster": layout.cluster}
            if run.world_size:
                world = {"cluster.nodes": 1, "cluster.gpus_per_node": run.world_size}
            typed = {**vocab, **world, **layout.settings}
            read = read_flags(launcher, layout.flags[1], typed)
            read = read._replace(settings={**vocab, **read.settings})
        elif (printed := read_printed(run.config)) is not None:
            read = printed
        else:
            message = "the log does not print the settings of its run"
            hint = "name them: --job FILE, or --from LAUNCHER @FILE with its command line"
            raise InputError.of("log-no-layout", plain(str(path)), message, hint)
        raw = {}
        settings = {key: v for key, v in read.settings.items() if not key.startswith(NO_TIME)}
        notes = [f"{warning.issue}" for warning in read.warnings]
    tables = nested({**settings, **layout.settings})
    for table, keys in tables.items():
        below = raw.get(table)
        below = {"preset": below} if isinstance(below, str) else below
        raw = {**raw, table: {**(below or {}), **keys} if isinstance(keys, dict) else keys}
    return raw, notes


def _vocabulary(run: LogRun) -> dict[str, int]:
    """The tokenizer's vocabulary where the log prints it, as flags seldom have it."""
    rows = run.config.values.get("vocab_size", "")
    return {"model.vocab": int(rows)} if rows.isdecimal() and len(rows) < 10 else {}


def _placed(path: Path, raw: Raw, run: LogRun, layout: LogLayout) -> Raw:
    """The tables on their cluster, with the ranks of the log where nothing else says how many."""
    own = raw.get("cluster", {})
    own = {"preset": own} if isinstance(own, str) else own if isinstance(own, dict) else {}
    preset = layout.cluster or own.get("preset")
    if not isinstance(preset, str):
        raise InputError.of("unknown-cluster", plain(str(path)), "no cluster is named that it ran "
                            "on", "name its preset: --cluster NAME or FILE")  # fmt: skip
    kept = {key: own[key] for key in ("nodes", "gpus_per_node", "headroom") if key in own}
    if "nodes" not in kept and (ranks := run.world_size):
        per_node = kept.get("gpus_per_node") or (find_preset("clusters", preset) or {}).get(
            "gpus_per_node", 8
        )
        if ranks < per_node:
            kept |= {"nodes": 1, "gpus_per_node": ranks}
        elif ranks % per_node == 0:
            kept["nodes"] = ranks // per_node
    return {**raw, "cluster": {**kept, "preset": lasting_name("clusters", preset)}}


def _with(raw: Raw, table: str, **keys: object) -> Raw:
    return {**raw, table: {**raw.get(table, {}), **keys}}


def _tokens(job: JobSpec) -> int | None:
    """Tokens of a step."""
    return _samples(job) * job.model.seq_length if job.model else None


def _samples(job: JobSpec) -> int:
    """Samples of a step."""
    return job.training.global_batch_size or 0


def _seconds(job: JobSpec, run: LogRun) -> float | None:
    """Seconds of a step of a log; None where they follow from a rate and a length is not known."""
    if (seconds := run.step_seconds) is not None:
        return seconds
    if run.samples_per_second:
        return _samples(job) / run.samples_per_second
    of_rank = run.tokens_per_rank
    rate = run.tokens_per_second or (of_rank * job.world_size if of_rank else None)
    tokens = _tokens(job)
    return tokens / rate if tokens and rate else None


def _disagreements(where: str, job: JobSpec, run: LogRun) -> Iterator[Issue]:
    if run.world_size and run.world_size != job.world_size:
        message = f"the log is of {plural(run.world_size, 'rank')}, the layout of {job.world_size}"
        yield Issue("log-ranks", where, message,
                    "give the layout of this log, or its --set nodes=N")  # fmt: skip
    batch = _samples(job)
    if run.batch and batch and run.batch != batch:
        message = f"steps of {plural(run.batch, 'sample')}, and the layout has {batch}"
        yield Issue("log-batch", where, message,
                    f"--set global_batch_size={run.batch}, if it is that run's")  # fmt: skip
    tokens, rate, seconds = _tokens(job), run.tokens_per_second, run.step_seconds
    if rate is None and run.tokens_per_rank:
        rate = run.tokens_per_rank * job.world_size
    if tokens and rate and seconds and abs(rate * seconds / tokens - 1) > TOLERANCE:
        message = (
            f"{rate:,.0f} tokens/s in {seconds_text(seconds)} are {rate * seconds:,.0f} tokens, "
            f"and a step of the layout has {tokens:,}"
        )
        yield Issue("log-tokens", where, message, "check batch, length and ranks of the layout")
    samples = run.samples_per_second
    if (
        samples
        and seconds
        and batch
        and not run.batch
        and abs(samples * seconds / batch - 1) > TOLERANCE
    ):
        message = (
            f"{samples:,.1f} samples/s in {seconds_text(seconds)} are {samples * seconds:,.1f} "
            f"samples, and a step of the layout has {batch}"
        )
        yield Issue("log-tokens", where, message, "check the batch of the layout")


def logs_of_rows(
    rows: Iterable[Mapping[str, Any]], folder: Path, common: LogLayout, issues: list[Issue]
) -> list[tuple[Path, LogLayout]]:
    """The logs of the rows of a list in a folder; those that are wrong become issues."""
    found = (attempt(issues, partial(layout_of_row, row, folder, common)) for row in rows)
    return [log for log in found if log is not None]


def layout_of_row(
    row: Mapping[str, Any], folder: Path, common: LogLayout
) -> tuple[Path, LogLayout]:
    """The log of a row of a list, and its layout. Paths are relative to the list's folder.

    `log`: the path; `job`: tables of a job, or its file; or `from`: {launcher: flags}, or `flags`
    of the log's own launcher; `cluster`, `set` and `launcher` win over those of all rows. Raises
    InputError for a row that says it in another way.
    """
    name = str(row.get("id") or row.get("log"))
    path, job, flags = row.get("log"), row.get("job"), row.get("from")
    if isinstance(row.get("flags"), str):
        flags = {str(row.get("launcher") or ""): row["flags"]}
    is_flags = isinstance(flags, dict) and len(flags) == 1 and all(
        isinstance(text, str) for text in flags.values()
    )  # fmt: skip
    settings, launcher = row.get("set", {}), row.get("launcher", common.launcher)
    if (
        not isinstance(path, str) or not isinstance(job, dict | str | None)
        or not (flags is None or is_flags) or not isinstance(settings, dict)
        or not isinstance(launcher, str | None) or (job and flags)
    ):  # fmt: skip
        message = "a row with a log has `log`, a path, and `job`, tables or a file, or `from`, "
        message += f"a launcher and its flags; launchers are {', '.join(LAUNCHERS)}"
        raise InputError.of("not-a-run", plain(name), message)
    layout = common._replace(
        settings={**common.settings, **settings}, launcher=launcher,
        cluster=row.get("cluster", common.cluster), group=str(row.get("group", common.group or "")),
    )  # fmt: skip
    if isinstance(job, str):
        layout = layout._replace(job=str(folder / job), flags=None)
    elif job:
        layout = layout._replace(job=job, flags=None)
    elif isinstance(flags, dict):
        ((name, text),) = flags.items()
        text = f"@{folder / text[1:]}" if text.startswith("@") else text
        layout = layout._replace(job=None, flags=(name, text))
    return folder / path, layout
