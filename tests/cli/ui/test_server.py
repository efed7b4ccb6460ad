"""Who is answered, over a real socket."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing

import pytest

from mpctl.cli.ui.server import BODY, UiServer

FIRST = {"model": "gpt2", "gpus": "8xh100"}


@pytest.fixture(scope="module")
def server() -> Iterator[UiServer]:
    with UiServer(0, FIRST) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        yield found
        found.shutdown()


def asked(
    server: UiServer, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] = {}
) -> tuple[int, str, Mapping[str, str]]:
    with closing(http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)) as connection:
        connection.request(method, path, body, dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())


def question(server: UiServer, **headers: str) -> tuple[int, str]:
    body = json.dumps({"controls": FIRST}).encode()
    given = {"X-Mpctl-Token": server.token, **{name.replace("_", "-"): value for name, value in headers.items()}}
    return asked(server, "POST", "/plan", body, given)[:2]


def test_the_page_and_a_plan(server: UiServer) -> None:
    status, page, headers = asked(server, "GET", f"/?token={server.token}")
    assert status == 200 and '"model": "gpt2"' in page and "default-src 'none'" in headers["Content-Security-Policy"]
    for path in ("/ui.js", "/ui.css"):
        assert asked(server, "GET", path)[0] == 200
    status, answer = question(server)
    assert status == 200 and json.loads(answer)["status"] == "fits"


def test_others_get_403(server: UiServer) -> None:
    own = f"http://127.0.0.1:{server.server_port}"
    assert question(server, Origin=own)[0] == 200
    assert asked(server, "GET", "/")[0] == asked(server, "GET", "/?token=wrong")[0] == 403
    assert question(server, X_Mpctl_Token="wrong")[0] == 403
    for headers in (
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Host": "evil.example"},
        {"Host": f"evil.example:{server.server_port}"},
    ):
        assert question(server, **headers)[0] == 403, headers


def test_wrong_and_large_bodies(server: UiServer) -> None:
    token = {"X-Mpctl-Token": server.token}
    assert asked(server, "POST", "/plan", b"x" * (BODY + 1), token)[0] == 413
    for body in (b"{", b"[]", b"3", b"[" * 50_000, b'{"controls": 3}'):
        assert asked(server, "POST", "/plan", body, token)[0] == 400, body[:20]
    assert asked(server, "POST", "/nothing", b"{}", token)[0] == 404
    assert asked(server, "GET", "/../pyproject.toml")[0] == 404
    assert question(server)[0] == 200


def test_it_ends_when_nobody_asks() -> None:
    with UiServer(0, FIRST, idle=0.0) as server:
        server.serve_until_idle()
