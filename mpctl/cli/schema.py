"""`mpctl schema`: the JSON Schema of a job file, with which editors complete job files."""

from __future__ import annotations

import typer

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def schema() -> None:
    """Print the JSON Schema of a job file, with the names of all presets."""
    from mpctl.render.output import print_json
    from mpctl.spec.schema import job_schema

    print_json(job_schema())
