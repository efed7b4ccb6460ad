"""The tables of docs/layouts.md: `python -m benchmarks.layouts > docs/layouts.md`.

Trains the demo jobs for 12 steps under several layouts by `mpctl launch`, with dropout and attention dropout and at
least two micro batches per step, and compares the losses of each family with those of one process. Then a small GPT in
fp16, from a loss scale that overflows and from the default one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

Records = list[dict[str, Any]]

MPCTL = Path(sys.executable).with_name("mpctl")
JOBS = ("demo", "demo-llama", "demo-bert", "demo-t5", "demo-glm")
LAYOUTS: dict[str, tuple[str, ...]] = {
    "1": ("--tp", "1", "--gpus-per-node", "1"),
    "tp2": ("--tp", "2"),
    "dp2": ("--tp", "1", "--dp", "2"),
    "cp2": ("--tp", "1", "--cp", "2"),
    "tp2 split, full": ("--tp", "2", "--sequence-parallel", "--recompute", "full"),
    "pp2": ("--tp", "1", "--pp", "2"),
}
FOUR = ("--gpus-per-node", "4")
SPLIT = ("--tp", "2", "--sequence-parallel")
EXPERT_LAYOUTS: dict[str, tuple[str, ...]] = {
    "1": (*LAYOUTS["1"], "--ep", "1"),
    "ep 2": ("--ep", "2"),
    "ep 4": (*FOUR, "--ep", "4"),
    "ep 2 x tp 2": (*FOUR, *SPLIT, "--ep", "2"),
    "ep 4 > dp 2": (*FOUR, *SPLIT, "--ep", "4"),
    "ep 2 x pp 2": (*FOUR, "--pp", "2", "--ep", "2"),
    "ep 2 x etp 2": (*FOUR, "--ep", "2", "--etp", "2"),
    "tp 2, etp 2": (*SPLIT, "--ep", "1", "--etp", "2"),
    "cp 2": ("--cp", "2", "--ep", "2"),
    "ep 2, zero 3": (*FOUR, "--ep", "2", "--zero", "3"),
    "ep 2, recompute full": ("--ep", "2", "--recompute", "full"),
}
SMALLER = ("--micro-batch-size", "2")  # four replicas share a step
STEPS = 12
SETTINGS = (
    "--steps",
    str(STEPS),
    "--micro-batch-size",
    "4",
    "--global-batch-size",
    "8",
    "--device",
    "cpu",
    "--set",
    "model.seq_length=64",
    "--set",
    "training.attention_dropout=0.1",
    "--set",
    "training.eval_samples=0",
    "--set",
    "checkpoint.at_end=false",
)
GRID = ("--tp", "4", "--gpus-per-node", "4", "--tensor-mode", "2d")
FP16_LAYOUTS = {**LAYOUTS, "tp4 in 2d": GRID}
FP16 = ("--dtype", "fp16", "--set", "model.layers=2", "--set", "model.hidden=64", "--set", "model.heads=4")
SCALES = (26, 16)
"""Powers of two: from the first one the first steps overflow, the second is the default."""

TEXT = """# The loss does not depend on the layout

One seed gives the same weights, data order and dropout masks in every layout. The demo jobs (4 layers, hidden 256,
samples of 64 tokens, dropout and attention dropout 0.1, global batch 8 in micro batches of 4, float32) were trained
for {steps} steps by `mpctl launch`. Largest relative difference of the losses from those of one process:

{families}

`tp2 split, full` is sequence parallelism with full recomputation. The same for `demo-moe`, a mixture of 8 experts with
2 per token, a shared expert and an auxiliary loss; `tp` is with sequence parallelism. Near ties are tokens
whose choice of expert lies within rounding:

{experts}

Only the order of float32 additions differs, and training may amplify it. In float64 the tests hold layers, losses,
gradients and final parameters to 1e-10 (`tests/train/layers`, `tests/train/runtime`). Every rank held the parameters
and sent the bytes of its plan.

Renewed by `python -m benchmarks.layouts > docs/layouts.md` ({torch}, two cores).

## fp16

Gradients in 16 bit underflow, so the loss is multiplied by a scale. A step whose gradients overflow on any rank is
skipped on all, and the scale is halved. Layouts that share tokens (cp, sequence parallelism, 2d) sum bias gradients in
parts, so near the largest scale they may take a step that others skip; from then on the curves differ. A GPT
with 2 layers of hidden 64, {steps} steps:

