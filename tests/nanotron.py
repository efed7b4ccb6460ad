"""The recorded sweep of nanotron as rows like those of the other published runs.

tests/recorded/nanotron.tsv has a line a run: its layout, what came of it, tokens per second and
GPU, peak memory. The lines above its columns say whose it is and what its models are. Step seconds
are the tokens of a batch over the tokens per second of all GPUs.

By hand, 1B at dp 128, one sample twice: 256 x 4,096 tokens at 24,494 x 128 a second take 0.334 s.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal

SWEEP = Path(__file__).with_name("recorded") / "nanotron.tsv"
GPUS = 8  # of a node
SOURCE = (
    "Hugging Face Ultra-Scale Playbook, interactive benchmark figure (copy: "
    "lzx1413/ultra-scale-book docs/fragments/benchmarks_interactive.html)"
)
Outcome = Literal["ran", "soft", "failed"]


def nanotron_rows(outcome: Outcome) -> list[dict[str, Any]]:
    """The runs that came to this: id, group, source, job and measured.

    outcome: `ran`; `soft`, below 5 % MFU or of a model that is a guess; `failed`, crashed or out of
    memory. measured: `step_seconds` and `peak_mem_gib_reserved`, what torch reserved on rank 0, of
    the first stage (log_throughput in nanotron's helpers.py), or `failed`.
    """
    return [row for told, row in _rows() if told == outcome]


@cache
def _rows() -> list[tuple[str, dict[str, Any]]]:
    lines = SWEEP.read_text("utf-8").splitlines()
    models = dict(_models(line for line in lines if line.startswith("# model ")))
    table = csv.DictReader((line for line in lines if line[0] != "#"), delimiter="\t")
    return [(line["outcome"], _row(line, models[line["model"]])) for line in table]


def _models(lines: Iterator[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for line in lines:
        name, _, shape = line.removeprefix("# model ").partition(" = ")
        yield name, json.loads(shape)


def _row(line: dict[str, str], model: dict[str, Any]) -> dict[str, Any]:
    names = ("nodes", "tp", "pp", "dp", "micro_batch", "accumulation", "zero", "repeat")
    nodes, tp, pp, dp, micro_batch, accumulation, zero, repeat = (int(line[n]) for n in names)
    batch = micro_batch * accumulation * dp
    name = (
        f"nanotron_{line['model'].partition('-')[0]}_{nodes}n_dp{dp}_tp{tp}_pp{pp}"
        f"_mbs{micro_batch}_acc{accumulation}_z{zero}"
    )
    parallel = {
        "tp": tp,
        "pp": pp,
        "vpp": 1,
        "cp": 1,
        "dp": dp,
        "sequence_parallel": tp > 1,
        "zero": zero,
        "schedule": "1f1b",
    }
    training = {
        "micro_batch_size": micro_batch,
        "global_batch_size": batch,
        "dtype": "bf16",
        "recompute": "none",
        "runtime": "nanotron",
    }
    return {
        "id": f"{name}_r{repeat}" if repeat > 1 else name,
        "group": "nanotron",
        "source": SOURCE,
        "job": {
            "cluster": {"preset": "hf-h100", "nodes": nodes, "gpus_per_node": GPUS},
            "model": model,
            "parallel": parallel,
            "training": training,
        },
        "measured": _measured(line, batch * model["seq_length"], nodes * GPUS),
    }


def _measured(line: dict[str, str], tokens: int, gpus: int) -> dict[str, Any]:
    """tokens: of a batch."""
    if line["outcome"] == "failed":
        return {"failed": "crashed or out of memory"}
    speed = int(line["tokens_per_s_per_gpu"]) * gpus
    return {"step_seconds": tokens / speed, "peak_mem_gib_reserved": float(line["peak_gb"])}
