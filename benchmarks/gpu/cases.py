"""The cases on one device, and which of them fit a budget.

A case has a kind: what it puts at risk. One case of each kind comes before the second of any, so
that a short visit to a device shows of everything whether it works, and a longer one how fast
variants are. Within a round, kinds come as in CASES, plain torch right after what it is compared
with, so that a visit that is cut has comparisons. A case that takes more than what is left is
passed over for the next that does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu.shapes import Shape

LONG, SHORT = 30, 12
"""Steps of a case, of which the first third is not measured; SHORT where a round of kinds would not
fit otherwise."""
RATE = 3e14
"""FLOP/s by which costs are estimated: 30 % of an H100's bf16 peak."""
START, PEER_START = 25.0, 15.0  # seconds until the first step: processes, imports, weights
COMPILE, PEER_COMPILE = 35.0, 90.0  # of a layer, of the whole model
SAVED = 2e9  # bytes/s of a checkpoint: 12 a parameter, written at every third of the steps


@dataclass(frozen=True)
class Case:
    """A row of the table. kind: what it puts at risk; name: its difference from the others; shape:
    the model's name; peer: PeerRun's settings, or settings: those of the job, one of them None.
    saves: whether checkpoints are written during the run."""

    kind: str
    name: str
    shape: str
    peer: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] | None = None
    saves: bool = False

    @property
    def who(self) -> str:
        """`mpctl` or `torch`."""
        return "torch" if self.settings is None else "mpctl"

    @property
    def title(self) -> str:
        """`gpt-1.5b, mpctl, fp8`."""
        return f"{self.shape}, {self.who}, {self.name}"

    @property
    def compiles(self) -> bool:
        """Whether torch.compile is part of it."""
        if self.settings is None:
            return bool((self.peer or {}).get("compiles", True))
        return bool(self.settings.get("launch.compile"))

    def seconds(self, shape: Shape, steps: int) -> float:
        """What it probably takes, with starting and compiling, on a device of the class of an
        H100."""
        start, compiling = START, COMPILE
        if self.settings is None:
            start, compiling = PEER_START, PEER_COMPILE
        given = self.settings or self.peer or {}
        again = bool(given.get("recompute")) or given.get("training.recompute") == "full"
        flops = shape.batch * shape.seq * shape.flops_per_token * (4 / 3 if again else 1)
        saved = 3 * 12 * shape.parameters / SAVED if self.saves else 0.0
        return start + compiling * self.compiles + steps * flops / RATE + saved


def ours(kind: str, name: str, shape: str, *, saves: bool = False, **settings: Any) -> Case:
    """A case of mpctl; `training__dropout=0.1` is training.dropout."""
    dotted = {key.replace("__", "."): value for key, value in settings.items()}
    return Case(kind, name, shape, settings={"launch.compile": False, **dotted}, saves=saves)


def peer(kind: str, name: str, shape: str, **settings: Any) -> Case:
    """A case of plain torch. kind: PLAIN or PLAIN_COMPILED."""
    return Case(kind, name, shape, peer=settings)


SMALL, GPT, XL = "gpt-small", "gpt-1.5b", "gpt2-xl"
LLAMA, LONG_LLAMA, EIGHT, SLICE = "llama-1b", "llama-1b-32k", "llama-8b", "llama-8b-tp8"
DROPOUT = {"training__dropout": 0.1, "training__attention_dropout": 0.1}
FULL = {"training__recompute": "full"}
COMPILED = {"launch__compile": True}
MASTERS = "bf16 with float32 masters, compiled"
EAGER = "bf16 with float32 masters"
PLAIN, PLAIN_COMPILED = "plain torch", "plain torch, compiled"

CASES = (
    ours("small, fp32", "fp32", SMALL, training__dtype="fp32"),
    ours("small, bf16", "bf16", SMALL),
    ours("bf16", "layer by layer", GPT),
    peer(PLAIN, EAGER, GPT, precision="masters", compiles=False),
    ours("fp8", "fp8", GPT, training__dtype="fp8"),
    ours("compiled", "compiled", GPT, **COMPILED),
    peer(PLAIN_COMPILED, MASTERS, GPT, precision="masters"),
    ours("dropout", "dropout 0.1", GPT, **DROPOUT),
    ours("tp slice", "layer by layer", SLICE),
    ours("recompute", "recompute full", GPT, **FULL),
    ours("offload", "recompute full, offloaded", GPT, **FULL, training__offload_activations=True),
    ours("save", "saved by a thread", GPT, saves=True),
    ours("long context", "recompute full", LONG_LLAMA, **FULL),
    # second cases of the kinds above
    ours("save", "saved between two steps", GPT, saves=True, checkpoint__asynchronous=False),
    ours("bf16", "layer by layer, 50,257 words", XL),
    ours("compiled", "compiled", LLAMA, **COMPILED),
    peer(PLAIN_COMPILED, MASTERS, LLAMA, precision="masters"),
    ours("compiled", "compiled", SLICE, **COMPILED),
    peer(PLAIN_COMPILED, MASTERS, SLICE, precision="masters"),
    ours("compiled", "dropout 0.1, compiled", GPT, **COMPILED, **DROPOUT),
    peer(PLAIN_COMPILED, "dropout 0.1", GPT, precision="masters", dropout=0.1),
    ours("compiled", "compiled", EIGHT, **COMPILED),
    peer(PLAIN_COMPILED, MASTERS, EIGHT, precision="masters"),
    ours("fp8", "fp8", EIGHT, training__dtype="fp8"),
    ours("bf16", "layer by layer", LLAMA),
    peer(PLAIN, EAGER, LLAMA, precision="masters", compiles=False),
    ours("dropout", "dropout 0.1", SLICE, **DROPOUT),
    ours("recompute", "recompute selective, dropout 0.1", GPT, training__recompute="selective", **DROPOUT),
    peer(PLAIN_COMPILED, "recompute full", GPT, precision="masters", recompute=True),
    peer(PLAIN_COMPILED, "autocast, compiled", GPT, precision="autocast"),
)


def in_order(cases: Sequence[Case]) -> list[Case]:
    """The cases by rounds: the first of every kind, then the second ones, and so on."""
    seen = Counter[str]()
    rounds: list[int] = []
    for case in cases:
        rounds.append(seen[case.kind])
        seen[case.kind] += 1
    return [case for _, case in sorted(zip(rounds, cases, strict=True), key=lambda pair: pair[0])]


def next_case(left: Sequence[Case], seconds: float, cost: Callable[[Case], float]) -> Case | None:
    """The first of the cases, which are in order, that takes at most `seconds`; None if none
    does."""
    return next((case for case in left if cost(case) <= seconds), None)


def fitting(cases: Sequence[Case], seconds: float, cost: Callable[[Case], float]) -> list[Case]:
    """The cases that are run one after the other within `seconds`, in their order."""
    left, chosen = in_order(cases), []
    while (case := next_case(left, seconds, cost)) is not None:
        seconds -= cost(case)
        chosen.append(case)
        left.remove(case)
    return chosen


def steps_within(cases: Sequence[Case], seconds: float, cost: Callable[[Case, int], float]) -> int:
    """LONG, or SHORT if a first case of each kind with so many steps takes more than `seconds`."""
    kinds = {case.kind: case for case in reversed(cases)}
    total = sum(cost(case, LONG) for case in kinds.values())
    return LONG if total <= seconds else SHORT


@dataclass
class Outcome:
    """The outcome of a case: figures (seconds of a step, bytes, reserved, those that were planned;
    save and stall: seconds of a checkpoint, and that training waited for it), or why there are
    none."""

    case: Case
    figures: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
