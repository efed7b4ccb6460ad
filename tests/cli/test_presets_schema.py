"""`mpctl presets` and `mpctl schema`: what exists, and what a job file may hold."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import sys
import termios
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest

from mpctl.core.errors import InputError
from mpctl.spec.load import load_job
from mpctl.spec.presets import KINDS, preset_names, presets_root
from tests.cli.calls import Mpctl, assert_refused
from tests.started import started

# ---------------------------------------------------------------- presets


def test_the_list_holds_every_preset(mpctl: Mpctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    said = mpctl("presets", "--all")
    assert (said.code, said.err) == (0, "")
    for kind in KINDS:
        for name in preset_names(kind):
            assert any(line.startswith(f"{name} ") for line in said.out.splitlines()), name
    listing = mpctl("presets", "--json").document
    names = {kind: preset_names(kind) for kind in KINDS}
    files = {kind: dict.fromkeys(named) for kind, named in names.items()}  # bundled: no file
    models = {key: listing[key] for key in ("hub_ids", "not_launched", "releases")}
    assert listing == {"schema": "mpctl.presets/1", **names, "files": files, **models}


def test_a_runtime_is_shown_by_a_release_of_it(mpctl: Mpctl) -> None:
    assert "releases" in mpctl("presets", "runtimes").out.splitlines()[1]
    assert mpctl("presets", "runtimes", "nemo:26.06").out == mpctl("presets", "megatron-core-graphs").out
    assert_refused(mpctl("presets", "runtimes", "nemo:20.01"), wants_json=False)


def test_models_are_marked_by_the_rule_that_launch_asks(mpctl: Mpctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = {line.split()[0]: line for line in mpctl("presets", "models").out.splitlines() if line}
    not_launched = mpctl("presets", "models", "--json").document["not_launched"]
    for name in ("gemma-2-2b", "gemma-2b", "phi-4", "phi-4-mini", "olmo-2-7b"):
        said = mpctl("launch", "--model", name, "--nodes", 1, "--gpus-per-node", 1, "--dry-run")
        keys = re.findall(r"model\.(\w+): .*\[not-run-yet\]", said.err)
        assert not_launched.get(name, []) == keys
        assert f"no: {', '.join(keys)} " in shown[name] if keys else " yes " in shown[name]


def test_a_model_is_printed_by_its_id(mpctl: Mpctl) -> None:
    printed = mpctl("presets", "models", "qwen2.5-7b").out
    assert (
        mpctl("presets", "qwen/qwen2.5-7b").out == printed == mpctl("presets", "models", "Qwen/Qwen2.5-7B-Instruct").out
    )
    assert "did you mean" not in mpctl("presets", "Qwen/Qwen9").err


def test_a_preset_is_printed_as_the_file_that_it_is(mpctl: Mpctl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the width. A name that two kinds have needs its kind: two files would be no TOML."""
    monkeypatch.setenv("COLUMNS", "20")
    kinds = {
        name: [kind for kind in KINDS if name in preset_names(kind)] for kind in KINDS for name in preset_names(kind)
    }
    some = {name for kind in KINDS for name in preset_names(kind)[::20]}
    for name in some | {name for name, having in kinds.items() if len(having) > 1}:
        found = mpctl("presets", name, "--json").document
        assert found["schema"] == "mpctl.preset/1"
        for kind in kinds[name]:
            shown = mpctl("presets", kind, name).out
            assert shown == (presets_root() / kind / f"{name}.toml").read_text("utf-8")
            assert found[kind] == json.loads(json.dumps(tomllib.loads(shown)))
        said = mpctl("presets", name)
        assert said.code == (2 if len(kinds[name]) > 1 else 0)
        assert len(kinds[name]) == 1 or f"mpctl presets jobs {name}" in said.err


def test_one_kind_may_be_listed_alone(mpctl: Mpctl) -> None:
    said = mpctl("presets", "runtimes")
    assert "megatron-core" in said.out and "selene" not in said.out and "bundled" in said.out
    assert "\npax-gpu " not in said.out and "pax-gpu (--all)" in said.out
    assert "\npax-gpu " in mpctl("presets", "runtimes", "--all").out
    assert set(mpctl("presets", "runtimes", "--json").document) == {"schema", "runtimes", "files", "releases"}
    assert "use devices, clusters" in mpctl("presets", "cars", "gpt2").err


