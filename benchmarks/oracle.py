"""Everything that mpctl computes for many jobs, as one file for comparing two versions.

    python -m benchmarks.oracle plans FILE      # plans, explanations, searches, emitted flags
    python -m benchmarks.oracle runs FILE       # rehearsals, and losses of real ranks
    python -m benchmarks.oracle diff OLD NEW    # differences by place, with the largest of each

It only uses the command line, so that it also runs in a checkout of an older version after copying
it there. Numbers are written as Python prints them: equal files mean equal bits. A difference is a
defect unless docs/CHANGELOG.md explains it.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpctl.cli.app import run

PRESETS = Path(__file__).parents[1] / "presets"
# Options for one model on 2 nodes of 8 GPUs; `odd` adds to them.
BASE = [
    "--model",
    "llama-3-8b",
    "--nodes",
    "2",
    "--gpus-per-node",
    "8",
    "--cluster",
    "dgx-h100",
    "--set",
    "training.global_batch_size=64",
]
GRID = "training.micro_batch_size=4 parallel.tensor_mode"  # modes that cut the samples
ODD: dict[str, str] = {
    "tp2": "parallel.tp=2",
    "tp8-sp": "parallel.tp=8 parallel.sequence_parallel=true",
    "tp2-pp2-cp2": "parallel.tp=2 parallel.pp=2 parallel.cp=2",
    "cp4": "parallel.cp=4",
    "cp4-zero1": "parallel.cp=4 parallel.zero=1",
    "pp4": "parallel.pp=4",
    "pp4-gpipe": "parallel.pp=4 parallel.schedule=gpipe",
    "pp4-vpp2": "parallel.pp=4 parallel.vpp=2 parallel.schedule=interleaved",
    "pp4-zb": "parallel.pp=4 parallel.schedule=zero-bubble",
    "pp2-zb-zero2": "parallel.pp=2 parallel.schedule=zero-bubble parallel.zero=2",
    "pp2-zb-zero3": "parallel.pp=2 parallel.schedule=zero-bubble parallel.zero=3",
    "pp4-cost": "parallel.pp=4 parallel.stage_balance=cost",
    "pp4-embedding": "parallel.pp=2 parallel.embedding_is_layer=true parallel.loss_is_layer=true",
    "zero1": "parallel.zero=1 parallel.tp=2",
    "zero2": "parallel.zero=2 parallel.tp=2",
    "zero3": "parallel.zero=3",
    "zero3-tp4-sp": "parallel.zero=3 parallel.tp=4 parallel.sequence_parallel=true",
    "zero3-full": "parallel.zero=3 training.recompute=full",
    "no-overlap": "parallel.zero=1 parallel.overlap_gradients=false",
    "buckets": "parallel.zero=1 parallel.bucket_bytes=1000000000",
    "order": "parallel.tp=2 parallel.pp=2 parallel.order=tp-pp-dp-cp",
    "selective": "parallel.tp=2 training.recompute=selective",
    "selective-unfused": "parallel.tp=2 training.recompute=selective model.attention=unfused",
    "unfused": "parallel.tp=4 model.attention=unfused",
    "full": "parallel.tp=2 training.recompute=full",
    "full-partitioned": "parallel.tp=4 training.recompute=full training.partition_activations=true",
    "full-offload": "parallel.tp=2 training.recompute=full training.offload_activations=true",
    "full-sp-pp": "parallel.tp=2 parallel.pp=2 parallel.sequence_parallel=true training.recompute=full",
    "mb4": "parallel.tp=4 training.micro_batch_size=4",
    "fp16": "parallel.tp=2 training.dtype=fp16",
    "fp32": "parallel.tp=4 training.dtype=fp32",
    "tf32": "parallel.tp=4 training.dtype=tf32",
    "fp64": "parallel.tp=8 training.dtype=fp64",
    "fp8": "parallel.tp=2 training.dtype=fp8",
    "fp8-tensorwise": "parallel.tp=2 parallel.sequence_parallel=true training.dtype=fp8 training.fp8_recipe=tensorwise",
    "gradients-bf16": "parallel.tp=2 training.gradient_dtype=bf16",
    "dropout": "parallel.tp=2 training.dropout=0.1",
    "attention-dropout": "parallel.tp=2 training.attention_dropout=0.1 training.dropout=0.1",
    "freeze-embedding": 'parallel.tp=2 training.freeze=["embedding.*"]',
    "freeze-layers": 'parallel.pp=2 training.freeze=["embedding.*","layers.[0-9].*"]',
    "freeze-mlp": 'parallel.tp=2 parallel.zero=2 training.freeze=["*mlp*"]',
    "2d": f"parallel.tp=4 {GRID}=2d",
    "2.5d": f"parallel.tp=8 {GRID}=2.5d",
    "3d": f"parallel.tp=8 {GRID}=3d",
    "3d-full": f"parallel.tp=8 {GRID}=3d training.recompute=full",
    "2d-pp2-zero1": f"parallel.tp=4 parallel.pp=2 parallel.zero=1 {GRID}=2d",
    "mtp": "parallel.tp=2 model.mtp_layers=1",
    "mtp-pp": "parallel.pp=2 model.mtp_layers=2 parallel.zero=1",
    "window": "parallel.tp=2 model.attention_window=1024",
    "window-every": "parallel.pp=2 model.attention_window=1024 model.attention_window_every=2",
    "window-softcap": "parallel.tp=2 model.attention_window=1024 model.full_attention_every=6"
    " model.attention_softcap=50.0 model.logit_softcap=30.0",
    "parallel-residual": "parallel.tp=2 model.parallel_residual=true",
    "shared-norm": "parallel.tp=2 model.parallel_residual=true model.shared_norm=true",
    "qk-norm": "parallel.tp=2 model.qk_norm=true",
    "qk-norm-width": 'parallel.tp=2 model.qk_norm="width"',
    "sandwich": "parallel.tp=2 model.norm_order=sandwich",
    "layernorm-bias": "parallel.tp=2 model.norm=layernorm model.bias=true",
    "gelu": "parallel.tp=2 model.activation=gelu",
    "relu2-learned": "parallel.tp=2 model.activation=relu2 model.position=learned",
    "alibi": "parallel.tp=2 model.position=alibi",
    "tied": "parallel.tp=2 parallel.pp=2 model.tied_embeddings=true",
    "long": "parallel.cp=8 model.seq_length=65536 model.max_positions=65536 training.recompute=full",
    "validation": "parallel.tp=2 training.eval_interval=10",
}
# Layouts that models of all presets are planned in, and sizes of nodes for it.
MODEL_LAYOUTS = {
    "tp2-pp2-sp": ["--tp", "2", "--pp", "2", "--set", "parallel.sequence_parallel=true"],
    "zero3": ["--set", "parallel.zero=3"],
}
SEARCHES = (
    ["gpt3-175b-1024", "--runtime", "megatron-core"],
    ["--model", "llama-3-8b", "--nodes", "2", "--gpus-per-node", "8", "--cluster", "dgx-h100"],
    [
        "--model",
        "llama-3-70b",
        "--nodes",
        "8",
        "--gpus-per-node",
        "8",
        "--cluster",
        "dgx-h100",
        "--runtime",
        "torchtitan",
    ],
)
EMITTED = ("megatron", "megatron-bridge", "torchtitan", "deepspeed", "accelerate", "nanotron", "colossalai", "torch")


def asked(*arguments: str) -> Any:
    """The output of a command: its JSON document, or its lines if it prints no JSON."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(list(arguments))
    text = out.getvalue()
    try:
        answer: Any = json.loads(text)
    except ValueError:
        answer = text.splitlines()
    return {"code": code, "answer": answer, "errors": err.getvalue().splitlines()}


