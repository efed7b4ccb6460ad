"""Tensor modes on paper, to 4,096 ranks: `python -m benchmarks.tensor_modes_sweep --search
docs/tensor-modes.svg`.

Everything is planned, nothing is run: the figures of `mpctl plan --compare-tensor-modes` for jobs
whose ranks are all one tensor-parallel group, weak (the model grows with the ranks) and strong (one
model). Prints the tables of benchmarks/results/tensor-modes.md as Markdown and draws the picture. 2.5d is shown
with the depth of the shortest step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpctl.core.errors import InputError
from mpctl.core.units import bytes_text, seconds_text
from mpctl.plan.planning.tensor_modes import TensorModeEntry, tensor_modes_document
from mpctl.plan.search.find import find_layouts
from mpctl.plan.search.space import SearchSpace
from mpctl.spec.load import load_job

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")  # Okabe and Ito
RANKS = (64, 512, 4096)
MODES = ("1d", "1d, sequence", "2d", "2.5d", "3d")
HIDDEN = {64: 8192, 512: 24576, 4096: 65536}  # weak: about 8 x the weights for 8 x the ranks
SAMPLES = {64: 16, 512: 64, 4096: 256}  # a multiple of what every grid cuts them into
BASE: dict[str, Any] = {
    "cluster": "selene",
    "cluster.gpus_per_node": 8,
    "parallel.allow_tp_across_nodes": True,
    "model.family": "gpt",
    "model.layers": 16,
    "model.vocab": 50257,
    "model.seq_length": 1024,
    "model.attention": "flash",
    "training.dtype": "bf16",
    "training.runtime": "mpctl",
}
Point = dict[str, TensorModeEntry | None]


def job(ranks: int, *, hidden: int, heads: int, samples: int) -> dict[str, Any]:
    """All ranks as one tensor-parallel group, one micro batch a step."""
    return {
        **BASE,
        "cluster.nodes": ranks // 8,
        "parallel.tp": ranks,
        "model.hidden": hidden,
        "model.heads": heads,
        "training.micro_batch_size": samples,
        "training.global_batch_size": samples,
    }


def weak(ranks: int) -> dict[str, Any]:
    """A model and a micro batch that grow with the ranks; as many heads as 1d needs."""
    hidden = HIDDEN[ranks]
    heads = max(ranks, hidden // 128)
    return job(ranks, hidden=hidden, heads=heads, samples=SAMPLES[ranks])


def strong(ranks: int) -> dict[str, Any]:
    """One model and one batch for all: hidden 16,384 in 128 heads, 256 samples."""
    return job(ranks, hidden=16384, heads=128, samples=256)


def points(settings: dict[str, Any]) -> Point:
    """The entry of every mode; None where it cannot run."""
    best: Point = dict.fromkeys(MODES)
    for splits in (False, True):
        own = {**settings, "parallel.sequence_parallel": splits}
        try:
            entries = tensor_modes_document(None, own)["modes"]
        except InputError:
            continue
        for entry in entries:
            name = entry["mode"] + ", sequence" * (splits and entry["mode"] == "1d")
            known = best[name]
            if entry["step"] and (known is None or _seconds(entry) < _seconds(known)):
                best[name] = entry
    return best


def _seconds(entry: TensorModeEntry | None) -> float:
    assert entry is not None and entry["step"] is not None, "it was planned"
    return entry["step"]["step_seconds"] or 0.0


def table(sweep: dict[int, Point]) -> Iterator[str]:
    """A Markdown table: a row for each number of ranks and mode."""
    titles = "ranks", "mode", "grid", "sent", "messages", "step", "of it tp", "memory"
    yield f"| {' | '.join(titles)} |"
    yield "|---|---|---|---|---|---|---|---|"
    for ranks, entries in sweep.items():
        for mode, entry in entries.items():
            if entry is None or entry["layer"] is None or entry["step"] is None:
                yield f"| {ranks:,} | {mode} | cannot run | | | | | |"
                continue
            layer, step = entry["layer"], entry["step"]
            grid = " x ".join(map(str, (entry["axes"] or {}).values()))
            memory = bytes_text(step["peak_bytes"]) + ("" if step["fits"] else ", too much")
            yield (
                f"| {ranks:,} | {mode} | {grid} | {bytes_text(layer['sent_bytes'])} | "
                f"{layer['collectives']:,} | {seconds_text(step['step_seconds'] or 0)} | "
                f"{seconds_text(step['tensor_seconds'] or 0)} | {memory} |"
            )


def searched(ranks: int) -> Iterator[str]:
    """The fastest layout of the weak model on `ranks` ranks, in 1d and in each other mode, where
    tp, pp, dp and ZeRO share the ranks."""
    settings = {**weak(ranks), "parallel.tp": 1, "training.micro_batch_size": 1}
    settings["training.global_batch_size"] = 4 * ranks
    for mode in ("1d", "2d", "2.5d", "3d"):
        space = SearchSpace(
            load_job(None, settings), {"tensor_mode": mode, "cp": 1}, {"micro_batch_size": 256, "tp": 64}
        )
        found = find_layouts(space, top=1).best
        if found:
            layout = found[0].layout
            sizes = f"tp {layout.tp} dp {layout.dp} pp {layout.pp}"
            yield f"| {ranks:,} | {mode} | {sizes} | {seconds_text(found[0].seconds)} |"
        else:
            yield f"| {ranks:,} | {mode} | none fits | |"


PANELS = (
    ("bytes that a rank sends in a layer, GiB", lambda e: e["layer"]["sent_bytes"] / 2**30),
    ("step, seconds (hollow: does not fit)", lambda e: e["step"]["step_seconds"]),
    ("memory of a rank, GiB", lambda e: e["step"]["peak_bytes"] / 2**30),
)


def draw(path: Path, sweeps: dict[str, dict[int, Point]]) -> None:
    """A row of panels for each sweep, a curve for each mode."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator

    settings: Any = {
        "svg.hashsalt": "mpctl",
        "svg.fonttype": "none",
        "font.size": 9.0,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with rc_context(settings):
        figure = Figure(figsize=(11.0, 6.4), dpi=110, layout="constrained")
        grid = figure.subplots(len(sweeps), len(PANELS), squeeze=False)
        for row, (name, sweep) in zip(grid, sweeps.items(), strict=True):
            for axes, (title, figure_of) in zip(row, PANELS, strict=True):
                for mode, colour, marker in zip(MODES, COLOURS, "ovsD^", strict=False):
                    _curve(axes, sweep, mode, figure_of, colour, marker)
                axes.set(xscale="log", yscale="log", xticks=RANKS, xlabel="ranks")
                axes.set_xticklabels([f"{n:,}" for n in RANKS])
                axes.minorticks_off()
                axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
                axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
                axes.set_title(f"{name}: {title}", loc="left", fontsize=9.0)
                axes.grid(alpha=0.3, linewidth=0.6)
            row[-1].axhline(80, color="grey", linestyle=":", linewidth=1.0)
            row[-1].annotate("80 GiB", (RANKS[0], 80), (2, 3), textcoords="offset points", color="grey", fontsize=8.0)
        grid[0][0].legend(frameon=False)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _curve(axes: Any, sweep: dict[int, Point], mode: str, figure_of: Any, colour: str, marker: str) -> None:
    found = [(ranks, entries[mode]) for ranks, entries in sweep.items() if entries[mode]]
    xs, ys = [ranks for ranks, _ in found], [figure_of(entry) for _, entry in found]
    axes.plot(xs, ys, color=colour, linewidth=1.5, label=mode)
    for x, y, (_, entry) in zip(xs, ys, found, strict=True):
        fits = entry is not None and entry["step"] is not None and entry["step"]["fits"]
        fill = colour if fits else "white"
        axes.plot([x], [y], marker=marker, markersize=5.0, color=colour, markerfacecolor=fill)


def main() -> None:
    """Print the tables; draw the picture where a path is given."""
    sweeps = {
        name: {ranks: points(settings(ranks)) for ranks in RANKS}
        for name, settings in (("weak", weak), ("strong", strong))
    }
    for name, sweep in sweeps.items():
        print(f"{name}\n", *table(sweep), "", sep="\n")
    if "--search" in sys.argv:
        for ranks in RANKS:
            print(*searched(ranks), sep="\n", flush=True)
    if paths := [word for word in sys.argv[1:] if not word.startswith("--")]:
        draw(Path(paths[0]), sweeps)


if __name__ == "__main__":
    main()
