"""Presets: TOML tables of devices, clusters, models, jobs and runtimes, found by name.

A value that has a slash or ends with `.toml` is a file's path (paths.py). Any other is a name,
which is looked up in the folders that the environment variable MPCTL_PRESETS names (separated by
`:` as in PATH), in `./presets`, in `$XDG_CONFIG_HOME/mpctl/presets` (by default
`~/.config/mpctl/presets`), and among the bundled presets, in `presets/` of a checkout or inside the
wheel. Each folder holds a subfolder for each kind; the first that has the name wins: with
`clusters/selene.toml` in `./presets`, `--cluster selene` is that file. A model is also found by its
id on Hugging Face's hub, in any case, which its preset names: `--model Qwen/Qwen2.5-7B`.

A user's preset is untrusted input, wherever its folder is: it is read if it is a regular file of at
most LARGEST_FILE bytes, links followed. Its keys are checked when it is used, and errors in it are
reported with its path (InputError). Paths in it are relative to it:
`device = "ours.toml"` in clusters/x.toml is clusters/ours.toml. Tests check the bundled ones.
"""

from __future__ import annotations

import os
import stat
import tomllib
from contextlib import suppress
from filecmp import cmp
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from mpctl.core.errors import InputError, Issue
from mpctl.spec.paths import anchored, is_config, is_hub_id, is_path

if TYPE_CHECKING:
    from pydantic import ValidationError

    from mpctl.spec.base import StrictModel

Kind = Literal["devices", "clusters", "models", "jobs", "runtimes"]
PresetReader = Literal["variable", "directory", "user"]
"""Who finds presets in a folder by name: commands under MPCTL_PRESETS, in this directory, or of this user."""
KINDS: tuple[Kind, ...] = get_args(Kind)
HUB_IDS = "hub_ids"  # a key that only models' presets have
LARGEST_FILE = 2**20  # bytes; a preset has some two thousand
# The tables of a job (by their path in it) that may start from a preset; () is the job itself.
PRESET_TABLES: dict[tuple[str, ...], Kind] = {
    (): "jobs",
    ("cluster",): "clusters",
    ("cluster", "device"): "devices",
    ("model",): "models",
}
VARIABLE = "MPCTL_PRESETS"
HERE = Path("presets")  # in the working directory
MOST_NAMES = 50  # that an error lists
LONGEST_VALUE = 60  # letters of a value in an error


class PresetFile(NamedTuple):
    """A preset's file. hides: a bundled preset, or one in a later folder, has the same name."""

    kind: Kind
    name: str
    path: Path
    is_bundled: bool = True
    hides: bool = False

    def read(self) -> dict[str, Any]:
        """The file's table, relative paths in it joined to its folder; InputError names the file
        where it cannot be read."""
        return _anchored(self.table(), self)

    def table(self) -> dict[str, Any]:
        """The file's table, unchanged; InputError names the file where it cannot be read."""
        try:
            return tomllib.loads(self.content().decode("utf-8"))
        except (ValueError, RecursionError) as error:  # bad TOML and bad UTF-8 alike
            raise self._refused(f"is not TOML: {error}") from None

    def hub_ids(self) -> list[str]:
        """The ids on Hugging Face's hub of the models that a preset of a model stands for;
        InputError names the file where it cannot be read."""
        ids = self.table().get(HUB_IDS, [])
        if not isinstance(ids, list) or not all(isinstance(name, str) for name in ids):
            raise self._refused(f"{HUB_IDS}: it must be a list of texts")
        return ids

    def content(self) -> bytes:
        """The file's own bytes; InputError names the file where it cannot be read."""
        try:
            found = self.path.stat()
            if not stat.S_ISREG(found.st_mode):  # a pipe would wait, /dev/zero never end
                raise self._refused("is not a regular file")
            with self.path.open("rb") as file:
                content = file.read(LARGEST_FILE + 1)
        except OSError as error:
            raise self._refused(error.strerror or str(error)) from None
        if len(content) > LARGEST_FILE:
            raise self._refused(f"more than {LARGEST_FILE:,} bytes, which no preset has")
        return content

    def _refused(self, message: str) -> InputError:
        hint = "" if self.is_bundled else "mend the file, or use another preset"
        return InputError.of("bad-preset", str(self.path), message, hint)


def _anchored(table: dict[str, Any], file: PresetFile) -> dict[str, Any]:
    """A user's preset may name files next to it; bundled ones name no files."""
    if file.is_bundled or file.kind == "runtimes":
        return table
    keys = next(keys for keys, kind in PRESET_TABLES.items() if kind == file.kind)
    raw = table
    for key in reversed(keys):
        raw = {key: raw}
    raw = anchored(raw, file.path.parent)
    for key in keys:
        raw = raw[key]
    return raw


