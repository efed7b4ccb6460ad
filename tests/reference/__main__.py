"""Writes docs/reference.md."""

from __future__ import annotations

from tests.reference.text import PATH, reference_text

PATH.write_text(reference_text(), "utf-8")
print(f"wrote {PATH}")
