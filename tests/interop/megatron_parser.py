"""Megatron-LM's own parser, called in the interpreter that has it.

megatron-core's wheel holds megatron/training/arguments.py, for Python 3.12. MPCTL_MEGATRON_PYTHON
names the interpreter of an environment with it; without the variable this one is asked. Tests that
need it are skipped where there is none. To make one, without a GPU:

    python3.12 -m venv megatron
    megatron/bin/pip install torch==2.13.0 numpy packaging
    megatron/bin/pip install --no-deps megatron-core==0.19.2
    export MPCTL_MEGATRON_PYTHON=$PWD/megatron/bin/python
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mpctl.interop.emitted import emit_plan
from mpctl.plan.planning.plan import Plan

VARIABLE = "MPCTL_MEGATRON_PYTHON"
PROGRAM = Path(__file__).with_name("megatron_namespaces.py")


class Line(NamedTuple):
    """A command line: the words behind pretrain_gpt.py, how many ranks run it, and whether the
    model's configuration is made as well."""

    words: Sequence[str]
    world: int
    environment: dict[str, str]
    config: bool = False


class Parsed(NamedTuple):
    """What the parser makes of lines. names: of each flag its field of a namespace; answers: a
    {"namespace": ..., "config": ...} or {"error": ...} for each line."""

    names: dict[str, str]
    has_transformer_engine: bool
    answers: list[dict[str, Any]]


def parse_lines(lines: Sequence[Line]) -> Parsed:
    """The namespaces of lines; skips the test where no interpreter has the parser."""
    python = os.environ.get(VARIABLE)
    if python is None and not _is_here():
        pytest.skip(f"megatron-core's training arguments are not here, and {VARIABLE} is not set")
    request = json.dumps({"lines": [line._asdict() for line in lines]})
    done = subprocess.run(
        [python or sys.executable, PROGRAM], input=request, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return Parsed(**json.loads(done.stdout))


def words_of(plan: Plan) -> list[str]:
    """The flags that a plan is written as, as the program gets them."""
    text = emit_plan(plan, "megatron").text.replace("\\\n", " ")
    words = shlex.split(text, comments=True)
    return words[words.index("pretrain_gpt.py") + 1 :]


def _is_here() -> bool:
    try:
        return find_spec("megatron.training.arguments") is not None
    except ImportError:
        return False
