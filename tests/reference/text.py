"""The whole of docs/reference.md."""

from __future__ import annotations

from pathlib import Path

from tests.reference.commands import commands_text, shared_options_text
from tests.reference.facts import EXIT_CODES, READ, SCHEMAS, SET, facts_text
from tests.reference.keys import keys_text

PATH = Path(__file__).parents[2] / "docs" / "reference.md"
INTRO = """# Reference

Written by `make reference` from the models and commands of mpctl; do not edit it by hand.

Contents: [settings of a job](#settings-of-a-job), [commands](#commands),
[exit codes](#exit-codes), [environment variables](#environment-variables),
[JSON documents](#json-documents).

## Settings of a job

A job file is TOML, with these tables. Elsewhere a setting goes by its full name,
`--set training.learning_rate=1e-3`, or by its key where no other table has it, `--set tp=2`: on a
command line, in a file outside of its tables, in a line of a batch and in the library. The most
used ones have a flag, named in brackets. `absent` means that the key may be left out. What has a
unit is a plain number in the unit that its meaning names, or text with a unit
([presets.md](presets.md#units))."""


def reference_text() -> str:
    return (
        "\n\n".join(
            [
                INTRO,
                keys_text(),
                "## Commands\n\nEvery command takes `--help`. `--json` prints one JSON document.",
                "### Options of a job\n\nFlags for the settings that vary most. `--set KEY=VALUE` sets any "
                "other one, and may be repeated. `--fetch` asks Hugging Face's hub for the config.json of "
                "a model by its id ([models.md](models.md#by-id)); without it the hub is never asked.",
                shared_options_text(),
                commands_text(),
                "## Exit codes",
                facts_text("code", EXIT_CODES),
                "## Environment variables\n\nRead:",
                facts_text("variable", READ),
                "Set:",
                facts_text("variable", SET),
                "## JSON documents\n\nEach names its form under `schema`. A form gains keys without a new "
                "number; a key that goes or changes its meaning gets one.",
                facts_text("schema", SCHEMAS),
            ]
        )
        + "\n"
    )
