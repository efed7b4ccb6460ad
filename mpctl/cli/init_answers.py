"""The answers that `mpctl init` works with: flags, what is typed in a terminal, defaults.

A text becomes a value in one way, whether it was a flag or an answer: `300B tokens` of 2,097,152 a
step is 143,052 steps. What cannot be read is an InputError with a way out; in a terminal it is said
and the question is asked again.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mpctl.errors import InputError
from mpctl.units import plural

if TYPE_CHECKING:
    from mpctl.spec.cluster import ClusterSpec

TOKENS = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
MOST = 2**31 - 1  # of what a job counts


@dataclass
class Answers:
    """What is known, from flags, answers typed or defaults.

    given: the flags' texts by the name of the question; rows: what was chosen, and whether that
    was given or a default.
    """

    given: dict[str, str | None]
    asks: bool
    rows: list[tuple[str, str]] = field(default_factory=list)

    def is_given(self, name: str) -> bool:
        """Whether a flag answers the question."""
        return self.given.get(name) is not None

    def take(self, name: str, default: str, about: str, read: Callable[[str], Any]) -> Any:
        """The value of a question. read: the value of a text, or InputError, after which the
        question is asked again. about: what is known, said before it is asked."""
        text = self.given.get(name)
        is_given = text is not None
        if text is not None:
            value = read(text)
        elif not self.asks:
            text, value = default, read(default)
        else:
            text, value = self._asked(name, default, about, read)
        self.rows.append((name, text if is_given or text != default else f"{text} (default)"))
        return value

    def _asked(
        self, name: str, default: str, about: str, read: Callable[[str], Any]
    ) -> tuple[str, Any]:
        from mpctl.render.console import say
        from mpctl.render.output import print_issues

        say(about, stderr=True)
        while True:
            print(f"{name} [{default}]: ", end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
            if not line:  # Ctrl-D
                raise InputError.of("no-answer", name, "the answers ended", "give flags instead")
            text = line.strip() or default
            try:
                return text, read(text)
            except InputError as error:
                print_issues(list(error.issues), wants_json=False)


def read_cluster(text: str) -> tuple[str, ClusterSpec]:
    """A cluster preset with a device, and its name."""
    from mpctl.spec.load import load_job

    cluster = load_job(None, {"cluster": text}).cluster
    if cluster.device is None:
        raise InputError.of("no-device", "cluster", f"{text} names no device",
                            "use another preset, or add device = ... to the file")  # fmt: skip
    return text, cluster


def size_text(cluster: ClusterSpec) -> str:
    """The machines in words: `32 nodes of 8 NVIDIA H100, 79.6 GiB each`."""
    from mpctl.units import bytes_text

    device = cluster.device
    of = f" {device.name}, {bytes_text(device.memory_bytes)} each" if device else " GPUs"
    return f"{plural(cluster.nodes, 'node')} of {cluster.gpus_per_node or 'any number of'}{of}"


def read_model(text: str, *, is_family: bool) -> str:
    """A model preset's name or file; a family stands for its small preset. Raises InputError."""
    from mpctl.spec.families import family_names
    from mpctl.spec.load import load_job
    from mpctl.spec.presets import find_preset, preset_names

    if is_family or (text in family_names() and text not in preset_names("models")):
        small = (name for name in preset_names("models") if name.startswith("demo-"))
        found = next(
            (n for n in small if (find_preset("models", n) or {}).get("family") == text), ""
        )
        if not found:
            hint = f"use {', '.join(family_names())}; or --model with a file of its shape"
            message = f"there is no small preset of a family {text!r}"
            raise InputError.of("unknown-family", "--family", message, hint)
        return found
    load_job(None, {"model": text})
    return text


def read_count(name: str) -> Callable[[str], int]:
    """Reads a whole number from 1; what it counts is `name`."""

    def read(text: str) -> int:
        if text.isascii() and text.isdigit() and 1 <= int(text[:12]) <= MOST and len(text) <= 12:
            return int(text)
        message = f"{text[:20]!r} is not a whole number from 1 to {MOST:,}"
        raise InputError.of("bad-value", name, message, "for example 8")

    return read


def read_length(text: str, per_step: int) -> int:
    """Steps of `1000`, `1000 steps` or `300B tokens`, which are rounded up to whole steps."""
    found = re.fullmatch(
        r"([0-9]{1,15}(?:\.[0-9]{1,9})?)([kMBT]?)(?: (steps|tokens))?", text, re.ASCII
    )
    amount = float(found[1]) * TOKENS[found[2]] if found else 0
    steps = -(-amount // per_step) if found and found[3] == "tokens" else amount
    if not 1 <= steps <= MOST or steps != int(steps):
        message = f"{text[:20]!r} is no number of steps or tokens"
        raise InputError.of(
            "bad-value", "length", message, "for example 1000 steps, or 300B tokens"
        )
    return int(steps)
