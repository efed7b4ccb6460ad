"""A static copy of the page: a folder for any host of files, in which the planner runs in the browser by Pyodide.

index.html, ui.js, ui.css, page.js   the page as the server sends it
worker.js                            loads Python and answers what the server answers
planner.zip                          mpctl without its training half, and the pure Python that it imports
pydantic_core-*.whl, pyodide/        what is compiled for the browser

Pyodide comes from a folder or npm's archive, or by npm and must have SHA512; the core of pydantic has
the version of the one installed here, and comes from that folder or by pip. The copy asks no other host.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from importlib.metadata import distribution
from pathlib import Path

import mpctl
from mpctl.cli.ui.files import FILES, content, page
from mpctl.core.durable import remove, temporary_path
from mpctl.core.errors import InputError
from mpctl.spec.presets import presets_root

PYODIDE = "314.0.7"
ARCHIVE = f"pyodide-{PYODIDE}.tgz"  # as npm calls it
SHA512 = (
    "d18bd7c4485f11da4b7dbfd790cd8114078c44eab488c517d9bcf31fda4eb6dc"
    "8c716930abe1db139bb2b860fcd8b37bcb6abe48dbe2ffa579244b0e943d91d4"
)
RUNTIME = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
PYTHON, ABI, PLATFORM = "3.14", "cp314", "pyemscripten_2026_0_wasm32"
PURE = (
    "annotated_doc",
    "annotated_types",
    "pydantic",
    "rich",
    "shellingham",
    "typer",
    "typing_extensions",
    "typing_inspection",
)
"""What planning imports, none of it compiled."""
NOT_PACKED = ("train", "run", "measure")
"""Wings that no answer of the page imports."""
LARGEST, SECONDS = 64 * 2**20, 120.0
MEGABYTE = 1e6


def write_copy(folder: Path, first: Mapping[str, str], pyodide: Path | None) -> int:
    """Write the copy and return its size in bytes. first: the controls that it begins with; pyodide: a folder or an
    archive of Pyodide, by default downloaded. Raises InputError, and then nothing is written."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise _refused("--export", f"{folder} exists and is not empty", "name a new folder, or remove it")
    files: dict[str, bytes] = {f"pyodide/{name}": data for name, data in _runtime(pyodide).items()}
    wheel, data = _core_wheel(pyodide)
    files |= {wheel: data, "planner.zip": packed()}
    files |= {name: content(name).encode() for name in FILES}
    files["worker.js"] = content("worker.js").replace("{{wheel}}", wheel).encode()
    size = sum(map(len, files.values()))
    words = f"loading the planner, {size / MEGABYTE:.0f} MB, 15 s or more"
    files["index.html"] = page(first, loading=words).encode()
    made = temporary_path(folder.absolute())
    try:
        for name, data in files.items():
            path = made / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        if folder.is_dir():
            folder.rmdir()
        made.rename(folder)
    except OSError as error:
        remove(made)
        raise _refused("--export", f"{folder}: {error.strerror or error}", "name a folder that can be made") from None
    return size


def packed() -> bytes:
    """mpctl without its training half, its presets and PURE as a zip archive, the same bytes every time."""
    root, found = Path(mpctl.__file__).parent, dict[str, Path]()
    for path in root.rglob("*"):
        place = path.relative_to(root)
        if path.is_file() and place.parts[0] not in (*NOT_PACKED, "_presets") and "__pycache__" not in place.parts:
            found[f"mpctl/{place.as_posix()}"] = path
    presets = presets_root()
    found |= {f"mpctl/_presets/{p.relative_to(presets).as_posix()}": p for p in presets.rglob("*") if p.is_file()}
    for name in PURE:
        found |= dict(_installed(name))
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in sorted(found.items()):
            archive.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return stream.getvalue()