@cache
def presets_root() -> Path:
    """The folder of the bundled presets."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "_presets"
    return installed if installed.is_dir() else package.parent / "presets"


def own_folders(searched: tuple[str, ...] | None = None) -> tuple[Path, ...]:
    """The folders of the user's presets, in the order of search, whether they exist or not;
    InputError where MPCTL_PRESETS names a path that is not a folder. searched: `search_path()`, if
    known."""
    return _own_folders(searched or search_path())


@cache
def _own_folders(search_path: tuple[str, ...]) -> tuple[Path, ...]:
    """Computed once for each search path."""
    named = [Path(text) for text in os.environ.get(VARIABLE, "").split(os.pathsep) if text]
    for folder in named:
        if not folder.is_dir():
            hint = f"name folders that hold {', '.join(KINDS)}; several with {os.pathsep!r} between"
            raise InputError.of("no-such-folder", VARIABLE, f"{folder} is not a folder", hint)
    config = user_folder("XDG_CONFIG_HOME", ".config")
    folders = [*named, HERE, *([config / "mpctl" / "presets"] if config else [])]
    found: dict[Path, Path] = {}
    for folder in folders:  # one folder may be named twice, and a checkout's ./presets is bundled
        found.setdefault(folder.resolve(), folder)
    found.pop(presets_root().resolve(), None)
    return tuple(found.values())


def preset_reader(folder: Path) -> PresetReader | None:
    """Which later commands find presets in this folder by name; None where it is in no search path."""
    wanted = folder.resolve()
    named = [Path(text).resolve() for text in os.environ.get(VARIABLE, "").split(os.pathsep) if text]
    if wanted in named:
        return "variable"
    found = next((known for known in own_folders() if known.resolve() == wanted), None)
    return None if found is None else "directory" if found == HERE else "user"


def require_not_bundled(folder: Path) -> None:
    """Raises InputError for the folder of the bundled presets, which ./presets is in a checkout of mpctl."""
    if folder.resolve() == presets_root().resolve():
        message = "the bundled presets lie there, and fitted copies would replace them"
        raise InputError.of("bundled-presets", str(folder), message, "name another folder, such as fitted")


def user_folder(variable: str, at_home: str) -> Path | None:
    """A folder of the user's, such as of settings, by the XDG base directory specification, which
    ignores relative paths in the variable; None for a user without a home folder."""
    named = Path(os.environ.get(variable, ""))
    if named.is_absolute():
        return named
    try:
        return Path.home() / at_home
    except RuntimeError:
        return None


def search_path() -> tuple[str, ...]:
    """Everything that decides which file a name or a path finds, as long as no file is changed."""
    variables = (VARIABLE, "XDG_CONFIG_HOME", "HOME")
    return (str(Path.cwd()), *(os.environ.get(name, "") for name in variables))


def preset_files(kind: Kind, only: str | None = None) -> dict[str, PresetFile]:
    """The presets of a kind by name, sorted; of equal names the one that is used. A copy with the
    same bytes does not count as hiding another: a clone's ./presets has the bundled presets.

    only: the one name to look for.
    """
    files: dict[str, PresetFile] = {}
    for folder in (*own_folders(), presets_root()):
        is_bundled = folder == presets_root()
        for path in (folder / kind).glob("*.toml"):
            if only is not None and path.stem != only:
                continue
            first = files.get(path.stem)
            if first and not cmp(first.path, path, shallow=False):
                files[path.stem] = first._replace(hides=True)
            elif path.is_file() and not (first and first.hides):
                files[path.stem] = PresetFile(kind, path.stem, path, is_bundled)
    return dict(sorted(files.items()))


def preset_names(kind: Kind) -> list[str]:
    """The names of a kind's presets, sorted."""
    return list(preset_files(kind))


@cache
def bundled_names(kind: Kind) -> frozenset[str]:
    """The names of a kind's bundled presets, which are read once: they do not change."""
    return frozenset(path.stem for path in (presets_root() / kind).glob("*.toml"))


def find_file(kind: Kind, name: str) -> PresetFile | None:
    """The preset's file by its name or path, or None. A name is only compared with the names of
    files in the folders; no path is built from it."""
    if not is_path(name):
        return preset_files(kind, only=name).get(name)
    if kind == "models" and is_hub_id(name):
        return _find_by_id(name)
    path = Path(name)
    try:
        return PresetFile(kind, path.stem, path, is_bundled=False) if path.exists() else None
    except (OSError, ValueError):  # too long, a null character, a folder that may not be entered
        return None


def _find_by_id(name: str) -> PresetFile | None:
    """The preset of a model that has this id. Files are searched before they are parsed."""
    wanted = name.lower()
    for file in preset_files("models").values():
        with suppress(InputError):  # a user's file; reported when it is used
            has_it = wanted.encode() in file.content().lower()
            if has_it and wanted in map(str.lower, file.hub_ids()):
                return file
    return None


def hub_ids() -> dict[str, str]:
    """The ids on Hugging Face's hub that have a preset, with its name; those of files that cannot
    be read are left out."""
    found: dict[str, str] = {}
    for file in preset_files("models").values():
        with suppress(InputError):
            found |= dict.fromkeys(file.hub_ids(), file.name)
    return dict(sorted(found.items()))


def find_preset(kind: Kind, name: str) -> dict[str, Any] | None:
    """The preset's table, or None where no preset has that name; InputError names its file where it
    cannot be read."""
    file = find_file(kind, name)
    return None if file is None else file.read()


