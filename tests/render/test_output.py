"""Streams of any encoding: marks become plain letters where an encoding lacks them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mpctl
from mpctl.render.output import PLAIN


def spoken(encoding: str, columns: int, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a process that writes in this encoding."""
    done = subprocess.run(
        [sys.executable, "-m", "mpctl", *arguments],
        capture_output=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": str(columns)},
    )
    return done.returncode, done.stdout.decode(encoding), done.stderr.decode(encoding)


@pytest.mark.parametrize(("encoding", "columns"), [("ascii", 40), pytest.param("latin-1", 60, marks=pytest.mark.slow)])
def test_marks_become_letters_where_an_encoding_lacks_them(encoding: str, columns: int) -> None:
    code, out, err = spoken(encoding, columns, "plan", "demo", "--tp", "3")
    assert (code, out) == (2, "")
    assert "x parallel.tp: 3 does not divide 8 attention heads " in err
    assert "\n  -> use " in err and "?" not in err
    code, out, err = spoken(encoding, columns, "plan", "two-nodes-16-gpus", "--full")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[1].startswith("ok fits: 4.5 of 80.0 GiB")
    assert "8 Phi" in out and "?" not in out


def test_signs_of_every_output_have_letters() -> None:
    """All that stands in mpctl's own words and is not ASCII can be written as ASCII."""
    root = Path(mpctl.__file__).parent
    signs = {s for path in root.rglob("*.py") for s in path.read_text("utf-8") if ord(s) > 127}
    assert {sign for sign in signs if not sign.isalpha()} - PLAIN.keys() == set()
