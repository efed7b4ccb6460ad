"""The table of published runs that `mpctl why` compares with: python -m tests.measure.why.published writes it.

Sweeps of one lab over many layouts (nanotron, vTrain on one node) are left out, as nobody chose them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from mpctl.measure.calibrate.runs import read_runs
from tests.published import expert_rows, published_rows

SWEEPS = ("nanotron", "vtrain_single")


def lines() -> Iterator[str]:
    """The table: sources as comments, then a line for each run."""
    rows = [row for row in (*published_rows(), *expert_rows()) if row["group"] not in SWEEPS]
    rows = [row for row in rows if "step_seconds" in row["measured"]]
    sources: dict[str, list[str]] = {}
    for row in rows:
        known = sources.setdefault(row["group"], [])
        known += [row["source"]] if row["source"] not in known else []
    yield "# Published runs: MFU as mpctl counts it (causal scores in full), of the dense peak."
    yield from (f"# {group}: {'; '.join(known[:3])}" for group, known in sorted(sources.items()))
    yield "\t".join(("group", "device", "dtype", "parameters", "experts", "gpus", "mfu"))
    found = set()
    for run in read_runs(rows):
        time, job = run.estimate(), run.job
        mfu = time.model_flops / run.measured["step_seconds"] / time.peak
        assert job.cluster.device is not None
        cells = (run.group, job.cluster.device.name, job.training.chosen_dtype, f"{run.layout.table.numel:.3g}")
        found.add("\t".join((*cells, str(int(job.has_experts)), str(job.world_size), f"{mfu:.3f}")))
    yield from sorted(found)


TABLE = Path(str(files("mpctl.measure.why"))) / "published.tsv"

if __name__ == "__main__":
    TABLE.write_text("\n".join(lines()) + "\n", encoding="utf-8")
