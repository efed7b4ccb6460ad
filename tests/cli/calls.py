"""Call mpctl in this process or in one of its own, and take what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from mpctl.cli.app import run

Mpctl = Callable[..., "Said"]


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """stdout, which must be one JSON document and nothing else."""
        return json.loads(self.out)

    @property
    def issues(self) -> dict[str, dict[str, str]]:
        """By rule, of an error document whose every issue has the keys of the contract."""
        assert self.document["schema"] == "mpctl.error/1"
        for issue in self.document["issues"]:
            assert set(issue) == {"rule", "where", "message", "hint"}
            assert issue["rule"]
            assert issue["message"]
        return {issue["rule"]: issue for issue in self.document["issues"]}


def caller(capsys: pytest.CaptureFixture[str]) -> Mpctl:
    def call(*arguments: object) -> Said:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    return call


def spawn(*arguments: object, **environment: str) -> Said:
    """`python -m mpctl ...` as a user starts it."""
    done = subprocess.run(
        [sys.executable, "-m", "mpctl", *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )
    return Said(done.returncode, done.stdout, done.stderr)


def assert_refused(said: Said, *, wants_json: bool) -> None:
    """Exit 2; issues on stderr and an empty stdout, or one error document on stdout."""
    assert said.code == 2
    assert "Traceback" not in said.err
    if wants_json:
        assert said.issues
    else:
        assert said.out == ""
        assert said.err.startswith("✗ ")
