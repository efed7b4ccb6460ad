"""The documents that mpctl prints or writes: what each is, and its JSON Schema.

A schema is made from the type of which the document is made; none is written by hand.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from mpctl.core.errors import InputError


class Document(NamedTuple):
    """A kind of document. type: its module below mpctl, and the type there of which it is made; empty for files
    that only mpctl reads."""

    meaning: str
    type: str = ""


DOCUMENTS = {
    "mpctl.attempt/1": Document("nodes/status.json of a run of older versions, which is read"),
    "mpctl.attempt/2": Document("the same, with the phase of its attempt"),
    "mpctl.attempt/3": Document(
        "nodes/status.json of a run: the phase of its attempt, all hosts and ranks, as the launcher last knew them"
    ),
    "mpctl.blamed/1": Document(
        "nodes/blamed.json of a run: the failures that each host is blamed for", "records.rundir.blamed:BlamedHosts"
    ),
    "mpctl.bench/2": Document(
        "`mpctl bench ... --json` and OUT/report.json: rows and findings of any bench",
        "measure.bench.documents:AnyReport",
    ),
    "mpctl.bench-compare/1": Document(
        "`mpctl bench compare --json`: two reports, row by row", "measure.bench.compare:Comparison"
    ),
    "mpctl.calibrate/1": Document(
        "`mpctl calibrate --json`: what own runs told, errors, bands, presets",
        "measure.calibrate.own_words:OwnDocument",
    ),
    "mpctl.checkpoint-inspect/1": Document(
        "`mpctl checkpoint inspect --json`: shards and parameters of one", "records.checkpoint.listing:InspectDocument"
    ),
    "mpctl.checkpoint/1": Document(
        "manifest.json of a checkpoint of 0.1.0, which is read: parameters are split along one dimension at most"
    ),
    "mpctl.checkpoint/2": Document("an older one, which is read: the number of shards and tp"),
    "mpctl.checkpoint/3": Document("manifest.json of a checkpoint: its step, and its shards by name"),
    "mpctl.checkpoints/1": Document(
        "`mpctl checkpoint list`, `verify` and `reshard --json`: what there is",
        "records.checkpoint.listing:CheckpointsDocument",
    ),
    "mpctl.compare/2": Document(
        "`mpctl compare --json`: settings that differ, figures of each job", "plan.planning.compare:CompareDocument"
    ),
    "mpctl.data/1": Document(
        "`mpctl data prepare --json` and manifest.json of prepared data", "train.data.manifest:Prepared"
    ),
    "mpctl.doctor/1": Document(
        "`mpctl doctor --json`: a report a host, pairs, all-reduces and findings", "run.doctor.documents:Diagnosis"
    ),
    "mpctl.error/1": Document(
        "any command with `--json` that refuses its input: `issues`, each with `rule`, `where`, `message` and `hint`",
        "core.errors:ErrorDocument",
    ),
    "mpctl.eval/1": Document(
        "`mpctl eval --json`: loss and perplexity, a row a corpus", "run.inference.evaluate:EvalDocument"
    ),
    "mpctl.explain/2": Document(
        "`mpctl explain --json`: figures with formula and numbers", "plan.planning.explain:ExplainDocument"
    ),
    "mpctl.emit/1": Document(
        "`mpctl emit JOB LAUNCHER --json`: the text for another launcher, its notes", "interop.emitted:EmitDocument"
    ),
    "mpctl.extension/1": Document("extension.json beside an extended tokenizer: its new pieces"),
    "mpctl.fit/1": Document(
        "`mpctl fit --json`: ways to fine-tune a model, the one to use, ways out", "plan.fit.document:FitDocument"
    ),
    "mpctl.gallery-row/1": Document(
        "a row that `mpctl score` reads: a measured run and the line that plans it",
        "measure.calibrate.gallery:GalleryRow",
    ),
    "mpctl.hook/1": Document(
        "what `launch.hook` reads on its standard input: a failure, a restart, the end",
        "run.launch.monitoring:HookDocument",
    ),
    "mpctl.hosts/1": Document(
        "nodes/hosts.json of a run on several hosts: the ranks of each host", "records.rundir.launcher:HostsDocument"
    ),
    "mpctl.launcher/1": Document(
        "launcher.json of a run: which process launched it, where and how", "records.rundir.launcher:LauncherRecord"
    ),
    "mpctl.launch/1": Document(
        "`mpctl launch --dry-run --json`: command, environment and job", "run.launch.launch_plan:LaunchDocument"
    ),
    "mpctl.meeting/1": Document("nodes/meeting.json: where processes of a joined world find the launcher"),
    "mpctl.plan/2": Document(
        "`mpctl plan --json` and plan.json of a run: the whole plan", "plan.planning.document:PlanDocument"
    ),
    "mpctl.preset/1": Document("`mpctl presets NAME --json`: one preset", "render.presets:PresetDocument"),
    "mpctl.presets/1": Document(
        "`mpctl presets --json`: names of presets by kind, files of your own", "render.presets:PresetsDocument"
    ),
    "mpctl.rank/1": Document(
        "`mpctl plan --rank N --json`: one rank, its coordinates and groups", "plan.planning.document:RankDocument"
    ),
    "mpctl.rehearsal/2": Document(
        "`mpctl launch --rehearse --json`: memory and messages of rehearsed ranks",
        "run.launch.rehearse:RehearsalDocument",
    ),
    "mpctl.report/1": Document(
        "`mpctl report --json`: the layout to run, its cost, the next two, the risk, what to measure first",
        "plan.search.report:ReportDocument",
    ),
    "mpctl.run-trace/2": Document(
        "`mpctl bench trace RUN`: profiled steps beside the planned, for Perfetto", "render.run_trace:RunTraceDocument"
    ),
    "mpctl.run/2": Document("`mpctl launch --json` and summary.json of a run", "records.rundir.summary:AnySummary"),
    "mpctl.runs/1": Document("`mpctl runs --json`: a row a run", "run.history.listing:RunsDocument"),
    "mpctl.run-dir/1": Document(".mpctl-run of a run directory: a launch wrote what is here"),
    "mpctl.sample/1": Document(
        "`mpctl sample --json`: what was written for each prompt", "run.inference.sample:SampleDocument"
    ),
    "mpctl.score/1": Document(
        "`mpctl score --json`: measured runs next to their forecasts", "measure.calibrate.gallery:ScoreDocument"
    ),
    "mpctl.search/3": Document(
        "`mpctl search --json`: the fastest layout, the suggested one, the best as rows",
        "plan.search.document:SearchDocument",
    ),
    "mpctl.series/1": Document(
        "`mpctl show --plot METRIC --json`: a curve a run and metric", "run.history.show:SeriesDocument"
    ),
    "mpctl.show/1": Document(
        "`mpctl show --json`: each run's job, progress, checkpoints and failure", "run.history.show:ShowDocument"
    ),
    "mpctl.status/1": Document(
        "`mpctl status --json`: progress, time left, launcher, newest checkpoint and what every rank is doing",
        "run.history.status:StatusDocument",
    ),
    "mpctl.stopped/1": Document(
        "`mpctl stop --json`: how the run ended and what it saved", "run.history.stop:StoppedDocument"
    ),
    "mpctl.lock/1": Document(".lock of a run directory, or of data in preparation: which process has it"),
    "mpctl.stop/1": Document(
        "stop-request of a run: `mpctl stop` asks its launcher to stop it", "records.rundir.launcher:StopRequest"
    ),
    "mpctl.submission/1": Document(
        "`mpctl launch --submit --json`: what was submitted, or with `--dry-run` would be",
        "render.run:SubmissionDocument",
    ),
    "mpctl.tensor-modes/1": Document(
        "`mpctl tensor-modes --json`: costs in symbols and this job's numbers, an entry a mode",
        "plan.planning.tensor_modes:TensorModesDocument",
    ),
    "mpctl.trace/2": Document("`mpctl plan --trace FILE`: the planned step for Perfetto", "render.trace:TraceDocument"),
    "mpctl.trial/1": Document(
        "TUNE/trials/NNN.json: a trial of `mpctl tune`, how it was planned and ended", "measure.tune.state:TrialRecord"
    ),
    "mpctl.tune/1": Document(
        "`mpctl tune --json` and TUNE/report.json: trials, plans and step times, the best layout and its lead",
        "measure.tune.document:TuneDocument",
    ),
    "mpctl.tuned-job/1": Document("TUNE/tuned.json: the job that a folder of `mpctl tune` is of"),
    "mpctl.weights/1": Document(
        "`mpctl checkpoint import` and `export --json`: what was written", "train.weights.writer:Written"
    ),
    "mpctl.why/1": Document(
        "`mpctl why --json`: a run against its plan, suspects, changes", "measure.why.document:WhyDocument"
    ),
}


def document_type(name: str) -> Any:
    """Return the type of a document. Raises InputError for a name that is none, and for a file that only mpctl
    reads."""
    if (document := DOCUMENTS.get(name)) is None:
        from mpctl.spec.presets import nearest_names

        near = nearest_names(name, list(DOCUMENTS))
        hint = f"did you mean {', '.join(near)}?" if near else "`mpctl schema --list` lists all"
        raise InputError.of("unknown-schema", "SCHEMA", f"no document is called {name!r}", hint)
    if not document.type:
        message = f"{name} is a file that only mpctl reads, without a schema: {document.meaning}"
        raise InputError.of("no-schema", "SCHEMA", message, "`mpctl schema --list` lists all documents")
    module, _, found = document.type.partition(":")
    return getattr(import_module(f"mpctl.{module}"), found)


def document_schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of a document. A model is written below its name: the key is added. Raises
    InputError."""
    from pydantic import BaseModel, TypeAdapter

    type_ = document_type(name)
    found = TypeAdapter(type_).json_schema(mode="serialization", by_alias=True)
    if isinstance(type_, type) and issubclass(type_, BaseModel):
        found["properties"] = {"schema": {"const": name}, **found["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": name, **found}