def settings(text: str) -> list[str]:
    """`a=1 b=2` as options of the command line."""
    return [part for setting in text.split() for part in ("--set", setting)]


def planned() -> Iterator[tuple[str, list[str]]]:
    """Arguments of `mpctl plan` by the name of the case."""
    runtimes = sorted(path.stem for path in (PRESETS / "runtimes").glob("*.toml"))
    for job in sorted(path.stem for path in (PRESETS / "jobs").glob("*.toml")):
        for runtime in runtimes:
            yield f"job {job} {runtime}", [job, "--runtime", runtime]
    for name, text in ODD.items():
        for runtime in ("mpctl", "megatron-core", "torchtitan", "megatron-2021"):
            yield f"odd {name} {runtime}", [*BASE, "--runtime", runtime, *settings(text)]
    for model in sorted(path.stem for path in (PRESETS / "models").glob("*.toml")):
        for name, layout in MODEL_LAYOUTS.items():
            line = ["--model", model, "--nodes", "2", "--gpus-per-node", "8", "--cluster", "dgx-h100"]
            yield f"model {model} {name}", [*line, *layout]


def plans() -> dict[str, Any]:
    """Every plan with its explanations, searches, comparisons of tensor modes, emitted flags."""
    cases: dict[str, Any] = {}
    listed = list(planned())
    for number, (name, line) in enumerate(listed):
        if sys.stderr.isatty():
            print(f"\r{number} of {len(listed)}", end="", file=sys.stderr)
        cases[name] = asked("plan", *line, "--groups", "none", "--json")
        if cases[name]["code"] in (0, 3) and not name.startswith("model"):
            cases[f"explain {name}"] = asked("plan", *line, "--explain")
    for name, text in ODD.items():
        if name in ("tp2", "tp8-sp", "pp4-vpp2", "zero3", "fp8", "cp4", "full", "mtp", "2d"):
            line = [*BASE, *settings(text)]
            cases[f"modes {name}"] = asked("plan", *line, "--compare-tensor-modes", "--json")
            for launcher in EMITTED:
                cases[f"emit {launcher} {name}"] = asked("plan", *line, "--emit", launcher)
    for line in SEARCHES:
        cases[f"search {' '.join(line)}"] = asked("search", *line, "--json")
    return cases


# ------------------------------------------------------------------------------ ranks

