"""The output and the pictures of README.md, made anew: `make readme`, or `python -m tests.readme`.

A block of README.md that begins with `$ mpctl ...` shows what the command prints, stdout and
stderr; `| head -N` behind it keeps the first N lines, `| tail -N` the last. A command with
`--svg NAME.svg` draws docs/NAME.svg. `--slow` also makes the blocks of commands that train.
tests/cli/test_readme.py compares what is there with what the commands print.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
SHOWN = re.compile(r"```\n\$ (mpctl [^\n]*)\n(.*?)```", re.S)
CUT = re.compile(r" \| (head|tail) -(\d+)$")
SVG = re.compile(r"^mpctl [^#\n]*--svg (\S+\.svg)", re.M)


def is_slow(command: str) -> bool:
    """Whether the command trains."""
    return command.startswith("mpctl launch") and "--dry-run" not in command


def shown(command: str) -> str:
    """What the command prints, as README.md shows it: without spaces at the ends of lines."""
    cut = CUT.search(command)
    with tempfile.TemporaryDirectory() as folder:
        lines = _run(CUT.sub("", command), folder).splitlines()
    if cut is not None:
        count = int(cut[2])
        lines = lines[:count] if cut[1] == "head" else lines[-count:]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def pictures(text: str) -> dict[str, str]:
    """The command of each picture that README.md has a line for, by its path."""
    return {f"docs/{match[1]}": match[0] for match in SVG.finditer(text)}


def drawn(command: str, path: str) -> str:
    """The picture that the command draws."""
    with tempfile.TemporaryDirectory() as folder:
        _run(command, folder)
        return (Path(folder) / Path(path).name).read_text("utf-8")


def _run(command: str, folder: str) -> str:
    """stdout and stderr of a command in a folder, as wide as where there is no terminal."""
    kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "MPCTL_PRESETS")}
    done = subprocess.run(
        [sys.executable, "-m", "mpctl", *shlex.split(command)[1:]],
        cwd=folder, env={**kept, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, encoding="utf-8", check=False,
    )  # fmt: skip
    return done.stdout


def main(*, slow: bool) -> None:
    """Write the blocks and the pictures."""
    text = README.read_text("utf-8")

    def block(match: re.Match[str]) -> str:
        if is_slow(match[1]) and not slow:
            return match[0]
        return f"```\n$ {match[1]}\n{shown(match[1])}```"

    README.write_text(SHOWN.sub(block, text), "utf-8")
    for path, command in pictures(text).items():
        (ROOT / path).write_text(drawn(command, path), "utf-8")
        print(f"wrote {path}")
    print("wrote README.md")


if __name__ == "__main__":
    main(slow="--slow" in sys.argv)
