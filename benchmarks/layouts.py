"""The tables of docs/layouts.md: `python -m benchmarks.layouts > docs/layouts.md`.

Trains the demo jobs for 12 steps under several layouts by `mpctl launch`, dropout and attention
dropout on, two micro batches or more a step: GPT's curves side by side, and for every family how
far each layout strays from one process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

MPCTL = Path(sys.executable).with_name("mpctl")
JOBS = ("demo", "demo-llama", "demo-bert", "demo-t5", "demo-glm")
LAYOUTS: dict[str, tuple[str, ...]] = {
    "1": ("--tp", "1"),
    "tp2": ("--tp", "2"),
    "dp2": ("--tp", "1", "--dp", "2"),
    "cp2": ("--tp", "1", "--cp", "2"),
    "tp2 split, full": ("--tp", "2", "--sequence-parallel", "--recompute", "full"),
    "pp2": ("--tp", "1", "--pp", "2"),
}
STEPS = 12
SETTINGS = ("--steps", str(STEPS), "--micro-batch-size", "4", "--global-batch-size", "8",
            "--device", "cpu", "--set", "training.attention_dropout=0.1",
            "--set", "training.eval_samples=0",
            "--set", "checkpoint.at_end=false")  # fmt: skip

TEXT = """# The loss does not tell the layout

Weights, data order and dropout masks follow from the seed alone. The demo jobs (4 layers, hidden
256, dropout 0.1, attention dropout 0.1, global batch 8 in micro batches of 4, float32), trained for
{steps} steps by `mpctl launch`; `tp2 split, full` is sequence parallelism with full recomputation.

Largest relative difference to the losses of one process over the {steps} steps:

{families}

The curves of `demo`, a GPT:

{curves}

What is left is the order of float32 additions: in float64 the tests hold layers, losses, gradients
and final parameters to 1e-10 (`tests/kernels`, `tests/runtime`). Every rank of these runs held the
parameters and sent the bytes that its plan says.

Renewed by `python -m benchmarks.layouts > docs/layouts.md` ({torch}, two cores). A step whose loss
stands out read an unusual stretch of text, and every layout read the same one.

## How

- **Weights**: element (i, j) of a parameter is a normal number computed from a hash of (seed, the
  parameter's full name, i, j). A rank computes its own slice; nobody holds the whole.
- **Dropout**: the decision at (sample, position, feature) is a hash of (seed, step, site, global
  sample number, global position, global feature or head).
- **Data**: step, micro batch and rank give global sample numbers; the replicas of every layout
  together read the same global batch. The order of an epoch, what BERT masks, where T5's spans and
  GLM's blanks lie are functions of (seed, epoch or number).
- **Loss**: divided by the global batch's samples before backward, gradients only summed.
- **Vocabulary**: padding rows, whose number depends on tp, never enter the softmax.
"""


def quietly(*command: object) -> None:
    subprocess.run([MPCTL, *map(str, command)], check=True, capture_output=True)


def curve(job: str, layout: tuple[str, ...], data: Path, out: Path) -> list[float]:
    place = f"data.path={json.dumps(str(data))}"
    quietly("launch", job, *layout, *SETTINGS, "--json", "--run-dir", out, "--set", place)
    compared = json.loads((out / "summary.json").read_text())["plan_beside_run"]
    assert all(rank["agrees"] for rank in compared), out
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def strays(own: list[float], base: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(own, base, strict=True))


def rows(head: list[str], body: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    import torch

    curves: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "data"
        sizes = ("--max-bytes", "8000000", "--vocab-size", "4000")
        quietly("data", "prepare", "python-stdlib", "--out", data, *sizes)
        for job in JOBS:
            curves[job] = {
                name: curve(job, layout, data, Path(scratch) / f"{job}-{number}")
                for number, (name, layout) in enumerate(LAYOUTS.items())
            }
    others = [name for name in LAYOUTS if name != "1"]
    families = [
        [job, *(f"{strays(own[name], own['1']):.1e}" for name in others)]
        for job, own in curves.items()
    ]
    steps = [
        [str(step + 1), *(f"{own[step]:.7f}" for own in curves["demo"].values())]
        for step in range(STEPS)
    ]
    print(
        TEXT.format(
            steps=STEPS, torch=f"torch {torch.__version__}",
            families=rows(["job", *others], families), curves=rows(["step", *LAYOUTS], steps),
        ),
        end="",
    )  # fmt: skip


if __name__ == "__main__":
    main()
