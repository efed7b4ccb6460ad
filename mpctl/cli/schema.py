"""`mpctl schema`: the JSON Schema of a job file, so that editors complete it."""

from __future__ import annotations

import typer

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def schema() -> None:
    """Print the JSON Schema of a job file, presets' names included."""
    from mpctl.render.json import print_json
    from mpctl.spec.schema import job_schema

    print_json(job_schema())
