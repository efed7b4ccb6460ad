"""Wheel and source distribution, built and installed as a user does, without a download."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from mpctl import __version__

ROOT = Path(__file__).parents[1]
WHEEL = f"mpctl-{__version__}-py3-none-any.whl"
SOURCE = f"mpctl-{__version__}"


def run(*command: str | Path, cwd: Path) -> str:
    """The output of a command, which sees no variable that leads to this checkout."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([*command], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    with tarfile.open(folder / f"{SOURCE}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    build = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder)
    run(*build, cwd=folder / SOURCE)
    return folder


@pytest.mark.slow
def test_both_have_the_licence_the_types_and_the_presets(built: Path) -> None:
    licence = (ROOT / "LICENSE").read_bytes()
    assert (built / SOURCE / "LICENSE").read_bytes() == licence
    with zipfile.ZipFile(built / WHEEL) as wheel:
        info = f"mpctl-{__version__}.dist-info"
        assert wheel.read(f"{info}/licenses/LICENSE") == licence
        assert "License-Expression: Apache-2.0" in wheel.read(f"{info}/METADATA").decode()
        names = {*wheel.namelist()}
    presets = {path.relative_to(ROOT / "presets") for path in ROOT.glob("presets/**/*.toml")}
    assert len(presets) > 100
    assert {f"mpctl/_presets/{path.as_posix()}" for path in presets} <= names
    assert {"mpctl/py.typed", "mpctl/__init__.pyi"} <= names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]


@pytest.mark.slow
def test_the_wheel_plans_in_an_empty_environment(built: Path, tmp_path: Path) -> None:
    """Its dependencies are those of this environment, by their folder; mpctl is not."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    install = ("install", "--quiet", "--no-index", "--no-deps", built / WHEEL)
    run(sys.executable, "-m", "pip", "--python", python, *install, cwd=tmp_path)
    show = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = Path(run(python, "-c", show, cwd=tmp_path).strip())
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = run(python, "-c", "import mpctl; print(mpctl.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(own)
    plan = run(python.parent / "mpctl", "plan", "two-nodes-16-gpus", cwd=tmp_path)
    assert plan.startswith("gpt2-medium: tp 2 x dp 2 x pp 4\n")
