"""`mpctl schema SCHEMA`: every document has one, and what commands print is valid by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import TypeAdapter

from mpctl.cli.documents import DOCUMENTS, document_schema
from mpctl.plan.batch.answers import Answer, answers
from tests.cli.calls import Mpctl
from tests.cli.test_calibrate import planned_step, runs_of
from tests.measure.calibrate.test_run_dirs import write_run

# Files that only mpctl reads, each with a reader of its own that refuses what it does not know.
KEPT = {
    *(f"mpctl.attempt/{version}" for version in (1, 2, 3)),
    *(f"mpctl.checkpoint/{version}" for version in (1, 2, 3)),
    "mpctl.extension/1",
    "mpctl.lock/1",
    "mpctl.meeting/1",
    "mpctl.run-dir/1",
    "mpctl.tuned-job/1",
}
TYPED = sorted(DOCUMENTS.keys() - KEPT)
SLOW_TO_IMPORT = {"mpctl.data/1", "mpctl.weights/1"}  # torch


def test_every_document_but_files_that_only_mpctl_reads_has_a_schema() -> None:
    """tests/cli/test_reference.py holds the list to what stands in the code."""
    assert {name for name, document in DOCUMENTS.items() if not document.type} == KEPT


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW_TO_IMPORT)) for n in TYPED])
def test_a_schema_is_legal_and_names_its_document(name: str) -> None:
    schema = document_schema(name)
    Draft202012Validator.check_schema(schema)
    assert schema["$id"] == name
    assert any(key.get("const") == name for key in _keys(schema, "schema"))


def _keys(schema: Any, name: str) -> list[dict[str, Any]]:
    """What a schema says of a key of this name, at any depth."""
    if isinstance(schema, list):
        return [found for one in schema for found in _keys(one, name)]
    if not isinstance(schema, dict):
        return []
    own = schema.get("properties", {}).get(name)
    return [*([own] if own else []), *(found for one in schema.values() for found in _keys(one, name))]


def require_valid(document: Any) -> None:
    """The document is valid by the schema that it names."""
    name = document["schema"] if "schema" in document else document["otherData"]["schema"]
    errors = list(Draft202012Validator(document_schema(name)).iter_errors(document))
    assert [f"{error.json_path}: {error.message[:200]}" for error in errors] == []


JOB = ("--cluster", "dgx-h100", "--nodes", 1, "--model", "gpt2", "--runtime", "megatron-core", "--tp", 2)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("plan", *JOB), "mpctl.plan/2"),
        (("plan", "--nodes", 2, "--gpus-per-node", 8, "--tp", 2), "mpctl.plan/2"),
        (("plan", *JOB, "--runtimes", "all", "--tokens", "1B"), "mpctl.plan/2"),
        (("plan", *JOB, "--rank", 3), "mpctl.rank/1"),
        (("plan", "demo-t5", "--rank", 0), "mpctl.rank/1"),
        (("plan", "--compare", "demo", "tp=1,dp=2", "--fail-if", "memory>+900%"), "mpctl.compare/2"),
        (("plan", *JOB, "--explain", "memory.stage-0"), "mpctl.explain/2"),
        (("plan", *JOB, "--emit", "megatron"), "mpctl.emit/1"),
        (("plan", "gpt3-175b-1024", "--compare-tensor-modes", 4), "mpctl.tensor-modes/1"),
        (("plan", "demo", "--tp", 3), "mpctl.error/1"),
        (("search", *JOB, "--fix", "pp=1", "--top", 2, "--gpus", "8,16", "--tokens", "1B"), "mpctl.search/3"),
        (("presets",), "mpctl.presets/1"),
        (("presets", "models"), "mpctl.presets/1"),
        (("presets", "clusters", "selene"), "mpctl.preset/1"),
        (("runs", "runs"), "mpctl.runs/1"),
        (("show", "runs/a"), "mpctl.show/1"),
        (("show", "runs/a", "--plot", "loss"), "mpctl.series/1"),
        (("status", "runs/a"), "mpctl.status/1"),
        (("launch", "demo", "--dry-run"), "mpctl.launch/1"),
        (("calibrate", "runs.json", "--out", "fitted"), "mpctl.calibrate/1"),
        pytest.param(("doctor", "demo", "--run-dir", "runs"), "mpctl.doctor/1", marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(map(str, value[:2])),
)
def test_what_a_command_prints_is_valid(
    words: tuple[object, ...], name: str, mpctl: Mpctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "calibrate" in words:
        runs_of(tmp_path, planned_step()[0])
    if {"runs/a", "runs"} & {*words}:
        write_run(tmp_path / "runs" / "a")
    said = mpctl(*words, "--json")
    assert said.out, said.err
    assert said.document["schema"] == name
    require_valid(said.document)


def test_a_document_that_lacks_a_key_is_not_valid(mpctl: Mpctl) -> None:
    document = mpctl("plan", *JOB, "--json").document
    del document["verdict"]
    with pytest.raises(AssertionError, match="'verdict' is a required property"):
        require_valid(document)


def test_a_trace_is_valid(mpctl: Mpctl, tmp_path: Path) -> None:
    assert mpctl("plan", "demo", "--trace", tmp_path / "trace.json").code == 0
    require_valid(json.loads((tmp_path / "trace.json").read_text("utf-8")))


def test_answers_of_a_batch_are_valid() -> None:
    """They have no key `schema`: each line would repeat it."""
    lines = [b'{"id": 1, "preset": "demo"}', b'{"id": "a", "preset": "demo", "parallel": {"tp": 3}}', b"{"]
    schema = TypeAdapter(Answer).json_schema()
    for answer in answers(lines):
        assert list(Draft202012Validator(schema).iter_errors(answer)) == []


def test_the_command_prints_lists_and_refuses(mpctl: Mpctl) -> None:
    assert mpctl("schema", "mpctl.plan/2").document == document_schema("mpctl.plan/2")
    listed = mpctl("schema", "--list").out.splitlines()
    assert len(listed) == len(DOCUMENTS) and any(line.startswith("mpctl.error/1  ") for line in listed)
    assert "did you mean mpctl.plan/2" in mpctl("schema", "mpctl.plan").err
    assert "a file that only mpctl reads" in mpctl("schema", "mpctl.lock/1").err
