"""The static copy: its files, what its Python answers without the training half, and the copy in a real Chromium."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distribution
from io import BytesIO
from pathlib import Path
from typing import Any

import pydantic_core
import pytest

from mpctl.cli.ui.answers import plan_answer
from mpctl.cli.ui.export import ABI, ARCHIVE, PLATFORM, RUNTIME, packed, write_copy
from mpctl.cli.ui.questions import answer, read_question
from mpctl.core.errors import InputError

FIRST = {"model": "llama-3-8b", "gpus": "8xh100", "runtime": "megatron-core", "tp": "2", "zero": "1"}
WHEEL = f"pydantic_core-{distribution('pydantic_core').version}-{ABI}-{ABI}-{PLATFORM}.whl"
FOLDER = os.environ.get("MPCTL_PYODIDE", "")
ASK = """
import json, sys
sys.path[:0] = sys.argv[1:]
from mpctl.cli.ui.questions import answer_text
for line in sys.stdin:
    print(answer_text(*json.loads(line), lambda *_: None))
"""


@pytest.mark.slow
def test_the_packed_planner_answers_without_what_is_compiled(tmp_path: Path) -> None:
    """No site-packages: there is neither torch nor numpy nor psutil, only the core of pydantic."""
    with zipfile.ZipFile(BytesIO(packed())) as archive:
        archive.extractall(tmp_path / "planner")
    core = tmp_path / "core" / "pydantic_core"
    shutil.copytree(Path(pydantic_core.__file__).parent, core)
    questions = [
        ("plan", json.dumps({"controls": FIRST})),
        ("plan", json.dumps({"controls": {**FIRST, "model": "mixtral-8x7b", "tp": "9"}})),
        ("compare", json.dumps({"pins": [FIRST, {**FIRST, "tp": "4", "tokens": "1T"}]})),
        ("emit", json.dumps({"controls": FIRST, "target": "toml"})),
        ("choices", json.dumps({"controls": FIRST, "target": "pp"})),
    ]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", ASK, str(tmp_path / "planner"), str(core.parent)],
        input="".join(json.dumps(question) + "\n" for question in questions),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for (name, body), line in zip(questions, done.stdout.splitlines(), strict=True):
        assert json.loads(line) == json.loads(json.dumps(answer(name, read_question(body)))), name


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    """A folder with Pyodide's names."""
    folder = tmp_path / "runtime"
    folder.mkdir()
    for name in (*RUNTIME, WHEEL):
        (folder / name).write_text(name)
    (folder / "pyodide-lock.json").write_text('{"info": {"abi_version": "2026_0"}}')
    return folder


def test_a_copy_needs_no_server_of_its_own(tmp_path: Path, runtime: Path) -> None:
    folder = tmp_path / "copy"
    size = write_copy(folder, FIRST, runtime)
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    own = {"index.html", "ui.js", "page.js", "ui.css", "worker.js", "planner.zip", WHEEL}
    assert set(found) == own | {f"pyodide/{name}" for name in RUNTIME}
    assert size == sum(map(len, found.values())) - len(found["index.html"])
    page = found["index.html"].decode()
    assert "Content-Security-Policy" in page and '"token": ""' in page and "loading the planner" in page
    assert WHEEL in found["worker.js"].decode()
    assert not [name for name in own - {WHEEL, "planner.zip"} if b"https://" in found[name]]
    names = zipfile.ZipFile(BytesIO(found["planner.zip"])).namelist()
    assert "mpctl/_presets/models/llama-3-8b.toml" in names and not [n for n in names if n.startswith("mpctl/train/")]
    with pytest.raises(InputError, match="is not empty"):
        write_copy(folder, FIRST, runtime)


def test_what_is_no_pyodide_is_refused(tmp_path: Path, runtime: Path) -> None:
    (runtime / "pyodide-lock.json").write_text('{"info": {"abi_version": "2025_0"}}')
    with pytest.raises(InputError, match="has ABI 2025_0"):
        write_copy(tmp_path / "copy", FIRST, runtime)
    (runtime / "pyodide.asm.wasm").unlink()
    with pytest.raises(InputError, match=r"has no pyodide\.asm\.wasm"):
        write_copy(tmp_path / "copy", FIRST, runtime)
    for wrong in (runtime / "pyodide.mjs", tmp_path / "nothing"):
        with pytest.raises(InputError) as caught:
            write_copy(tmp_path / "copy", FIRST, wrong)
        assert caught.value.issues[0].where == "--pyodide"
    assert not (tmp_path / "copy").exists()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a copy on a host of files."""
    if not FOLDER:
        pytest.skip(f"MPCTL_PYODIDE names no folder: unpack {ARCHIVE}, put {WHEEL} from PyPI into it")
    folder = tmp_path_factory.mktemp("site") / "copy"
    write_copy(folder, FIRST, Path(FOLDER))

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_planner_in_the_browser_answers_as_this_one(site: str) -> None:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no Chromium")
    wrong: list[str] = []
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(120_000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: request.url.startswith((site, "data:")) or wrong.append(request.url))
        page.goto(site)
        assert page.inner_text("#verdict").startswith("loading the planner, ")
        _answers_as(page, FIRST)
        page.wait_for_selector("input[name=pp][value='8'][aria-disabled=true]", state="attached")
        page.check("input[name=tp][value='4']", force=True)
        page.fill("input[name=tokens]", "1T")
        _answers_as(page, {**FIRST, "tp": "4", "tokens": "1T"})
        page.wait_for_function("() => location.hash.includes('tokens=1T')")
        page.reload()
        _answers_as(page, {**FIRST, "tp": "4", "tokens": "1T"})
        browser.close()
    assert wrong == []


def _answers_as(page: Any, controls: dict[str, str]) -> None:
    """Wait for the step of the planner in this process, and compare the whole answer's page."""
    wanted = plan_answer(controls)
    page.wait_for_function(
        "([step, run]) => document.getElementById('step').textContent.startsWith(step)"
        " && document.getElementById('run').textContent.endsWith(run)",
        arg=[wanted["step"], wanted["run"]],
    )
    assert page.inner_text("#verdict") == wanted["verdict"]
    tables = "place => [...place.querySelectorAll('table')].map(table => table.textContent).join('|')"
    drawn = page.evaluate(f"() => ({tables})(document.getElementById('plan'))")
    made = "const made = document.createElement('div'); made.innerHTML = html"
    assert drawn and drawn == page.evaluate(f"html => {{ {made}; return ({tables})(made) }}", wanted["html"])