def test_a_preset_in_a_terminal_of_40_columns_is_valid_toml() -> None:
    """Nothing wraps it, nothing colours it; what comes off the terminal is the file."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    call = [sys.executable, "-m", "mpctl", "presets", "clusters", "selene"]
    with started(call, stdout=slave, stdin=slave) as process:
        os.close(slave)
        shown = b""
        while chunk := _read(master):
            shown += chunk
        assert process.wait() == 0
    os.close(master)
    content = (presets_root() / "clusters" / "selene.toml").read_bytes()
    assert shown.replace(b"\r\n", b"\n") == content
    assert tomllib.loads(shown.decode("utf-8"))["nodes"] == 384


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # the other end was closed
        return b""


def test_an_unknown_preset_names_the_nearest(mpctl: Mpctl) -> None:
    for name, near in {
        "gtp2": "gpt2",
        "selen": "selene",
        "demoo": "demo",
        "h100": "h100-sxm",
        "nosuch-qqq": "mpctl presets",
    }.items():
        issue = mpctl("presets", name, "--json").issues["unknown-preset"]
        assert repr(name) in issue["message"] and near in issue["hint"]


def test_a_preset_without_its_kind_is_never_a_path(mpctl: Mpctl) -> None:
    for name in ("../jobs/demo", "/etc/passwd", "", "[/red]"):
        assert_refused(mpctl("presets", name), wants_json=False)


# ---------------------------------------------------------------- schema

Schema = dict[str, Any]
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
NOTES = {"title", "description", "default", "$schema", "$defs"}


def faults(value: Any, schema: Schema | bool, root: Schema, at: str = "job") -> Iterator[str]:
    """What JSON Schema 2020-12 has against a value, for the keywords that ours uses; a keyword
    unknown here fails the test instead of being skipped."""
    if isinstance(schema, bool):
        if not schema:
            yield f"{at}: not allowed"
        return
    for key, bound in schema.items():
        if key in NOTES or key == "additionalProperties":
            continue
        if key == "$ref":
            yield from faults(value, root["$defs"][bound.removeprefix("#/$defs/")], root, at)
        elif key == "anyOf":
            if all(list(faults(value, option, root, at)) for option in bound):
                yield f"{at}: {value!r} fits none of {len(bound)}"
        elif key == "type":
            is_bool = isinstance(value, bool)
            if not isinstance(value, TYPES[bound]) or (is_bool and bound != "boolean"):
                yield f"{at}: {value!r} is no {bound}"
        elif key in ("enum", "const"):
            if value not in (bound if key == "enum" else [bound]):
                yield f"{at}: {value!r} is not {bound}"
        elif key == "required":
            held = value if isinstance(value, dict) else bound
            yield from (f"{at}: no {name}" for name in bound if name not in held)
        elif key == "properties":
            yield from _property_faults(value, schema, root, at)
        elif key == "propertyNames":
            for name in value if isinstance(value, dict) else ():
                yield from faults(name, bound, root, f"{at}.{name}")
        elif key == "items":
            for place, item in enumerate(value if isinstance(value, list) else ()):
                yield from faults(item, bound, root, f"{at}[{place}]")
        elif key in ("minLength", "maxLength"):
            is_short, is_long = len(str(value)) < bound, len(str(value)) > bound
            if isinstance(value, str) and (is_short if key == "minLength" else is_long):
                yield f"{at}: {len(value)} characters break {key} {bound}"
        elif key == "pattern":
            if isinstance(value, str) and not re.search(bound, value):
                yield f"{at}: {value!r} does not match {bound}"
        elif key == "minItems":
            if isinstance(value, list) and len(value) < bound:
                yield f"{at}: fewer than {bound}"
        elif key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if isinstance(value, int | float) and not _within(value, key, bound):
                yield f"{at}: {value} breaks {key} {bound}"
        else:
            raise AssertionError(f"{at}: keyword {key} is not known to this test")


def _property_faults(value: Any, schema: Schema, root: Schema, at: str) -> Iterator[str]:
    for name, item in value.items() if isinstance(value, dict) else ():
        known = schema["properties"].get(name, schema.get("additionalProperties", True))
        yield from faults(item, known, root, f"{at}.{name}")


def _within(value: float, key: str, bound: float) -> bool:
    return {
        "minimum": value >= bound,
        "maximum": value <= bound,
        "exclusiveMinimum": value > bound,
        "exclusiveMaximum": value < bound,
    }[key]


@pytest.fixture
def schema(mpctl: Mpctl) -> Schema:
    said = mpctl("schema")
    assert (said.code, said.err) == (0, "")
    found: Schema = said.document
    return found


def refused(value: Any, schema: Schema) -> list[str]:
    return list(faults(value, schema, schema))


def test_settings_are_found_by_words_of_their_names_and_meanings(mpctl: Mpctl) -> None:
    found = mpctl("schema", "--find", "Recompute").document
    assert found["training.recompute"]["enum"] == ["none", "selective", "full"]
    assert "training.recompute" not in mpctl("schema", "--find", "recompute modules").document
    refused = mpctl("schema", "--find", "no such thing")
    assert refused.code == 2 and "no setting has 'no such thing'" in refused.err


def test_it_is_a_json_schema_whose_references_resolve(schema: Schema) -> None:
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["type"] == "object"
    assert schema["additionalProperties"] is False
    tables = {"cluster", "model", "parallel", "training", "checkpoint", "data", "launch"}
    assert tables <= set(schema["properties"])

    def references(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            yield from [node["$ref"]] if "$ref" in node else []
            node = list(node.values())
        for item in node if isinstance(node, list) else ():
            yield from references(item)

    assert {ref.removeprefix("#/$defs/") for ref in references(schema)} <= set(schema["$defs"])


def test_it_accepts_the_job_presets_and_resolved_jobs(schema: Schema) -> None:
    """RUN/job.json, which a worker reads, is a job file too."""
    for name in preset_names("jobs"):
        text = (presets_root() / "jobs" / f"{name}.toml").read_text("utf-8")
        assert refused(tomllib.loads(text), schema) == []
        assert refused(load_job(name).model_dump(mode="json"), schema) == []


def test_a_table_may_be_a_preset_start_from_one_or_stand_alone(schema: Schema) -> None:
    for kind in ("model", "cluster"):
        for name in preset_names("models" if kind == "model" else "clusters"):
            assert refused({kind: name}, schema) == []
            assert refused({kind: {"preset": name, "name": "mine"}}, schema) == []
            path = presets_root() / f"{kind}s" / f"{name}.toml"
            table = tomllib.loads(path.read_text("utf-8"))
            table.pop("hub_ids", None)  # of presets alone
            assert refused({kind: table}, schema) == []
        assert refused({kind: "no-such-preset"}, schema)


WRONG = (
    ("parallel", "tpp", 2),
    ("parallel", "tp", "2"),
    ("parallel", "tp", 0),
    ("parallel", "tp", 1.5),
    ("parallel", "tp", True),
    ("parallel", "zero", 4),
    ("parallel", "schedule", "zigzag"),
    ("training", "dtype", "bf17"),
    ("training", "dropout", 1.0),
    ("training", "learning_rate", 0),
    ("data", "corpus", []),
    ("data", "corpus", "one"),
    ("cluster", "gpus", 8),
    ("model", "family", "rnn"),
    ("launch", "device", "tpu"),
)


def test_it_refuses_what_the_loader_refuses(schema: Schema) -> None:
    text = (presets_root() / "jobs" / "megatron-8.3b-512.toml").read_text("utf-8")
    for table, key, value in WRONG:
        job = tomllib.loads(text)
        job.setdefault(table, {})[key] = value
        assert refused(job, schema), (table, key, value)
        with pytest.raises(InputError):
            load_job("megatron-8.3b-512", {f"{table}.{key}": value})


def test_every_setting_that_has_a_flag_is_in_the_schema(schema: Schema) -> None:
    from mpctl.cli.options import FLAGS

    for flag in FLAGS:
        *tables, key = flag.setting.split(".")
        if tables:
            table = tables[-1]
            held = schema["$defs"][f"{table.capitalize()}Spec"]
            bodies = [held, *held.get("anyOf", ())]
            assert any(key in body.get("properties", {}) for body in bodies), flag.option
