"""`--fetch` against a hub of the test: what it asks for, what it keeps, and what it refuses."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mpctl.cli import fetch
from tests.cli.calls import Mpctl, Said

CONFIG = {"model_type": "gpt2", "n_layer": 3, "n_embd": 8, "n_head": 2, "vocab_size": 9, "n_positions": 8}
COMMIT = "0123456789abcdef" * 2 + "01234567"


@dataclass
class Hub:
    """A server, what it answers, and the paths that it was asked for."""

    address: str = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = json.dumps(CONFIG).encode()
    pause: float = 0.0  # seconds before each half of the body
    asked: list[str] = field(default_factory=list)


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            hub.asked.append(self.path)
            self.send_response(hub.status)
            for name, value in hub.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(hub.body)))
            self.end_headers()

        def do_GET(self) -> None:
            self.do_HEAD()
            assert "Authorization" not in self.headers
            middle = len(hub.body) // 2
            try:
                for half in (hub.body[:middle], hub.body[middle:]):
                    time.sleep(hub.pause)
                    self.wfile.write(half)
            except OSError:  # the client has left
                pass

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that the environment names, for a user with an empty cache."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", f"{hub.address}/")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("HF_TOKEN", "a token of the user's")
    for name in ("HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield hub
    server.shutdown()
    thread.join()
    server.server_close()


def plan(mpctl: Mpctl, *more: object, model: str = "some/Model") -> Said:
    machine = ("--nodes", 1, "--gpus-per-node", 1)
    return mpctl("plan", "--model", model, *machine, "--json", *more)


def refused(mpctl: Mpctl) -> dict[str, str]:
    """The one issue of a plan with --fetch, after which nothing is kept."""
    said = plan(mpctl, "--fetch")
    assert said.code == 2 and list(said.issues) == ["not-fetched"]
    assert not list(Path("cache").rglob("*.json"))
    return said.issues["not-fetched"]


def test_a_config_is_fetched_once_and_found_ever_after(mpctl: Mpctl, hub: Hub) -> None:
    assert plan(mpctl).issues["unknown-preset"] and hub.asked == []
    said = plan(mpctl, "--fetch")
    assert hub.asked == ["/some/Model/resolve/main/config.json"]
    path = Path("cache/mpctl/models/some/Model/config.json").absolute()
    assert said.code == 0 and said.err.strip() == f"fetched {path}"
    assert json.loads(path.read_text("utf-8")) == CONFIG
    again = plan(mpctl)
    assert again.document == said.document and len(hub.asked) == 1
    assert plan(mpctl, model=str(path)).document == said.document


def test_a_job_file_s_model_is_fetched_and_init_does_it_too(mpctl: Mpctl, hub: Hub) -> None:
    Path("a.toml").write_text('[model]\npreset = "some/Model"\n[cluster]\ngpus_per_node = 1\n')
    assert mpctl("plan", "a.toml", "--fetch").code == 0
    hub.asked.clear()
    flags = ("--cluster", "this-machine", "--nodes", 1, "--gpus-per-node", 1, "--steps", 1)
    assert mpctl("init", "b.toml", "--model", "other/Model", "--fetch", *flags).code == 0
    assert hub.asked == ["/other/Model/resolve/main/config.json"]
    assert 'preset = "other/Model"' in Path("b.toml").read_text("utf-8")
    assert mpctl("plan", "b.toml").code == 0


@pytest.mark.parametrize("model", ["gpt2", "openai-community/GPT2", "./mine"])
def test_what_is_known_is_not_fetched(mpctl: Mpctl, hub: Hub, model: str) -> None:
    Path("mine").mkdir()
    Path("mine/config.json").write_text(json.dumps(CONFIG), "utf-8")
    said = plan(mpctl, "--fetch", model=model)
    assert said.code == 0 and said.err.startswith("nothing to fetch: ") and hub.asked == []


@pytest.mark.parametrize(
    ("status", "code", "words", "way_out"),
    [
        (404, "", "no model some/Model for everybody (HTTP 404)", "mind the spelling"),
        (401, "RepoNotFound", "no model some/Model for everybody (HTTP 401)", "hf auth login"),
        (404, "EntryNotFound", "some/Model has no config.json", "in the form of transformers"),
        (401, "GatedRepo", "some/Model is gated (HTTP 401)", "accept its terms at {}/some/Model"),
        (403, "", "some/Model is gated (HTTP 403)", "`hf download some/Model config.json`"),
        (503, "", "HTTP 503 Service Unavailable", "try again later"),
    ],
)
def test_a_refusal_of_the_hub_is_told_with_a_way_out(
    mpctl: Mpctl, hub: Hub, status: int, code: str, words: str, way_out: str
) -> None:
    hub.status, hub.headers = status, {"X-Error-Code": code} if code else {}
    issue = refused(mpctl)
    assert words in issue["message"] and way_out.format(hub.address) in issue["hint"]


@pytest.mark.parametrize("body", [b"<html>", b"[1]", b"\xff", b"[" * 100_000, b""])
def test_what_is_no_config_is_not_kept(mpctl: Mpctl, hub: Hub, body: bytes) -> None:
    hub.body = body
    assert "is no JSON table" in refused(mpctl)["message"]


def test_more_than_a_config_is_not_read(mpctl: Mpctl, hub: Hub) -> None:
    hub.body = b" " * (fetch.LARGEST + 1)
    assert "more than 1,048,576 bytes" in refused(mpctl)["message"]


@pytest.mark.parametrize("pause", [0.2, 0.6])
def test_a_hub_that_is_slow_is_given_up(mpctl: Mpctl, hub: Hub, pause: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: 0.2 s before each half are within 0.3 s each, and together beyond them."""
    monkeypatch.setattr(fetch, "SECONDS", 0.3)
    hub.pause = pause
    assert "did not answer within 0.3 s" in refused(mpctl)["message"]


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ("file:///etc", "is no address of a server"),
        ("http://127.0.0.1:1", "cannot be read"),
        ("http://[", "cannot be read"),
    ],
)
def test_a_hub_that_is_none_is_refused(
    mpctl: Mpctl, hub: Hub, endpoint: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    assert words in refused(mpctl)["message"]


def test_a_way_to_plain_http_is_refused() -> None:
    with pytest.raises(fetch.InputError, match="not encrypted"):
        fetch._require_same_scheme("https://hub/x", "http://hub/x")
    fetch._require_same_scheme("https://hub/x", "https://other/y")


def test_another_mixture_of_experts_is_fetched_and_refused_in_words(mpctl: Mpctl, hub: Hub) -> None:
    hub.body = json.dumps({"model_type": "jamba", "num_experts": 16}).encode()
    issue = plan(mpctl, "--fetch").issues["not-planned"]
    assert "mixtures of experts of this class cannot be read" in issue["message"]
    assert "mixtral" in issue["hint"]


def test_what_the_hub_s_own_tool_downloads_is_found(
    mpctl: Mpctl, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants, hf_hub_download

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # tests of weights set the variable
    hub.headers = {"X-Repo-Commit": COMMIT, "ETag": '"an etag"'}
    cache = tmp_path / "cache" / "huggingface" / "hub"
    hf_hub_download("some/Model", "config.json", cache_dir=cache, endpoint=hub.address, token=False)
    hub.asked.clear()
    said = plan(mpctl)
    assert said.code == 0 and hub.asked == []
    assert said.document == plan(mpctl, model=str(next(cache.rglob("config.json")))).document
