"""Every example in a docstring of mpctl prints what it shows."""

from __future__ import annotations

from doctest import DocTestFinder, DocTestRunner
from importlib import import_module
from pathlib import Path

import pytest

import mpctl

ROOT = Path(mpctl.__file__).parent
MODULES = sorted(
    "mpctl." + ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
    if ">>>" in path.read_text("utf-8")
)


def test_the_examples_in_docstrings_print_what_they_show(capsys: pytest.CaptureFixture[str]) -> None:
    """In one process, torch's modules too; of each module all examples, whatever fails."""
    runner = DocTestRunner()
    for name in MODULES:
        module = import_module(name)
        for test in DocTestFinder(exclude_empty=True).find(module, name):
            runner.run(test)
    assert runner.failures == 0, capsys.readouterr().out
    assert runner.tries > 100