def get_file(kind: Kind, name: str, *, where: str) -> PresetFile:
    """The preset's file by its name or path; raises InputError at the setting `where`, with the
    nearest names and the folders that were searched, when there is none."""
    file = find_file(kind, name)
    if file is not None:
        return file
    if kind == "models" and is_hub_id(name):
        raise _unknown_id(name, where)
    if is_path(name):
        message = f"there is no file {name!r}"
        hint = f"mend the path; names have no / and no .toml: {nearest_presets(kind, name)}"
    else:
        message = f"no {kind[:-1]} preset is called {name!r}"
        hint = f"use {nearest_presets(kind, name)}; {places_text(kind)}; `mpctl presets` lists all"
        if kind == "models" and is_config(f"./{name}"):
            hint = f"for the config.json in the folder of that name write ./{name}"
        elif find_file(kind, f"./{name}.toml"):
            hint = f"for the file of that name write ./{name}.toml; else {hint}"
    raise InputError.of("unknown-preset", where, message, hint)


def _unknown_id(name: str, where: str) -> InputError:
    """The error for a name that has the form of a hub id or of a path, with both ways out."""
    owner = f"{name.partition('/')[0].lower()}/"
    ids = list(hub_ids())
    near = nearest_names(name, ids) or [known for known in ids if known.lower().startswith(owner)]
    known = f"known: {', '.join(near)}; " if near else ""
    message = f"{name!r} is no file, and no preset has this id of Hugging Face's hub"
    fetch = f"`mpctl fit {name} --fetch`, `mpctl plan --model {name} --fetch`, or `hf download {name} config.json`"
    hint = f"{known}to fetch its config.json: {fetch}"
    return InputError.of("unknown-preset", where, message, hint)


def nearest_presets(kind: Kind, name: str) -> str:
    """The names of a kind that are nearest to `name`; if none is near and they are few, all."""
    names = preset_names(kind)
    near = nearest_names(Path(name).name.removesuffix(".toml"), names) or names
    return ", ".join(near) if len(near) <= MOST_NAMES else f"a name of `mpctl presets {kind}`"


def nearest_names(name: str, names: list[str]) -> list[str]:
    """Up to four of these names: those that begin with `name`, then those spelt most like it, in
    any case."""
    import difflib  # only where something is wrong

    name, lower = name.lower(), {known.lower(): known for known in names}
    longer = [known for known in lower if name and known.startswith(name)]
    near = dict.fromkeys(longer + difflib.get_close_matches(name, lower, n=4))
    return [lower[known] for known in near][:4]


def places_text(kind: Kind) -> str:
    """`looked in presets/models, /home/me/.config/mpctl/presets/models and the bundled ones`."""
    return f"looked in {', '.join(str(f / kind) for f in own_folders())} and the bundled ones"


def name_or_path(kind: Kind) -> list[dict[str, Any]]:
    """The JSON schema, as alternatives, of a value that names a preset."""
    return [{"enum": preset_names(kind)}, {"pattern": r"/|\.(toml|json)$"}]


def lasting_name(kind: Kind, name: str) -> str:
    """A name of the preset that is valid in any directory: that of a bundled one, else the absolute
    path of its file."""
    file = find_file(kind, name)
    return name if file is None or file.is_bundled else str(file.path.resolve())


def preset_issues(error: ValidationError, file: PresetFile, model: type[StrictModel]) -> list[Issue]:
    """An issue for each key of a preset that `model` refuses, at the file's path."""
    return [_issue(dict(d), file, model) for d in error.errors(include_url=False)]


def _issue(detail: dict[str, Any], file: PresetFile, model: type[StrictModel]) -> Issue:
    from mpctl.spec.base import TEXT_ERROR, fields_at

    path = [str(part) for part in detail["loc"]]
    where, name = str(file.path), ".".join(path)
    if detail["type"] == "missing":
        return Issue("bad-preset", where, f"{name} is required and is not there", f"add {name}")
    if detail["type"] == "extra_forbidden":
        hint = f"keys there: {', '.join(fields_at(model, path[:-1]))}"
        return Issue("bad-preset", where, f"{name}: there is no such key", hint)
    message = detail["msg"][0].lower() + detail["msg"][1:]
    if detail["type"] == TEXT_ERROR:
        message = f"{str(detail['input'])[:LONGEST_VALUE]!r}: {message}"
    hint = detail.get("ctx", {}).get("hint") or f"mend {name} in the file"
    return Issue("bad-preset", where, f"{name}: {message}", hint)


def require_valid(file: PresetFile, table: dict[str, Any], model: type[StrictModel]) -> None:
    """Raises InputError where a preset's expanded table holds a key or a value that no job may.

    Missing keys are allowed, since the job may add them.
    """
    from pydantic import ValidationError

    try:
        model.model_validate(table)
    except ValidationError as error:
        issues = [
            _issue(dict(detail), file, model)
            for detail in error.errors(include_url=False)
            if detail["type"] != "missing"
        ]
        if issues:
            raise InputError(issues) from None
