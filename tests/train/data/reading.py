"""Files and texts of a corpus as plain lists."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mpctl.train.data.corpus import find_files
from mpctl.train.data.texts import Findings, Reading, read_texts


def find_paths(sources: Any, **settings: Any) -> list[Path]:
    return [file.path for file in find_files(sources, **settings)]


def read_all(paths: Iterable[Path], findings: Findings | None = None, **reading: Any) -> list[str]:
    """Every text that is not blank."""
    findings = findings or Findings()
    texts = ("".join(chunks) for path in paths for chunks in read_texts(path, Reading(**reading), findings))
    return [text for text in texts if text.strip()]
