"""`--fetch`: download the config.json of a model by its id from Hugging Face's hub.

Only this file is requested, over https and without a token, from the hub or from the server that
HF_ENDPOINT names; it is stored where spec/hf.py finds it, so that later commands need no network.
For a gated model the error has the commands of the hub's tool, which knows the user's token.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from mpctl.core.errors import InputError

if TYPE_CHECKING:
    from urllib.error import HTTPError

HUB = "https://huggingface.co"
LARGEST = 2**20  # bytes; a config.json has about two thousand
SECONDS = 20.0  # for the full response
RULE, WHERE = "not-fetched", "--fetch"


def fetch_model(source: str | None, settings: Mapping[str, Any]) -> None:
    """Fetch the config.json of the model that a job names by id, unless a preset or a path has it,
    and print on stderr where it is. source, settings: as load_job has them. Raises InputError."""
    from mpctl.render.console import say
    from mpctl.spec.paths import is_hub_id
    from mpctl.spec.presets import find_file

    name = _named_model(source, settings)
    if not is_hub_id(name) or find_file("models", str(name)) is not None:
        shown = f"the model is {name}, which is known" if name else "no model is named"
        say(f"nothing to fetch: {shown}", stderr=True)
        return
    say(f"fetched {fetch_config(str(name))}", stderr=True)


def _named_model(source: str | None, settings: Mapping[str, Any]) -> object:
    """The model's name in the settings, else in the job that they override."""
    from mpctl.spec.load import read_source

    if name := settings.get("model.preset") or settings.get("model"):
        return name
    model = read_source(source).get("model") if source else None
    return model.get("preset") if isinstance(model, dict) else model


def fetch_config(name: str) -> Path:
    """Fetch config.json of the model with this id and return the path of the written file. Raises
    InputError, and then nothing is written."""
    from mpctl.core.durable import write_whole
    from mpctl.spec.hf import fetched_path

    path = fetched_path(name)
    if path is None:
        raise _refused("there is no folder for it: neither XDG_CACHE_HOME nor a home", "set HOME")
    endpoint = os.environ.get("HF_ENDPOINT") or HUB
    if not endpoint.startswith(("https://", "http://")):
        raise _refused(f"HF_ENDPOINT {endpoint!r} is no address of a server", f"for example {HUB}")
    text = _read(f"{endpoint.rstrip('/')}/{name}/resolve/main/config.json", name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        message = f"{error.filename or path}: {error.strerror or error}"
        raise _refused(message, "set XDG_CACHE_HOME to a folder of yours") from None
    return path


def _read(url: str, name: str) -> str:
    """The text at `url`. Raises InputError unless it is a JSON object."""
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    by_hand = f"try again, or `hf download {name} config.json` where there is a network"
    try:
        request = Request(url, headers={"User-Agent": "mpctl"})
        with urlopen(request, timeout=SECONDS) as answer:
            _require_same_scheme(url, answer.url)
            content = _content(answer, url)
    except HTTPError as error:
        raise _answered(error, url, name) from None
    except TimeoutError:
        raise _refused(f"{url} did not answer within {SECONDS:g} s", by_hand) from None
    except (OSError, HTTPException, ValueError) as error:  # URLError is an OSError
        reason = error.reason if isinstance(error, URLError) else error
        if isinstance(reason, TimeoutError):
            reason = f"no answer within {SECONDS:g} s"
        raise _refused(f"{url} cannot be read: {reason}", by_hand) from None
    try:
        text = content.decode("utf-8")
        is_table = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_table = False
    if not is_table:
        raise _refused(f"what {url} answered is no JSON table", "is HF_ENDPOINT a hub?")
    return text


def _content(answer: IO[bytes], url: str) -> bytes:
    """The body of an answer of at most LARGEST bytes; raises TimeoutError after SECONDS."""
    until, content = time.monotonic() + SECONDS, b""
    while piece := answer.read1(2**16):  # type: ignore[attr-defined]
        content += piece
        if len(content) > LARGEST:
            raise _refused(f"{url} has more than {LARGEST:,} bytes, which no config.json has", "")
        if time.monotonic() > until:
            raise TimeoutError
    return content


def _require_same_scheme(asked: str, answered: str) -> None:
    """A hub that was contacted by https must not redirect to plain http."""
    if asked.startswith("https:") and not answered.startswith("https:"):
        raise _refused(f"{asked} leads to {answered}, which is not encrypted", "")


def _answered(error: HTTPError, url: str, name: str) -> InputError:
    """The error for a refused request. The hub also answers 401 for what does not exist, and gives
    the reason in a header."""
    reason = error.headers.get("X-Error-Code", "")
    page = url.partition(f"/{name}/")[0] + f"/{name}"
    if reason == "GatedRepo" or (error.code == 403 and not reason):
        hint = (
            f"accept its terms at {page}, then `hf auth login` and `hf download {name} "
            "config.json`, after which mpctl finds it"
        )
        return _refused(f"{name} is gated (HTTP {error.code})", hint)
    if reason == "EntryNotFound":
        message = f"{name} has no config.json (HTTP {error.code})"
        return _refused(message, "use the id of a model in the form of transformers")
    if error.code in (401, 404):
        message = f"there is no model {name} for everybody (HTTP {error.code})"
        hint = (
            f"mind the spelling; for one that is private or gated, `hf auth login` and `hf "
            f"download {name} config.json`, after which mpctl finds it"
        )
        return _refused(message, hint)
    return _refused(f"{url} answered HTTP {error.code} {error.reason}", "try again later")


def _refused(message: str, hint: str) -> InputError:
    return InputError.of(RULE, WHERE, message, hint)