def _installed(name: str) -> Iterator[tuple[str, Path]]:
    """The files of an installed package, its licence among them."""
    for file in distribution(name).files or ():
        is_code = file.suffix != ".pyc" and ".." not in file.parts and file.name not in ("RECORD", "direct_url.json")
        if is_code:
            yield file.as_posix(), Path(str(file.locate()))


def _runtime(pyodide: Path | None) -> dict[str, bytes]:
    """The files of Pyodide by name."""
    if pyodide is not None and pyodide.is_dir():
        found = {name: (pyodide / name).read_bytes() for name in RUNTIME if (pyodide / name).is_file()}
    else:
        found = dict(_unpacked(_archive(pyodide)))
    if missing := [name for name in RUNTIME if name not in found]:
        hint = f"unpack {ARCHIVE}, or name the archive"
        raise _refused("--pyodide", f"{pyodide or ARCHIVE} has no {missing[0]}", hint)
    try:
        abi = str(json.loads(found["pyodide-lock.json"])["info"]["abi_version"])
    except (ValueError, LookupError, TypeError):
        abi = "unknown"
    if abi not in PLATFORM:
        raise _refused("--pyodide", f"has ABI {abi}, and the page is made for {PLATFORM}", f"use {ARCHIVE}")
    return found


def _archive(pyodide: Path | None) -> bytes:
    """The archive of npm, from the disk or by npm."""
    if pyodide is not None:
        try:
            return pyodide.read_bytes()
        except OSError as error:
            raise _refused("--pyodide", f"{pyodide}: {error.strerror}", "name a folder or npm's archive") from None
    hint = f"run `npm pack pyodide@{PYODIDE}` elsewhere and name its file: --pyodide FILE"
    with tempfile.TemporaryDirectory() as folder:
        line = ["npm", "pack", f"pyodide@{PYODIDE}", "--silent", "--ignore-scripts", "--pack-destination", folder]
        try:
            subprocess.run(line, capture_output=True, check=True, timeout=SECONDS)
            found = (Path(folder) / ARCHIVE).read_bytes()
        except (OSError, subprocess.SubprocessError) as error:
            raise _refused("--export", f"npm gave no {ARCHIVE}: {error}", hint) from None
    if hashlib.sha512(found).hexdigest() != SHA512:
        raise _refused("--export", f"npm's {ARCHIVE} is not the file that is expected (SHA-512)", hint)
    return found


def _unpacked(archive: bytes) -> Iterator[tuple[str, bytes]]:
    """The files of RUNTIME in npm's archive; nothing is written to the disk."""
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            for member in files:
                name = member.name.removeprefix("package/")
                if name in RUNTIME and member.size <= LARGEST and (stream := files.extractfile(member)):
                    yield name, stream.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise _refused("--pyodide", f"is no archive of npm: {error}", f"use {ARCHIVE}") from None


def _core_wheel(pyodide: Path | None) -> tuple[str, bytes]:
    """The compiled core of pydantic for the browser, of the installed version: its name and content."""
    version = distribution("pydantic_core").version
    name = f"pydantic_core-{version}-{ABI}-{ABI}-{PLATFORM}.whl"
    beside = pyodide if pyodide is None or pyodide.is_dir() else pyodide.parent
    if beside is not None and (beside / name).is_file():
        return name, (beside / name).read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        options = f"--quiet --no-deps --only-binary :all: --implementation cp --python-version {PYTHON} --abi {ABI}"
        line = [sys.executable, "-m", "pip", "download", *options.split(), "--platform", PLATFORM, "-d", folder]
        done = subprocess.run([*line, f"pydantic_core=={version}"], capture_output=True, text=True, check=False)
        path = Path(folder) / name
        if done.returncode or not path.is_file():
            said = done.stderr.strip().splitlines() or ["no such file"]
            hint = f"put {name} from PyPI into the folder of --pyodide"
            raise _refused("--export", f"pip found no {name}: {said[-1]}", hint)
        return name, path.read_bytes()


def _refused(where: str, message: str, hint: str) -> InputError:
    return InputError.of("not-exported", where, message, hint)