RUNS = {
    **{f"{name}-1": (f"demo-{name}", 1, "") for name in ("gpt", "bert", "t5", "glm", "llama")},
    **{
        f"{name}-tp2": (f"demo-{name}", 2, "parallel.tp=2 parallel.sequence_parallel=true")
        for name in ("gpt", "bert", "t5", "glm", "llama")
    },
    "gpt-pp2-zb": ("demo-gpt", 2, "parallel.pp=2 parallel.schedule=zero-bubble"),
    "llama-vpp2": ("demo-llama", 2, "parallel.pp=2 parallel.vpp=2 parallel.schedule=interleaved"),
    "gpt-cp2": ("demo-gpt", 2, "parallel.cp=2"),
    "gpt-zero1": ("demo-gpt", 2, "parallel.zero=1"),
    "llama-zero2": ("demo-llama", 2, "parallel.zero=2"),
    "gpt-zero3": ("demo-gpt", 2, "parallel.zero=3 training.recompute=full"),
    "gpt-2d": ("demo-gpt", 4, "parallel.tp=4 parallel.tensor_mode=2d"),
    "gpt-2.5d": ("demo-gpt", 4, "parallel.tp=4 parallel.tensor_mode=2.5d parallel.tensor_depth=1"),
    "llama-3d": ("demo-llama", 8, f"parallel.tp=8 {GRID}=3d"),
    "gpt-mixed": ("demo-gpt", 4, "parallel.tp=2 parallel.pp=2 training.attention_dropout=0.1"),
    "gpt-fp8": ("demo-gpt", 2, "parallel.tp=2 training.dtype=fp8"),
    "gpt-freeze": ("demo-gpt", 2, 'parallel.zero=2 training.freeze=["embedding.*"]'),
}
MEASURED_SECONDS = re.compile(r"seconds|time|per_second|^rss|^pid|path|measured_at")


def without_clock(value: Any) -> Any:
    """A document without the values that differ from one run to the next."""
    if isinstance(value, dict):
        return {key: without_clock(one) for key, one in value.items() if not MEASURED_SECONDS.search(key)}
    return [without_clock(one) for one in value] if isinstance(value, list) else value


def runs() -> dict[str, Any]:
    """Rehearsals and the losses and gradient norms of short trainings."""
    cases: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.txt"
        corpus.write_text("".join(f"{n} times {n} is {n * n}. " for n in range(20_000)), "utf-8")
        for name, (model, ranks, text) in RUNS.items():
            print(name, file=sys.stderr)
            line = [
                "--model",
                model,
                "--nodes",
                "1",
                "--gpus-per-node",
                str(ranks),
                *settings(
                    "training.steps=4 training.global_batch_size=8 training.dropout=0.1"
                    " training.micro_batch_size=2 training.eval_samples=4 launch.device=cpu"
                    " launch.threads_per_rank=1"
                    f' data.corpus=["{corpus}"] model.seq_length=64'
                ),
                *settings(text),
            ]
            rehearsed = asked("launch", *line, "--rehearse", "--json")
            cases[f"rehearse {name}"] = without_clock(rehearsed)
            where = Path(folder) / name
            done = asked("launch", *line, "--run-dir", str(where), "--json")
            metrics = where / "metrics.jsonl"
            records = metrics.read_text("utf-8").splitlines() if metrics.is_file() else []
            cases[f"train {name}"] = {
                "code": done["code"],
                "errors": [] if records else [done["errors"], done["answer"]],
                "steps": [without_clock(json.loads(record)) for record in records],
            }
    return cases


# --------------------------------------------------------------------------- differences


def leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from leaves(one, f"{place}.{key}")
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from leaves(one, f"{place}[{number}]")
    else:
        yield place, value


def differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, list[str]]:
    """By place without its indices: where two files differ, as `case: old -> new`."""
    found: dict[str, list[str]] = defaultdict(list)
    for case in sorted({*old, *new}):
        if case not in old or case not in new:
            found["cases"].append(f"{case}: only in the {'new' if case in new else 'old'} file")
            continue
        before, after = dict(leaves(old[case])), dict(leaves(new[case]))
        for place in {**before, **after}:
            one, other = before.get(place, "(absent)"), after.get(place, "(absent)")
            if one != other:
                found[re.sub(r"\[\d+\]", "[]", place)].append(f"{case}{place}: {one} -> {other}")
    return found


def main() -> None:
    task, *files = sys.argv[1:]
    if task == "diff":
        old, new = (json.loads(Path(name).read_text("utf-8")) for name in files)
        found = differences(old, new)
        for place, lines in sorted(found.items(), key=lambda pair: -len(pair[1])):
            print(f"{len(lines):6} {place}")
            print(*(f"         {line[:200]}" for line in lines[:3]), sep="\n")
        print(f"{len(old)} cases before, {len(new)} now, {len(found)} places differ")
        sys.exit(bool(found))
    cases = {"plans": plans, "runs": runs}[task]()
    Path(files[0]).write_text(json.dumps(cases, indent=0), "utf-8")
    print(f"{len(cases)} cases in {files[0]}")


if __name__ == "__main__":
    main()
