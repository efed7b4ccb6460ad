"""Tests under other versions of Python and torch: `make test-matrix`, and --quick in .ci/run.

    python -m tests.matrix [--quick]

Each combination has a virtual environment in $XDG_CACHE_HOME/mpctl/matrix (~/.cache by default),
which clones share: about 5 GB, as torch of PyPI brings CUDA. It holds what mpctl needs, not mpctl,
which the tests import from this clone. It is brought up to date when pyproject.toml or
constraints.txt have changed.

A combination without its Python is named and left out. With --quick so is one that cannot be
installed, as without a network. Exit code 1 if a test failed or, without --quick, if an environment
could not be made or no combination ran.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
INSTALL_SECONDS = 1500  # of pip, before a network counts as absent


@dataclass(frozen=True)
class Combination:
    """A minor version of Python, and versions of packages instead of those in constraints.txt."""

    python: str
    pins: Mapping[str, str]

    @property
    def name(self) -> str:
        """By hand: Python 3.12 with torch 2.11.0."""
        return f"Python {self.python} with torch {self.pins['torch']}"


COMBINATIONS = (
    # numpy: Triton 3.6, which torch 2.11 requires, cannot interpret kernels with numpy 2.4.
    Combination("3.12", {"torch": "2.11.0", "numpy": "2.3.5"}),
    Combination("3.13", {"torch": "2.15.0"}),
)
TESTED = {
    "3.11": re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text("utf-8"), re.M)[0],
    **{one.python: one.pins["torch"] for one in COMBINATIONS},
}
"""torch's versions that are tested, by Python's: the first by `make test`."""
BOUND_TO_TORCH = frozenset({"torch", "triton", "torchao"})  # which pip chooses by torch
DEV = frozenset({"pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "transformers"})
"""What these tests need of the extra `dev`."""

ROOMS = ("train/runtime", "train/layers", "train/kernels", "train/rehearsal", "gpu")
WHOLE = ("tests/test_versions.py", *(f"tests/{room}" for room in ROOMS))
QUICK = (
    "tests/test_versions.py",
    "tests/train/layers/test_fp8.py",
    "tests/train/layers/test_experts_fp8.py",
    "tests/train/runtime/test_fp8.py::test_replicas_and_micro_batches_learn_the_same_scales",
    "tests/train/runtime/test_fp8.py::test_a_linear_layer_that_casts_nothing_is_refused",
    "tests/train/runtime/test_fp8.py::test_the_loss_does_not_depend_on_the_layout",
    "tests/train/rehearsal/test_audit.py::test_fp8_casts_both_operands_in_a_kernel_each_and_leaves_the_head_alone",
    "tests/train/kernels/triton/test_frames.py",
    "tests/train/kernels/triton/test_compile.py::test_attention_whose_dropout_has_a_number_is_compiled",
)
"""fp8, trainings on two ranks, a rehearsal of a GPU, Triton's interpreter and its compiler: two minutes."""


def main() -> None:
    """Run the tests of every combination, and end with the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the part that CI runs")
    is_quick = parser.parse_args().quick
    results = {one.name: run(one, QUICK if is_quick else WHOLE) for one in COMBINATIONS}
    for name, result in results.items():
        print(f"{name}: {result}", flush=True)
    accepted = ("passed", "not run") if is_quick else ("passed", "not run: no ")
    is_fine = all(result.startswith(accepted) for result in results.values())
    has_run = any(not result.startswith("not run") for result in results.values())
    sys.exit(not (is_fine and (has_run or is_quick)))


def run(combination: Combination, tests: tuple[str, ...]) -> str:
    """`passed in 93 s`, `failed (1) ..`, or `not run: ` and the reason."""
    python = find_python(combination.python)
    if python is None:
        return f"not run: no python{combination.python} on PATH or under pyenv's versions"
    folder = cache() / f"python-{combination.python}-torch-{combination.pins['torch']}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one clone at a time installs or tests
        started = time.monotonic()
        try:
            is_new = make_environment(folder, python, combination)
        except (OSError, subprocess.SubprocessError) as error:
            return f"not run: its packages could not be installed: {last_line(error)}"
        if is_new:
            took = time.monotonic() - started
            print(f"{combination.name}: installed in {took:.0f} s into {folder}", flush=True)
        started = time.monotonic()
        code = run_tests(folder, tests)
    seconds = f"in {time.monotonic() - started:.0f} s"
    return f"passed {seconds}" if code == 0 else f"failed {seconds} (exit code {code})"


def run_tests(folder: Path, tests: tuple[str, ...]) -> int:
    """The exit code of pytest under the environment in this folder."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env.pop("VIRTUAL_ENV", None)
    command = [
        str(folder / "bin" / "python"),
        "-m",
        "pytest",
        "-n",
        "3",
        "--dist",
        "loadfile",
        "-m",
        "not slow and not cluster",
        *tests,
    ]
    return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode


