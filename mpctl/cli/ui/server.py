"""The page's server: http.server on 127.0.0.1, for the one person who has the link.

Every request must name this host (a page of another name that resolves to it, DNS rebinding, gets 403), carry the
link's token, and come from this page if it says where from (Origin, Sec-Fetch-Site). Bodies are at most BODY bytes.
Answers are computed one at a time: a later question makes the page drop an earlier one's answer, and a new plan ends
the check of every choice around the last one. A search runs beside them and answers in lines, its progress first; it
ends when the page no longer listens.
"""

from __future__ import annotations

import hmac
import json
import secrets
import threading
import time
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from typing import ClassVar
from urllib.parse import parse_qs, urlsplit

from mpctl.cli.ui.files import FILES, POLICY, content, page
from mpctl.cli.ui.questions import ROUTES, PageQuestion, answer, read_question

HOST = "127.0.0.1"
BODY = 64 * 1024
IDLE = 3600.0  # seconds without a request, of which an open page makes one a minute
POLL = 1.0
OFTEN = 0.2  # seconds between two lines of a search's progress


class UiServer(ThreadingHTTPServer):
    """The server of one page. first: the controls that it begins with."""

    daemon_threads = True

    def __init__(self, port: int, first: Mapping[str, str], *, idle: float = IDLE) -> None:
        super().__init__((HOST, port), Handler)
        self.first, self.idle, self.token = dict(first), idle, secrets.token_urlsafe(24)
        self.computing, self.searching = threading.Lock(), threading.Lock()
        self.asked, self.plans = time.monotonic(), 0

    @property
    def link(self) -> str:
        """The address of the page, with its token."""
        return f"http://{HOST}:{self.server_port}/?token={self.token}"

    def serve_until_idle(self) -> None:
        """Answer until nobody has asked for `idle` seconds."""
        self.timeout = POLL
        while time.monotonic() - self.asked < self.idle:
            self.handle_request()


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: UiServer
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one write: two wait 40 ms for an acknowledgement
    timeout = 60
    server_version = "mpctl"
    sys_version = ""
    hosts: ClassVar = ("127.0.0.1", "localhost")

    def do_GET(self) -> None:
        """The page and its files."""
        parts = urlsplit(self.path)
        if not self._is_local():
            return
        if parts.path == "/":
            if not self._has_token(parse_qs(parts.query).get("token", [""])[0]):
                return
            self._send(HTTPStatus.OK, page(self.server.first, token=self.server.token), "text/html")
        elif (name := parts.path.removeprefix("/")) in FILES:
            self._send(HTTPStatus.OK, content(name), FILES[name])
        else:
            self._send(HTTPStatus.NOT_FOUND, "no such page\n", "text/plain")

    def do_POST(self) -> None:
        """A question of the page (questions.py)."""
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > BODY:
            self.close_connection = True
            self._send(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body of at most {BODY} bytes\n", "text/plain")
            return
        body = self.rfile.read(int(length))
        if not self._is_local() or not self._has_token(self.headers.get("X-Mpctl-Token", "")):
            return
        name = self.path.removeprefix("/")
        if name not in ROUTES:
            self._send(HTTPStatus.NOT_FOUND, "no such question\n", "text/plain")
            return
        try:
            asked = read_question(body)
        except ValueError:
            self._send(HTTPStatus.BAD_REQUEST, "no question\n", "text/plain")
            return
        if name == "search":
            self._stream(name, asked)
            return
        self.server.plans += name == "plan"
        now = self.server.plans
        with self.server.computing:
            found = answer(name, asked._replace(is_stale=lambda: self.server.plans != now))
        self._send(HTTPStatus.OK, json.dumps(found), "application/json")

    def _stream(self, name: str, asked: PageQuestion) -> None:
        """Answer in lines of JSON: {"progress": [stage, done, total]} and at last the answer."""
        self.close_connection = True
        self._head(HTTPStatus.OK, "application/x-ndjson", {"Connection": "close"})
        said = 0.0

        def write(line: object) -> None:
            self.wfile.write(json.dumps(line).encode() + b"\n")
            self.wfile.flush()

        def progress(stage: str, done: int, total: int) -> None:
            nonlocal said
            if time.monotonic() - said > OFTEN:
                said = time.monotonic()
                write({"progress": [stage, done, total]})

        try:
            with self.server.searching:
                write(answer(name, asked._replace(on_progress=progress)))
        except OSError:
            self.wfile = BytesIO()  # the page has left: nothing is to be flushed to it

    def _is_local(self) -> bool:
        """Whether the request names this server and does not come from another site's page; else 403."""
        port = self.server.server_port
        own = {f"{host}:{port}" for host in self.hosts}
        origin, site = self.headers.get("Origin"), self.headers.get("Sec-Fetch-Site")
        is_own = origin is None or origin in {f"http://{host}" for host in own}
        is_right = self.headers.get("Host") in own and is_own and site in (None, "same-origin", "none")
        if not is_right:
            self._send(HTTPStatus.FORBIDDEN, "only the page of this server may ask\n", "text/plain")
        else:
            self.server.asked = time.monotonic()
        return is_right

    def _has_token(self, given: str) -> bool:
        if hmac.compare_digest(given.encode(), self.server.token.encode()):
            return True
        self._send(HTTPStatus.FORBIDDEN, "use the link that mpctl ui printed: it has a token\n", "text/plain")
        return False

    def _send(self, status: HTTPStatus, text: str, kind: str) -> None:
        body = text.encode()
        self._head(status, kind, {"Content-Length": str(len(body))})
        self.wfile.write(body)

    def _head(self, status: HTTPStatus, kind: str, more: Mapping[str, str]) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        for name, value in more.items():
            self.send_header(name, value)
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the link has a token."""
