"""One JSON document on stdout, and nothing else there."""

from __future__ import annotations

import json
import sys
from typing import Any


def print_json(document: Any) -> None:
    """Print a document as JSON on stdout, on one line."""
    json.dump(document, sys.stdout)
    print()
