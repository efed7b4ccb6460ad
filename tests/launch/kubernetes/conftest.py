from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.kubernetes.api_server import Cluster, serving


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster that the kubectl of this machine is configured for."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    with serving() as (cluster, address):
        point_kubectl(tmp_path, monkeypatch, address)
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
