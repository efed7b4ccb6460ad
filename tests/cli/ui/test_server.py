"""Who is answered, over a real socket."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import cast

import pytest

from mpctl.cli.ui.questions import ROUTES, PageQuestion
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
    for path in ("/ui.js", "/page.js", "/ui.css"):
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
    for body in (b"{", b"[]", b"3", b"[" * 50_000, b'{"controls": 3}', b'{"pins": {"a": 1}}'):
        assert asked(server, "POST", "/plan", body, token)[0] == 400, body[:20]
    assert asked(server, "POST", "/nothing", b"{}", token)[0] == 404
    assert asked(server, "GET", "/../pyproject.toml")[0] == 404
    assert question(server)[0] == 200


def test_a_search_reports_and_then_answers(server: UiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def search(question: PageQuestion) -> dict[str, str]:
        question.on_progress("bounds", 1, 3)
        return {"html": question.controls["model"]}

    monkeypatch.setitem(cast(dict, ROUTES), "search", search)
    body, token = json.dumps({"controls": FIRST}).encode(), {"X-Mpctl-Token": server.token}
    status, text, _ = asked(server, "POST", "/search", body, token)
    assert status == 200
    assert list(map(json.loads, text.splitlines())) == [{"progress": ["bounds", 1, 3]}, {"html": "gpt2"}]


def test_a_search_ends_when_nobody_listens(server: UiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def search(question: PageQuestion) -> dict[str, str]:
        try:
            for done in range(200):
                question.on_progress("bounds", done, 200)
                time.sleep(0.05)
        except OSError:
            ended.set()
            raise
        return {}

    monkeypatch.setitem(cast(dict, ROUTES), "search", search)
    monkeypatch.setattr("mpctl.cli.ui.server.OFTEN", 0.0)
    body = json.dumps({"controls": FIRST}).encode()
    with closing(http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)) as connection:
        connection.request("POST", "/search", body, {"X-Mpctl-Token": server.token})
        assert b"progress" in connection.getresponse().readline()
    assert ended.wait(8) and question(server)[0] == 200


def test_it_ends_when_nobody_asks() -> None:
    with UiServer(0, FIRST, idle=0.0) as server:
        server.serve_until_idle()
