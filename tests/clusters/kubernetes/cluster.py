"""The kubectl of this machine, configured for a server of the tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.clusters.kubernetes.api_server import Cluster, serving


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