{fp16}

To compare layouts in fp16, set `training.loss_scale` so low that no step is skipped.

## How

- **Weights**: element (i, j) of a parameter is a normal number computed from a hash of (seed, the parameter's full
  name, i, j). A rank computes its slice.
- **Dropout**: the decision at (sample, position, feature) is a hash of (seed, step, site, global sample number, global
  position, global feature or head).
- **Data**: the replicas of every layout read the same global batch. The order of an epoch, BERT's masks, T5's
  spans and GLM's blanks are functions of (seed, epoch or sample number).
- **Loss**: divided by the global batch's samples before backward; gradients are only summed.
- **Vocabulary**: padding rows, whose number depends on tp, never enter the softmax.
"""


def quietly(*command: object) -> None:
    subprocess.run([MPCTL, *map(str, command)], check=True, capture_output=True)


def trained(job: str, layout: tuple[str, ...], data: Path, out: Path, *more: str) -> Records:
    """The records of a run in which every rank did as planned."""
    place = f"data.path={json.dumps(str(data))}"
    quietly("launch", job, *layout, *SETTINGS, *more, "--json", "--run-dir", out, "--set", place)
    compared = json.loads((out / "summary.json").read_text())["plan_beside_run"]
    assert all(rank["agrees"] for rank in compared), out
    is_one = layout[: len(LAYOUTS["1"])] == LAYOUTS["1"]
    assert (len(compared) == 1) == is_one, (layout, len(compared))
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(records: Records) -> list[float]:
    return [record["loss"] for record in records]


def strays(own: list[float], base: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(own, base, strict=True))


def fp16_table(data: Path, scratch: Path) -> str:
    """A row for each scale and figure, a column for each layout."""
    body = []
    for scale in SCALES:
        start = (*FP16, "--set", f"training.loss_scale={2**scale}")
        runs = {
            name: trained("demo", layout, data, scratch / f"fp16-{scale}-{number}", *start)
            for number, (name, layout) in enumerate(FP16_LAYOUTS.items())
        }
        skipped = [sum(r.get("skipped", False) for r in records) for records in runs.values()]
        base = losses(runs["1"])
        strayed = [f"{strays(losses(records), base):.1e}" for records in runs.values()]
        body.append([f"from 2^{scale}: steps skipped", *map(str, skipped)])
        body.append([f"from 2^{scale}: difference of losses", *strayed])
    return rows(["", *FP16_LAYOUTS], body)


def experts_table(data: Path, scratch: Path) -> str:
    """A row for each layout of demo-moe."""
    runs = {
        name: trained("demo-moe", layout, data, scratch / f"experts-{number}", *SMALLER)
        for number, (name, layout) in enumerate(EXPERT_LAYOUTS.items())
    }
    base, body = runs["1"], []
    for name, records in runs.items():
        figures = [f"{strays(losses(records), losses(base)):.1e}"]
        own, one = ([record["aux_loss"] for record in run] for run in (records, base))
        near = sum(record["near_ties"] for record in records)
        body.append([name, *figures, f"{strays(own, one):.1e}", str(near)])
    return rows(["layout", "loss", "auxiliary loss", "near ties"], body)


def rows(head: list[str], body: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page(curves: dict[str, dict[str, list[float]]], experts: str, fp16: str) -> str:
    """The page, from the losses of every job and layout and the tables of experts and fp16."""
    import torch

    others = [name for name in LAYOUTS if name != "1"]
    families = [[job, *(f"{strays(own[name], own['1']):.1e}" for name in others)] for job, own in curves.items()]
    return TEXT.format(
        steps=STEPS,
        torch=f"torch {torch.__version__}",
        families=rows(["job", *others], families),
        experts=experts,
        fp16=fp16,
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        data = scratch / "data"
        sizes = ("--max-bytes", "8000000", "--vocab-size", "4000")
        quietly("data", "prepare", "python-stdlib", "--out", data, *sizes)
        curves = {
            job: {
                name: losses(trained(job, layout, data, scratch / f"{job}-{number}"))
                for number, (name, layout) in enumerate(LAYOUTS.items())
            }
            for job in JOBS
        }
        experts = experts_table(data, scratch)
        print(page(curves, experts, fp16_table(data, scratch)), end="")


if __name__ == "__main__":
    main()
