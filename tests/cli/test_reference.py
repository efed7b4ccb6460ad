"""docs/reference.md says what the models, the commands and the code say today."""

from __future__ import annotations

import difflib

import pytest
from pydantic import BaseModel

from mpctl.spec.runtime import RuntimeProfile
from tests.reference.facts import READ, SCHEMAS, SET, described, named_schemas, named_variables
from tests.reference.keys import job_tables
from tests.reference.text import PATH, reference_text

TABLES = [*job_tables(), *job_tables(RuntimeProfile, ("profile",))]
RENEW = "run `make reference` (python -m tests.reference) and commit docs/reference.md"


def test_the_reference_is_what_the_models_say() -> None:
    held, wanted = PATH.read_text("utf-8").splitlines(), reference_text().splitlines()
    lines = difflib.unified_diff(held, wanted, "docs/reference.md", "the models", "", "", 0, "")
    assert held == wanted, f"docs/reference.md is out of date: {RENEW}\n" + "\n".join(lines)


@pytest.mark.parametrize(("path", "table"), TABLES, ids=[".".join(p) or "job" for p, _ in TABLES])
def test_every_key_is_described(path: tuple[str, ...], table: type[BaseModel]) -> None:
    blank = [key for key, field in table.model_fields.items() if not field.description]
    assert blank == [], f"give [{'.'.join(path)}] {', '.join(blank)} a description, with its unit"


def test_every_environment_variable_is_described() -> None:
    unknown = named_variables() - described(READ, SET)
    assert unknown == set(), f"describe {sorted(unknown)} in tests/reference/facts.py, then {RENEW}"


def test_every_json_document_is_described() -> None:
    assert named_schemas() == SCHEMAS.keys(), f"edit SCHEMAS in tests/reference/facts.py, {RENEW}"
