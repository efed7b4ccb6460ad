"""`mpctl score`: check rows for the gallery of published runs, and say their forecasts and errors."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mpctl.cli.options import AsJsonOption, JobSource, describe_job, job_source, with_job
from mpctl.core.errors import InputError, attempt

if TYPE_CHECKING:
    from mpctl.core.errors import Issue
    from mpctl.measure.calibrate.gallery import GalleryRow, ScoredRow
    from mpctl.plan.planning.plan import Plan

RowArgument = Annotated[
    Path,
    typer.Argument(
        metavar="ROW.json",
        help="A run as a JSON object, or a list of them; `mpctl schema mpctl.gallery-row/1` says what each key means.",
    ),
]
TABLES = ("cluster", "model", "parallel", "training")


def score(row: RowArgument, as_json: AsJsonOption = False) -> None:
    """Check a run for the gallery, and say its forecast and error.

    The row's line is read as options of `mpctl plan` and planned; nothing of it is run or sent.

    Exit codes: 0 the row can be added; 2 a bad row.
    """
    from statistics import fmean

    from mpctl.render.output import print_json
    from mpctl.render.score import print_score

    issues: list[Issue] = []
    rows = [scored for one in _rows(row) if (scored := attempt(issues, partial(score_row, one)))]
    if issues:
        raise InputError(issues)
    mean = fmean(abs(one["error"]) for one in rows)
    if as_json:
        print_json({"schema": "mpctl.score/1", "rows": rows, "mean_error": mean})
    else:
        print_score({"schema": "mpctl.score/1", "rows": rows, "mean_error": mean})


def score_row(raw: Any) -> ScoredRow:
    """Plan a row and compare it. Raises InputError with every reason why it is no row."""
    from mpctl.measure.calibrate.gallery import forecast

    row = read_row(raw)
    found = forecast(planned(row.line, row.name), row.step_seconds, row.name)
    return {"name": row.name, "line": row.line, "source": row.source, **found}


def read_row(raw: Any) -> GalleryRow:
    """Read a row of a JSON file. Raises InputError."""
    from pydantic import ValidationError

    from mpctl.measure.calibrate.gallery import ROW, GalleryRow
    from mpctl.spec.issues import joined_details, schema_issues

    hint = f"`mpctl schema {ROW}` says what a row has"
    if not isinstance(raw, dict) or raw.get("schema", ROW) != ROW:
        raise InputError.of("bad-row", "ROW", f"it is no {ROW}", hint)
    try:
        return GalleryRow.model_validate({key: value for key, value in raw.items() if key != "schema"})
    except ValidationError as error:
        raise InputError(schema_issues(joined_details(error))) from None


def planned(line: str, where: str) -> Plan:
    """Plan a line `mpctl plan --model ...` of options alone. Raises InputError for a job file, a path, a preset of the
    reader's own, and a job too large to be planned in passing."""
    from mpctl.plan.batch.rows import require_countable
    from mpctl.plan.planning.plan import load_plan
    from mpctl.spec.load import load_job

    job = _options(line, where)
    settings = dict(job.overrides)
    if wrong := next(_files(settings), None):
        message = f"{wrong[:200]} is a file, or no setting of {', '.join(TABLES)}"
        raise InputError.of("bad-line", where, message, "write figures of your own by --set cluster.KEY=VALUE")
    require_countable(load_job(None, settings))
    plan = load_plan(None, settings)
    if own := plan.figures_from:
        message = f"the forecast would rest on a preset of your own: {own[0]}"
        raise InputError.of("own-preset", where, message, "run it without MPCTL_PRESETS, outside of ./presets")
    return plan


@cache
def _job_options() -> Any:
    """A command that has the options of a job, and no other."""
    alone = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    alone.command(context_settings={"help_option_names": []})(with_job(describe_job))
    return typer.main.get_command(alone)


def _options(line: str, where: str) -> JobSource:
    """Read the options of a line. Raises InputError."""
    try:
        program, verb, *words = shlex.split(line)
        if (program, verb) != ("mpctl", "plan"):
            raise ValueError(f"it starts with {program} {verb}"[:80])
        values = _job_options().make_context("mpctl plan", words).params
    except InputError:
        raise
    except Exception as error:
        if not isinstance(error, ValueError) and not hasattr(error, "format_message"):
            raise
        text = error.format_message() if hasattr(error, "format_message") else str(error)
        hint = 'write "mpctl plan --model llama-3-70b --gpus 64xh100 --tp 4 --pp 4"'
        raise InputError.of("bad-line", where, text, hint) from None
    if values["job"] or values["from_"] or values["fetch"]:
        message = "JOB, --from and --fetch read files that others lack"
        raise InputError.of("bad-line", where, message, "`mpctl plan JOB --emit toml` has its settings")
    return job_source(**values)


def _files(settings: Mapping[str, Any], trail: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the settings that name a file, or are of no table of TABLES."""
    from mpctl.spec.paths import PRESETS, SETTINGS, is_hub_id, is_path

    for key, value in settings.items():
        path = (*trail, *key.split("."))
        if isinstance(value, Mapping):
            yield from _files(value, path)
        is_preset = (path in PRESETS or path[-1] == "preset") and is_path(str(value))
        is_model = path[0] == "model" and is_hub_id(value)
        if path[0] not in TABLES or path in SETTINGS or (is_preset and not is_model):
            yield f"{'.'.join(path)} = {value!r}"


def _rows(path: Path) -> list[Any]:
    """The rows of a file. Raises InputError."""
    from mpctl.measure.calibrate.gallery import LONGEST_FILE, MOST_ROWS, ROW

    hint = f"`mpctl schema {ROW}` says what a row has"
    try:
        with path.open("rb") as file:
            text = file.read(LONGEST_FILE + 1)
        if len(text) > LONGEST_FILE:
            raise ValueError(f"it has more than {LONGEST_FILE:,} bytes")
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError.of("bad-row", str(path), str(error)[:200], hint) from None
    rows = document if isinstance(document, list) else [document]
    if not 1 <= len(rows) <= MOST_ROWS:
        raise InputError.of("bad-row", str(path), f"it has {len(rows):,} rows", f"give 1 to {MOST_ROWS:,}")
    return rows
