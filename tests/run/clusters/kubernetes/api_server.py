"""An API server of Kubernetes, as far as kubectl needs one to create, read and delete a job.

Objects are checked as the real one checks them: kinds that are not installed are unknown to
discovery, and a job must be valid under Kubeflow's published schema. Its refusals are Status
objects with the reasons and messages of the real server; kubectl makes its own words of them.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.run.clusters.kubernetes.published import job_set_issues, pytorch_job_issues, train_job_issues

GROUPS = {
    "trainer.kubeflow.org/v1alpha1": ("TrainJob", "trainjobs", train_job_issues),
    "kubeflow.org/v1": ("PyTorchJob", "pytorchjobs", pytorch_job_issues),
    "jobset.x-k8s.io/v1alpha2": ("JobSet", "jobsets", job_set_issues),
}
CORE = (("Pod", "pods"), ("PersistentVolumeClaim", "persistentvolumeclaims"))


@dataclass
class Cluster:
    """The state of the server. objects: by (resource, namespace, name); installed: the API groups
    that discovery tells of; refusal: the code, reason and message with which every write ends."""

    objects: dict[tuple[str, str, str], dict[str, Any]] = field(default_factory=dict)
    installed: tuple[str, ...] = tuple(GROUPS)
    refusal: tuple[int, str, str] | None = None
    requests: list[str] = field(default_factory=list)

    def add(self, resource: str, document: dict[str, Any], namespace: str = "default") -> None:
        self.objects[resource, namespace, document["metadata"]["name"]] = document

    def names(self, resource: str) -> list[str]:
        return [name for kind, _, name in self.objects if kind == resource]


def status(code: int, reason: str, message: str) -> tuple[int, dict[str, Any]]:
    return code, {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


class Handler(BaseHTTPRequestHandler):
    """One request; `server.cluster` is what it is about."""

    def do_GET(self) -> None:
        self.answer(*self.read())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer(*self.create(body))

    def do_DELETE(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        resource, namespace, name = self.target()
        if self.cluster.objects.pop((resource, namespace, name), None) is None:
            self.answer(*self.missing(resource, name))
        else:
            self.answer(200, {"kind": "Status", "apiVersion": "v1", "status": "Success"})

    @property
    def cluster(self) -> Cluster:
        return self.server.cluster  # type: ignore[attr-defined]

    def read(self) -> tuple[int, Any]:
        path = self.path.partition("?")[0]
        if (found := discovery(path, self.cluster.installed)) is not None:
            return 200, found
        resource, namespace, name = self.target()
        objects = self.cluster.objects
        if name:
            known = objects.get((resource, namespace, name))
            return (200, known) if known else self.missing(resource, name)
        items = [o for (kind, where, _), o in objects.items() if (kind, where) == (resource, namespace)]
        return 200, {"kind": "List", "apiVersion": "v1", "metadata": {}, "items": items}

    def create(self, body: dict[str, Any]) -> tuple[int, Any]:
        if self.cluster.refusal:
            return status(*self.cluster.refusal)
        group = next(name for name in GROUPS if name in self.path)
        kind, resource, find_issues = GROUPS[group]
        if issues := find_issues(body):
            version = group.rpartition("/")[2]
            return status(
                400,
                "BadRequest",
                f'{kind} in version "{version}" cannot be handled as a {kind}: strict decoding error: {issues[0]}',
            )
        namespace, name = self.target()[1], body["metadata"]["name"]
        if (resource, namespace, name) in self.cluster.objects:
            whose = group.partition("/")[0]
            words = f'{resource}.{whose} "{name}" already exists'
            return status(409, "AlreadyExists", words)
        if "dryRun=All" not in self.path:
            self.cluster.objects[resource, namespace, name] = body
        return 201, body

    def target(self) -> tuple[str, str, str]:
        """Resource, namespace and name of the request's path."""
        _, _, rest = self.path.partition("?")[0].partition("/namespaces/")
        namespace, resource, name = [*rest.split("/"), "", ""][:3]
        return resource, namespace, name

    def missing(self, resource: str, name: str) -> tuple[int, Any]:
        group = next((f".{g.partition('/')[0]}" for g, row in GROUPS.items() if row[1] == resource), "")
        return status(404, "NotFound", f'{resource}{group} "{name}" not found')

    def answer(self, code: int, document: Any) -> None:
        self.cluster.requests.append(f"{self.command} {self.path}")
        payload = document.encode() if isinstance(document, str) else json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/plain" if isinstance(document, str) else "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: Any) -> None:
        pass


def discovery(path: str, installed: tuple[str, ...]) -> Any:
    """The server's discovery answer about its kinds and their schemas; None for other paths."""
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = [group_entry(name) for name in installed]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    if path == "/api/v1":
        return resource_list("v1", CORE)
    if path.removeprefix("/apis/") in installed:
        group = path.removeprefix("/apis/")
        return resource_list(group, [GROUPS[group][:2]])
    if path == "/openapi/v3":
        return {
            "paths": {f"apis/{name}": {"serverRelativeURL": f"/openapi/v3/apis/{name}?hash=1"} for name in installed}
        }
    if path.startswith("/openapi/v3/apis/"):
        return openapi(path.removeprefix("/openapi/v3/apis/"))
    return None


def group_entry(name: str) -> dict[str, Any]:
    group, _, version = name.partition("/")
    entry = {"groupVersion": name, "version": version}
    return {"name": group, "versions": [entry], "preferredVersion": entry}


def resource_list(version: str, kinds: Any) -> dict[str, Any]:
    verbs = ["create", "get", "list", "delete", "patch"]
    resources = [
        {"name": plural, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": verbs}
        for kind, plural in kinds
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}


def openapi(name: str) -> dict[str, Any]:
    """Enough for kubectl to see that the server validates fields itself."""
    group, _, version = name.partition("/")
    kind, plural, _ = GROUPS[name]
    patch = {
        "x-kubernetes-group-version-kind": {"group": group, "version": version, "kind": kind},
        "parameters": [
            {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}},
            {"name": "dryRun", "in": "query", "schema": {"type": "string"}},
        ],
        "responses": {"200": {"description": "OK"}},
    }
    url = f"/apis/{name}/namespaces/{{namespace}}/{plural}/{{name}}"
    return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": "v1.32.0"}, "paths": {url: {"patch": patch}}}


@contextmanager
def serving() -> Iterator[tuple[Cluster, str]]:
    """A cluster without objects, and the address of its server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.cluster = Cluster()  # type: ignore[attr-defined]
    threading.Thread(target=lambda: server.serve_forever(0.05), daemon=True).start()
    try:
        yield server.cluster, f"http://127.0.0.1:{server.server_port}"  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def served(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster that kubectl talks to; skips the test where there is no kubectl."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    with serving() as (cluster, address):
        point_kubectl(folder, monkeypatch, address)
        yield cluster


def point_kubectl(folder: Path, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Let kubectl talk to a server without credentials, with its caches below a folder."""
    (folder / "kubeconfig").write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: here\n"
        "contexts: [{name: here, context: {cluster: here, user: me}}]\n"
        f"clusters: [{{name: here, cluster: {{server: '{address}'}}}}]\nusers: [{{name: me}}]\n"
    )
    monkeypatch.setenv("KUBECONFIG", str(folder / "kubeconfig"))
    monkeypatch.setenv("HOME", str(folder))
