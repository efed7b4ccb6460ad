"""The JSON Schema of a job *file*: JobSpec's, plus the forms that a file may use for presets."""

from __future__ import annotations

from typing import Any

from mpctl.spec.job import JobSpec
from mpctl.spec.presets import Kind, name_or_path

STARTS: dict[str, Kind] = {
    "ClusterSpec": "clusters",
    "ModelSpec": "models",
    "DeviceSpec": "devices",
}


def job_schema() -> dict[str, Any]:
    """Tables that may start from a preset accept its name alone, or `preset` beside other keys."""
    schema = JobSpec.model_json_schema()
    for table, kind in STARTS.items():
        body = schema["$defs"][table]
        names = {"type": "string", "anyOf": name_or_path(kind)}
        body["properties"]["preset"] = {**names, "description": "start from this preset"}
        if table == "ModelSpec":
            body["properties"]["hf_config"] = {
                "type": "string",
                "description": "take the shape from a Hugging Face config.json",
            }
        body.pop("required", None)  # a preset, or hf_config, may bring what is required
        schema["$defs"][table] = {"anyOf": [names, body]}
    schema.pop("required", None)
    jobs = {"type": "string", "anyOf": name_or_path("jobs")}
    schema["properties"]["preset"] = {**jobs, "description": "start from this job preset"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "mpctl job",
    }
