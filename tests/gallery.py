"""The gallery of published runs: `make gallery`, or `python -m tests.gallery`; two minutes of one core.

Writes into docs/gallery: runs.json, every run of the accuracy data with a measured step, each with its forecast under
today's presets and the line that plans it; scores.json, the score of each source at each release and today; and
runs.html, the page of both (tests/gallery_page.py). The forecast is the plan of the line itself: a line that plans
something else than the recorded job ends the command.

fit: `fitted` if the run was among those to which figures were fitted; kept_back_error is then the error under
constants that were fitted without it (tests/recorded/cross_validated.json), where such a fit was made. `kept back`: no
figure was fitted to it. Rows that others sent are in added.json.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from math import expm1
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from mpctl import __version__
from mpctl.cli.options import command_line
from mpctl.cli.score import planned, read_row
from mpctl.core.errors import InputError, Issue, attempt
from mpctl.measure.calibrate.gallery import Forecast, forecast
from mpctl.measure.calibrate.runs import read_runs
from mpctl.spec.load import load_job
from mpctl.spec.parallel import ParallelSpec
from mpctl.spec.presets import preset_names
from mpctl.spec.training import TrainingSpec
from tests.finetuning import finetuning_rows, judge
from tests.outside import RECORDED, outside_run, read_rows, settings_of
from tests.published import CROSS_VALIDATED, expert_rows, mlperf6_rows, published_rows, with_software
from tests.released import RELEASED, Source, source_of

FOLDER = Path(__file__).parents[1] / "docs" / "gallery"
RUNS, SCORES, PAGE, ADDED = (FOLDER / name for name in ("runs.json", "scores.json", "runs.html", "added.json"))
TODAY = "today"
SAME = 1e-9  # by which the forecasts of a line and of its row may differ
SHAPE = ("family", "layers", "hidden", "ffn", "heads", "kv_heads", "experts")
NOT_LEGAL: tuple[dict[str, object], ...] = ({}, {"parallel.allow_tp_across_nodes": True})
"""Settings under which a run of other software can be planned, the first that suffices (plan/batch/rows.py)."""
Row = dict[str, Any]


class Published(NamedTuple):
    """A run before it is planned. settings: those that may make its line; expected: its forecast in accuracy data."""

    id: str
    table: str
    source: str
    settings: Sequence[Mapping[str, object]]
    measured: float
    expected: float | None
    is_fitted: bool
    kept_back_error: float | None = None


def published() -> Iterator[tuple[Row, str]]:
    """Every recorded run with the kind of file that it is in."""
    for row in published_rows():
        yield row, "dense"
    for row in map(with_software, (*expert_rows(), *mlperf6_rows())):
        yield row, "experts"
    for row in finetuning_rows():
        yield row, "fine-tuning"
    for row in read_rows():
        yield row, "outside"


def find_run(row: Row, kind: str) -> Published | None:
    """Return a recorded run ready to be planned; None if it has no measured step."""
    if kind == "outside":
        outside = outside_run(row["id"])
        settings = {key: value for given in settings_of(row["args"]).items() for key, value in _spread(*given)}
        expected = outside.seconds * (1 + outside.error)
        return Published(
            row["id"], outside.system, row["source"], [settings], outside.seconds, expected, is_fitted=False
        )
    if (seconds := row["measured"].get("step_seconds")) is None:
        return None
    known = Published(
        row["id"], row["group"], row["source"], settings_of_job(row["job"]), seconds, None, is_fitted=True
    )
    if kind == "fine-tuning":
        judged = judge(row)
        table, step = f"fine-tuning: {row['group']}", judged.step
        return known._replace(table=table, expected=step[0], is_fitted=judged.has_adapter) if step else None
    (run,) = read_runs([row])
    left_out = _left_out().get(row["id"])
    error = expm1(left_out[0]) if left_out else None
    return known._replace(table=source_of(run), expected=run.estimate().total, kept_back_error=error)


def _spread(key: str, value: object) -> Iterator[tuple[str, object]]:
    """A cluster of a file of tests/recorded as settings, which every machine has; others as they are."""
    if key == "cluster" and str(value).startswith(str(RECORDED)):
        yield from _flat("cluster", tomllib.loads(Path(str(value)).read_text("utf-8")))
    else:
        yield key, value


@cache
def _left_out() -> dict[str, list[float]]:
    found: dict[str, list[float]] = json.loads(CROSS_VALIDATED.read_text("utf-8"))["fifths"]
    return found


def settings_of_job(job: Mapping[str, Any]) -> list[Mapping[str, object]]:
    """Settings that may make a recorded job, the shortest first; defaults are left out, and dp, which follows."""
    cluster = dict(job["cluster"])
    rest: dict[str, object] = {"cluster": cluster.pop("preset")} if "preset" in cluster else {}
    rest |= dict(_flat("cluster", cluster))
    for name, spec in (("parallel", ParallelSpec), ("training", TrainingSpec)):
        fields = spec.model_fields
        own = {key: value for key, value in job[name].items() if fields[key].default != value and key != "dp"}
        rest |= dict(_flat(name, own))
    return [{**model, **rest} for model in _models(job["model"])]


def _models(model: Mapping[str, Any]) -> Iterator[dict[str, object]]:
    """A recorded model as a bundled one of its shape, as this one with the recorded biases, and spelled out."""
    if name := _shapes().get(_shape(model, True)) or _shapes().get(_shape(model, False)):
        like: dict[str, object] = {
            "model": name,
            "model.seq_length": model["seq_length"],
            **{f"model.{key}": model[key] for key in ("attention", "tied_embeddings")},
        }
        yield like
        yield like | {"model.bias": True}
        yield like | {"model.bias": True, "model.ffn": model["ffn"], "model.vocab": model["vocab"]}
    yield dict(_flat("model", {key: value for key, value in model.items() if (key, value) != ("family", "gpt")}))


def _flat(where: str, value: object) -> Iterator[tuple[str, object]]:
    """A table as settings by dotted path, without the words on a cluster's source."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if (where, key) != ("cluster", "source"):
                yield from _flat(f"{where}.{key}", inner)
    else:
        yield where, value


