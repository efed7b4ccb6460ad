"""The schemas that Kubeflow publishes, as the models of its Python packages: an object passes when
every field is known and has the published type, at any depth.

kubeflow-trainer-api holds pydantic models generated from the OpenAPI document of the Trainer; they
drop unknown fields, so an object must come back as it was. kubeflow-training and kubernetes hold
classes with tables of field names and types (`attribute_map`, `openapi_types`), walked here. They
are imported where they are used: every worker of pytest collects the tests of the API server.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

SCALARS = {"str": str, "int": int, "bool": bool, "float": float}


def train_job_issues(document: dict[str, Any]) -> list[str]:
    """How a TrainJob departs from its schema."""
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

    return _model_issues(TrainerV1alpha1TrainJob, document, "TrainJob")


def job_set_issues(document: dict[str, Any]) -> list[str]:
    """How a JobSet departs from its schema, which the Trainer's package holds."""
    from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

    return _model_issues(JobsetV1alpha2JobSet, document, "JobSet")


def _model_issues(model: Any, document: dict[str, Any], kind: str) -> list[str]:
    try:
        parsed = model.from_dict(document).to_dict()
    except ValueError as error:
        return [str(error)]
    return list(_lost(document, parsed, kind))


def pytorch_job_issues(document: dict[str, Any]) -> list[str]:
    """How a PyTorchJob departs from its schema."""
    return list(_walk("KubeflowOrgV1PyTorchJob", document, "PyTorchJob"))


def _lost(given: Any, parsed: Any, where: str) -> Iterator[str]:
    """What a parsed object lacks or has otherwise."""
    if isinstance(given, dict) and isinstance(parsed, dict):
        for key in given.keys() | parsed.keys():
            if key not in parsed:
                yield f"{where}.{key}: unknown field"
            else:
                yield from _lost(given.get(key), parsed[key], f"{where}.{key}")
    elif isinstance(given, list) and isinstance(parsed, list) and len(given) == len(parsed):
        for index, pair in enumerate(zip(given, parsed, strict=True)):
            yield from _lost(*pair, f"{where}[{index}]")
    elif given != parsed:
        yield f"{where}: {given!r} is read as {parsed!r}"


def _walk(kind: str, value: Any, where: str) -> Iterator[str]:
    """How a value departs from the type with this name in the classes' tables."""
    if many := re.fullmatch(r"list\[(.*)\]", kind):
        yield from _items(many[1], value, where)
    elif table := re.fullmatch(r"dict\(str, (.*)\)", kind):
        if not isinstance(value, dict):
            yield f"{where}: {value!r} is no table"
            return
        for key, item in value.items():
            yield from _walk(table[1], item, f"{where}.{key}")
    elif kind in SCALARS:
        if type(value) is not SCALARS[kind]:
            yield f"{where}: {value!r} is not of type {kind}"
    else:
        yield from _fields(kind, value, where)


def _items(kind: str, value: Any, where: str) -> Iterator[str]:
    if not isinstance(value, list):
        yield f"{where}: {value!r} is no list"
        return
    for index, item in enumerate(value):
        yield from _walk(kind, item, f"{where}[{index}]")


def _fields(kind: str, value: Any, where: str) -> Iterator[str]:
    from kubeflow.training import models as training
    from kubernetes.client import models as kubernetes

    model = getattr(training, kind, None) or getattr(kubernetes, kind)
    if not isinstance(value, dict):
        yield f"{where}: {value!r} is no {kind}"
        return
    names = {name: attribute for attribute, name in model.attribute_map.items()}
    for name, item in value.items():
        if name in names:
            yield from _walk(model.openapi_types[names[name]], item, f"{where}.{name}")
        else:
            yield f"{where}.{name}: unknown field"
