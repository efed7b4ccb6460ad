"""The whole of docs/reference.md."""

from __future__ import annotations

from pathlib import Path

from tests.reference.commands import commands_text, flags_text
from tests.reference.facts import EXIT_CODES, READ, SCHEMAS, SET, facts_text
from tests.reference.keys import keys_text

PATH = Path(__file__).parents[2] / "docs" / "reference.md"
INTRO = """# Reference

Written by `make reference` from the models and commands of mpctl; do not edit it by hand.

Contents: [settings of a job](#settings-of-a-job), [commands](#commands),
[exit codes](#exit-codes), [environment variables](#environment-variables),
[JSON documents](#json-documents).

## Settings of a job

A job file is TOML with these tables. On a command line, in a batch and in the library a setting is
named in full, `--set training.learning_rate=1e-3`, or by its key if no other table has it, `--set
tp=2`. Brackets hold type, bounds and default, which shows the type of a plain value (`1` integer, `1.0`
number); without a type it is text. A key without a default may be left out unless it is required. The last
brackets name the setting's flag. `mpctl schema` prints all bounds. A quantity, with a type such as `"5 us"`, is
a number in the unit named, or text with a unit ([units](presets.md#units))."""
COMMANDS = """## Commands

Every command takes `--help`.

### Options of a job

{flags}. They set the settings that name them; `mpctl help job` describes them.
`--set KEY=VALUE` (repeatable) sets any other one. `--fetch` is below, and so are `--lora`, `--qlora`,
`--gpus` and `--from`, by which a job starts."""
DOCUMENTS = """## JSON documents

Each names its form under `schema`. New keys keep the number; a key that goes or changes its meaning
raises it. `mpctl schema NAME` prints its JSON Schema, `mpctl schema --list` what prints or holds each:"""


def reference_text() -> str:
    parts = [INTRO, keys_text(), COMMANDS.format(flags=flags_text()), commands_text()]
    parts += ["## Exit codes", facts_text(EXIT_CODES)]
    parts += ["## Environment variables\n\nRead:", facts_text(READ), "Set for workers:", facts_text(SET)]
    return "\n\n".join([*parts, DOCUMENTS, ", ".join(f"`{name}`" for name in SCHEMAS)]) + ".\n"
