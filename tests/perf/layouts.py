"""The loss table of docs/layouts.md: `python -m tests.perf.layouts > docs/layouts.md`.

Trains the demo job for 20 steps under five layouts by `mpctl launch`, dropout and attention dropout
on, four micro batches or more a step, and prints the curves side by side.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

LAYOUTS = {"1": (1, 1), "tp2": (2, 1), "dp2": (1, 2), "tp2 x dp2": (2, 2), "tp4": (4, 1)}
STEPS = 20
SETTINGS = ("--steps", str(STEPS), "--micro-batch-size", "4", "--device", "cpu",
            "--set", "training.attention_dropout=0.1", "--set", "training.eval_samples=0",
            "--set", "training.checkpoint_at_end=false")  # fmt: skip

TEXT = """# The loss does not tell the layout

Weights, data order and dropout masks follow from the seed alone. The demo job (4 layers, hidden
256, dropout 0.1, attention dropout 0.1, global batch 16 in micro batches of 4, float32), trained
for {steps} steps by `mpctl launch` under five layouts:

{table}

Largest relative difference to one process over the {steps} steps: {worst}. What is left is the
order of float32 additions: in float64 the tests hold layers, losses and final parameters to 1e-10
(`tests/kernels`, `tests/runtime`).

Renewed by `python -m tests.perf.layouts > docs/layouts.md` ({torch}, two cores;
the four-rank layouts share them). A step whose loss stands out read an unusual stretch of text, and
every layout read the same one.

## How

- **Weights**: element (i, j) of a parameter is a normal number computed from a hash of (seed, the
  parameter's full name, i, j). A rank computes its own slice; nobody holds the whole.
- **Dropout**: the decision at (sample, position, feature) is a hash of (seed, step, site, global
  sample number, global position, global feature or head).
- **Data**: step, micro batch and rank give global sample numbers; the replicas of every layout
  together read the same global batch. The order of an epoch is a function of (seed, epoch).
- **Loss**: divided by the global batch's samples before backward, gradients only summed.
- **Vocabulary**: padding rows, whose number depends on tp, never enter the softmax.
"""


def curve(tp: int, dp: int, data: Path, out: Path) -> list[float]:
    layout = ["--tp", str(tp), "--dp", str(dp), "--gpus-per-node", str(tp * dp)]
    mpctl = Path(sys.executable).with_name("mpctl")
    command = [mpctl, "launch", "demo", *layout, *SETTINGS, "--json", "--run-dir", out]
    command += ["--set", f"data.path={json.dumps(str(data))}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def main() -> None:
    import torch

    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "data"
        mpctl = Path(sys.executable).with_name("mpctl")
        prepare = [mpctl, "data", "prepare", "--out", data, "--max-bytes", "8000000"]
        subprocess.run(prepare, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        curves = {
            name: curve(tp, dp, data, Path(scratch) / f"tp{tp}-dp{dp}")
            for name, (tp, dp) in LAYOUTS.items()
        }
    base = curves["1"]
    worst = max(abs(a - b) / b for own in curves.values() for a, b in zip(own, base, strict=True))
    rows = [f"| step | {' | '.join(curves)} |", f"|---|{'---|' * len(curves)}"]
    rows += [
        f"| {step + 1} | {' | '.join(f'{own[step]:.7f}' for own in curves.values())} |"
        for step in range(STEPS)
    ]
    table = "\n".join(rows)
    version = f"torch {torch.__version__}"
    print(TEXT.format(steps=STEPS, table=table, worst=f"{worst:.1e}", torch=version), end="")


if __name__ == "__main__":
    main()