def cache() -> Path:
    """Where the environments are."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "mpctl" / "matrix"


def find_python(version: str) -> Path | None:
    """An interpreter of this minor version that starts; None if there is none."""
    on_path = shutil.which(f"python{version}")
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = sorted((pyenv / "versions").glob(f"{version}.*/bin/python"), key=_release, reverse=True)
    return next(filter(_starts, [*([Path(on_path)] if on_path else []), *found]), None)


def _release(python: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", python.parent.parent.name)]


def _starts(python: Path) -> bool:
    """Whether it can make environments; pyenv's stand-ins for other versions cannot."""
    try:
        return (
            subprocess.run([python, "-c", "import venv, ensurepip"], capture_output=True, check=False).returncode == 0
        )
    except OSError:
        return False


def make_environment(folder: Path, python: Path, combination: Combination) -> bool:
    """Make the environment, or bring it up to date; False if it is up to date. Raises
    SubprocessError if pip fails or takes too long."""
    needed, pinned = requirements(), constraints(combination)
    wanted = hashlib.sha256("\n".join([str(python.resolve()), *needed, *pinned]).encode())
    made = folder / ".made"
    if made.exists() and made.read_text() == wanted.hexdigest():
        return False
    made.unlink(missing_ok=True)
    constraint = folder / "constraints.txt"
    constraint.write_text("\n".join(pinned) + "\n")
    print(f"{combination.name}: installing (5 GB the first time)", flush=True)
    subprocess.run([python, "-m", "venv", folder], check=True, capture_output=True, text=True)
    # In place of constraints that the machine has for its own pip.
    env = {**os.environ, "PIP_CONSTRAINT": str(constraint)}
    subprocess.run(
        [
            folder / "bin" / "python",
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-compile",
            "--no-cache-dir",
            "--disable-pip-version-check",
            *needed,
        ],
        env=env,
        check=True,
        capture_output=True,
        text=True,
        timeout=INSTALL_SECONDS,
    )
    made.write_text(wanted.hexdigest())
    return True


def requirements() -> list[str]:
    """What mpctl and these tests need, as pyproject.toml says it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extra = [one for one in project["optional-dependencies"]["dev"] if package(one) in DEV]
    return [*project["dependencies"], *extra]


def constraints(combination: Combination) -> list[str]:
    """The lines of constraints.txt with this combination's versions."""
    return [*_others(combination), *(f"{name}=={v}" for name, v in combination.pins.items())]


def _others(combination: Combination) -> Iterator[str]:
    for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines():
        if not line.startswith("#") and package(line) not in BOUND_TO_TORCH | set(combination.pins):
            yield line


def package(requirement: str) -> str:
    """By hand: of `triton>=3.5; sys_platform == 'linux'`, triton."""
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()


def last_line(error: Exception) -> str:
    """The last line that a command wrote to stderr, or the error itself."""
    text = getattr(error, "stderr", None) or ""
    lines = (text if isinstance(text, str) else text.decode(errors="replace")).split("\n")
    return next((line for line in reversed(lines) if line.strip()), str(error))


if __name__ == "__main__":
    main()
