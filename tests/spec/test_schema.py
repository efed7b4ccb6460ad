"""The JSON Schema of a job file knows what load.py accepts beside the spec's own keys."""

from __future__ import annotations

import json

from mpctl.spec.job import JobSpec
from mpctl.spec.presets import preset_names
from mpctl.spec.schema import job_schema


def test_every_table_may_start_from_a_preset() -> None:
    schema = job_schema()
    assert set(schema["properties"]) == {*JobSpec.model_fields, "preset"}
    assert schema["properties"]["preset"]["anyOf"][0]["enum"] == preset_names("jobs")
    for table, kind in (("ClusterSpec", "clusters"), ("DeviceSpec", "devices"), ("ModelSpec", "models")):
        name, body = schema["$defs"][table]["anyOf"]
        named = body["properties"]["preset"]
        assert name["anyOf"] == named["anyOf"] and name["anyOf"][0]["enum"] == preset_names(kind)
        assert "required" not in body
    assert "hf_config" in schema["$defs"]["ModelSpec"]["anyOf"][1]["properties"]
    json.dumps(schema)