@cache
def _shapes() -> dict[tuple[object, ...], str]:
    """Bundled models by their shape with and without the vocabulary; the first by name of those that share one."""
    models = {name: load_job(None, {"model": name}).model for name in preset_names("models")}
    tables = [(name, model.model_dump()) for name, model in sorted(models.items(), reverse=True) if model]
    return {_shape(table, has_vocab): name for has_vocab in (False, True) for name, table in tables}


def _shape(model: Mapping[str, Any], has_vocab: bool) -> tuple[object, ...]:
    return (*map(model.get, SHAPE), model["vocab"] if has_vocab else None)


def plan_run(run: Published) -> tuple[str, Forecast]:
    """Return the shortest line that makes the expected forecast, and the forecast. Raises InputError if none does."""
    issues: list[Issue] = []
    for settings in run.settings:
        for more in NOT_LEGAL:
            line = command_line("plan", None, {**settings, **more})
            found = attempt(issues, lambda line=line: forecast(planned(line, run.id), run.measured, run.id))
            if found is None:
                continue
            if run.expected is None or abs(found["forecast_seconds"] / run.expected - 1) <= SAME:
                return line, found
            message = f"the line plans {found['forecast_seconds']:.6g} s, the row {run.expected:.6g} s"
            issues.append(Issue("another-plan", run.id, message, line))
            break
    raise InputError(issues)


def attempt_row(row: Row, kind: str) -> tuple[Row | None, list[Issue]]:
    """Plan a recorded run in a process of its own, whose errors are returned."""
    issues: list[Issue] = []
    return attempt(issues, partial(record, row, kind)), issues


def record(row: Row, kind: str) -> Row | None:
    """Plan a recorded run as a row of runs.json; None if it has no measured step."""
    if (run := find_run(row, kind)) is None:
        return None
    line, found = plan_run(run)
    fit = "fitted" if run.is_fitted else "kept back"
    name = _shapes().get(_shape(row["job"]["model"], True)) if "job" in row else None
    own = {"id": run.id, "table": run.table, **found, "fit": fit, "kept_back_error": run.kept_back_error}
    return _rounded(own | ({"model": name} if name else {})) | {"source": run.source, "line": line}


def record_added(raw: Any) -> Row:
    """Plan a row that somebody sent as a row of runs.json."""
    row = read_row(raw)
    found = forecast(planned(row.line, row.name), row.step_seconds, row.name)
    source = "; ".join(filter(None, (row.source, row.software, row.date, f"{row.steps} steps", row.notes)))
    own = {"id": row.name, "table": "added", **found, "fit": "kept back", "kept_back_error": None}
    return _rounded(own) | {"source": source, "line": row.line}


def _rounded(row: Row) -> Row:
    """Numbers with six digits, which any machine computes alike."""
    return {key: float(f"{value:.6g}") if type(value) is float else value for key, value in row.items()}


def record_all() -> list[Row]:
    """Plan every run."""
    added = json.loads(ADDED.read_text("utf-8"))
    _shapes(), _left_out()  # once, for all processes
    with get_context("fork").Pool() as pool:
        rows, issues = zip(*pool.starmap(attempt_row, published(), 16), strict=True)
    if found := [issue for own in issues for issue in own]:
        raise InputError(found)
    return [*map(record_added, added), *filter(None, rows)]


def scores(rows: Iterable[Row], before: Sequence[Row]) -> list[Row]:
    """The score of each source today and at the last release, and of earlier releases as they are recorded."""
    steps: dict[str, list[tuple[float, bool]]] = {}
    for row in rows:
        steps.setdefault(row["table"], []).append((row["error"], row["inside"]))
    released = json.loads(RELEASED.read_text("utf-8"))
    last = released["version"]
    own = [_score(last, released["date"], name, source) for name, source in released["sources"].items()]
    kept = [row for row in before if row["release"] not in (TODAY, last)]
    return [*kept, *own, *(_score(TODAY, "", name, vars(Source.of(found))) for name, found in steps.items())]


def _score(release: str, date: str, source: str, figures: Mapping[str, object]) -> Row:
    return {"release": release, "date": date, "source": source, **figures}


def write(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as JSON, one a line."""
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text(f"[\n{lines}\n]\n", "utf-8")


def read(path: Path) -> list[Row]:
    """Read rows; none where there is no file yet."""
    found: list[Row] = json.loads(path.read_text("utf-8")) if path.exists() else []
    return found


def main() -> int:
    """Record every run, the scores and the page."""
    from tests.gallery_page import page

    rows = record_all()
    write(RUNS, rows)
    write(SCORES, scores(rows, read(SCORES)))
    PAGE.write_text(page(read(RUNS), read(SCORES)), "utf-8")
    print(f"{len(rows)} runs, mpctl {__version__}: {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
