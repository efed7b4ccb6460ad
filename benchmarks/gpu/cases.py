"""The cases on one device, most important first: the first that does not fit the budget, and all
after it, are reported as left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """A row of the table. name: its difference from the others; shape: the model's name; peer:
    PeerRun's settings, or settings: those of the job, one of them None. saves: whether a checkpoint
    is written during the run."""

    name: str
    shape: str
    peer: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] | None = None
    saves: bool = False

    @property
    def who(self) -> str:
        """`mpctl` or `torch`."""
        return "torch" if self.settings is None else "mpctl"


def ours(name: str, shape: str, *, saves: bool = False, **settings: Any) -> Case:
    """A case of mpctl; `training__dropout=0.1` is training.dropout."""
    dotted = {key.replace("__", "."): value for key, value in settings.items()}
    return Case(name, shape, settings=dotted, saves=saves)


def peer(name: str, shape: str, **settings: Any) -> Case:
    """A case of plain torch."""
    return Case(name, shape, peer=settings)


GPT, LLAMA, EIGHT, SLICE = "gpt-1.5b", "llama-1b", "llama-8b", "llama-8b-tp8"
DROPOUT = {"training__dropout": 0.1, "training__attention_dropout": 0.1}
EAGER = {"launch__compile": False}

CASES = (
    ours("compiled", GPT),
    peer("bf16 with float32 masters, compiled", GPT, precision="masters"),
    ours("dropout 0.1", GPT, **DROPOUT),
    ours("layer by layer", GPT, **EAGER),
    peer("autocast, compiled", GPT, precision="autocast"),
    ours("saved by a thread", GPT, saves=True),
    ours("saved between two steps", GPT, saves=True, checkpoint__asynchronous=False),
    ours("compiled", LLAMA),
    peer("bf16 with float32 masters, compiled", LLAMA, precision="masters"),
    ours("fp8", GPT, training__dtype="fp8"),
    peer("dropout 0.1", GPT, precision="masters", dropout=0.1),
    ours("compiled", EIGHT),
    peer("bf16 with float32 masters, compiled", EIGHT, precision="masters"),
    ours("fp8", EIGHT, training__dtype="fp8"),
    ours("compiled", SLICE),
    peer("bf16 with float32 masters, compiled", SLICE, precision="masters"),
    ours("recompute full", GPT, training__recompute="full"),
    peer("recompute full", GPT, precision="masters", recompute=True),
    ours("recompute selective, dropout 0.1", GPT, training__recompute="selective", **DROPOUT),
    ours("recompute full, offloaded", GPT, training__recompute="full",
         training__offload_activations=True),
    ours("dropout 0.1", SLICE, **DROPOUT),
    ours("layer by layer", LLAMA, **EAGER),
)  # fmt: skip


@dataclass
class Outcome:
    """The outcome of a case: figures (seconds of a step, bytes, reserved; save and stall: seconds
    of a checkpoint, and that training waited for it), or why there are none."""

    case: Case
    figures: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
