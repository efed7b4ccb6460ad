"""Results that are too long for one answer: the first page with a name, by which the others are read."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

from mpctl.core.errors import InputError

PAGE = 40_000  # characters: some 10,000 tokens, where clients refuse results above 25,000
KEPT = 32  # results


class Pages:
    """The last long results."""

    def __init__(self) -> None:
        self._texts: OrderedDict[str, str] = OrderedDict()
        self._count = 0

    def short(self, result: dict[str, Any]) -> dict[str, Any]:
        """The result, or where its document is longer than a page its first page in place of it."""
        text = json.dumps(result["document"])
        if len(text) <= PAGE:
            return result
        self._count += 1
        name = f"result-{self._count}"
        self._texts[name] = text
        if len(self._texts) > KEPT:
            self._texts.popitem(last=False)
        rest = {key: value for key, value in result.items() if key != "document"}
        return {**rest, "keys": [*result["document"]], **self.page(name, 1)}

    def page(self, name: str, number: int) -> dict[str, Any]:
        """A page of a result's JSON text, counted from 1. Raises InputError for one that there is not."""
        text = self._texts.get(name)
        if text is None:
            known = f"this server keeps {', '.join(self._texts)}" if self._texts else "this server has none yet"
            raise InputError.of("no-result", name, f"no such result: {known}", "call the tool again")
        count = -(-len(text) // PAGE)
        if not 1 <= number <= count:
            raise InputError.of("no-page", "page", f"{number} is not within 1 and {count}", f"use one of 1 to {count}")
        at = (number - 1) * PAGE
        return {"result": name, "page": number, "pages": count, "text": text[at : at + PAGE]}
