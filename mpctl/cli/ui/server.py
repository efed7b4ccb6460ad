"""The page's server: http.server on 127.0.0.1, for the one person who has the link.

Every request must name this host (a page of another name that resolves to it, DNS rebinding, gets 403), carry the
link's token, and come from this page if it says where from (Origin, Sec-Fetch-Site). Bodies are at most BODY bytes.
Answers are computed one at a time: a later question makes the page drop an earlier one's answer, and a new plan ends
the check of every choice around the last one.
"""

from __future__ import annotations

import hmac
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

from mpctl.cli.ui.answers import NAMES, choices, emit_answer, plan_answer, search_answer
from mpctl.core.errors import InputError

HOST = "127.0.0.1"
BODY = 64 * 1024
IDLE = 3600.0  # seconds without a request, of which an open page makes one a minute
POLL = 1.0
FILES = {"/ui.js": "text/javascript", "/ui.css": "text/css"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

Answer = Callable[[Mapping[str, str], str, Callable[[], bool]], Any]
ROUTES: Mapping[str, Answer] = {
    "/plan": lambda controls, *_: plan_answer(controls),
    "/choices": lambda controls, _, is_stale: choices(controls, is_stale),
    "/search": lambda controls, *_: search_answer(controls),
    "/emit": lambda controls, target, _: emit_answer(controls, target),
    "/alive": lambda *_: {},
}


class UiServer(ThreadingHTTPServer):
    """The server of one page. first: the controls that it begins with."""

    daemon_threads = True

    def __init__(self, port: int, first: Mapping[str, str], *, idle: float = IDLE) -> None:
        super().__init__((HOST, port), Handler)
        self.first, self.idle, self.token = dict(first), idle, secrets.token_urlsafe(24)
        self.computing, self.asked, self.plans = threading.Lock(), time.monotonic(), 0

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
            first = {"token": self.server.token, "first": self.server.first, "names": NAMES}
            self._send(HTTPStatus.OK, _page(json.dumps(first).replace("<", "\\u003c")), "text/html")
        elif parts.path in FILES:
            self._send(HTTPStatus.OK, _content(parts.path), FILES[parts.path])
        else:
            self._send(HTTPStatus.NOT_FOUND, "no such page\n", "text/plain")

    def do_POST(self) -> None:
        """A question of the page: {"controls": {...}, "target": ".."}."""
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > BODY:
            self.close_connection = True
            self._send(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body of at most {BODY} bytes\n", "text/plain")
            return
        body = self.rfile.read(int(length))
        if not self._is_local() or not self._has_token(self.headers.get("X-Mpctl-Token", "")):
            return
        route = ROUTES.get(self.path)
        if route is None:
            self._send(HTTPStatus.NOT_FOUND, "no such question\n", "text/plain")
            return
        try:
            asked = json.loads(body)
            controls = {str(name): str(word) for name, word in asked.get("controls", {}).items()}
            target = str(asked.get("target", ""))
        except (ValueError, AttributeError, RecursionError):
            self._send(HTTPStatus.BAD_REQUEST, "no question\n", "text/plain")
            return
        self.server.plans += self.path == "/plan"
        now = self.server.plans
        try:
            with self.server.computing:
                answer = route(controls, target, lambda: self.server.plans != now)
        except InputError as error:
            answer = {"issues": [issue.as_dict() for issue in error.issues]}
        self._send(HTTPStatus.OK, json.dumps(answer), "application/json")

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
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the link has a token."""


def _file(name: str) -> str:
    return files("mpctl.cli.ui").joinpath(name).read_text("utf-8")


def _page(first: str) -> str:
    """The page. first: its token and controls, as JSON."""
    from mpctl.render.markup import el
    from mpctl.render.plan_svg import textures

    defs = el("svg", textures(), width=0, height=0, aria_hidden="true", class_="defs")
    return _file("ui.html").replace("{{defs}}", str(defs)).replace("{{first}}", first)


def _content(path: str) -> str:
    """A file of the page; its styles are those of `plan --html` and its own."""
    own = _file(path.removeprefix("/"))
    if path != "/ui.css":
        return own
    from mpctl.render.page import page_file
    from mpctl.render.svg import picture_css

    return picture_css() + page_file("page.css") + own
