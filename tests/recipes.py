"""Published layouts beside what a search finds: `python -m tests.recipes`, docs/recipes.md.

For each run of RECIPES: its layout, measured and planned seconds, the layout that a search on the same
GPUs suggests under the runtime of the publication (its model, batch and data type stay), and by how much
the published layout is behind the fastest of all that was found. Layouts within the error of
ranking (plan/search/find.py) are a tie. `--write` renews the table in docs/recipes.md; without it
the parts of each difference are printed too. The runs are rows
of tests/recorded; one that leaves less than the default headroom free is searched with what it
leaves, in whole percent.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from math import floor
from pathlib import Path
from typing import NamedTuple

from mpctl.core.units import seconds_text
from mpctl.plan.planning.layout_settings import LayoutSettings, layout_text
from mpctl.plan.planning.plan import make_plan
from mpctl.plan.search.request import SearchRequest
from mpctl.plan.search.result import LayoutReport, SearchResult, answer_search, given_reason
from mpctl.spec.job import JobSpec
from tests.outside import outside_run
from tests.published import published_runs

PAGE = Path(__file__).parents[1] / "docs" / "recipes.md"
BEGIN, END = "<!-- recipes: python -m tests.recipes --write -->\n", "<!-- end -->\n"
BAR = r"\|"  # of Megatron's pipeline layouts, in a cell
RECIPES = {
    "Llama 3 70B, 64 H100, NVIDIA 25.02": "dgxc_v25.02_llama3-70b_bf16_64_L80_tp4pp4cp2vp5_gbs128",
    "Llama 3 70B, 2,048 H100, NVIDIA 25.04": ("dgxc_v25.04_llama3-70b_bf16_2048_L80_tp4pp4cp2vp5_gbs4096"),
    "Llama 3 70B, 64 H100, fp8, NVIDIA 26.02": ("mbridge_26.02.01_DGX-H100_LLAMA3_70B_FP8_64_main_886"),
    "Llama 3.1 405B, 2,048 H100, NVIDIA 25.04": ("dgxc_v25.04_llama3.1-405b_bf16_2048_L126_tp8pp8cp2vp8_gbs1024"),
    "Llama 3.1 405B, 576 H100, fp8, NVIDIA 24.11": ("dgxc_v24.11.1_llama3.1-405b_fp8_576_L126_tp8pp9cp2vp7_gbs252"),
    "Llama 3.1 405B, 512 H100, fp8, MLPerf 5.0": "mlperf_v50_eos_h100_405b_512",
    "Llama 3 405B, 16,384 H100, Meta": "Llama 3 405B 16384 H100, 8192 tokens",
    "Llama 3 405B, 16,384 H100, 131,072 tokens, Meta": "Llama 3 405B 16384 H100, 131072 tokens",
    "GPT-3 175B, 64 A100, Megatron 2022": "korth22_t5_175B_full",
    "GPT 1T, 3,072 A100, Megatron 2021": "narayanan21_t1_1T",
    "GPT-3 175B, 512 H100, NVIDIA 25.02": ("dgxc_v25.02_gpt3-175b_bf16_512_L96_tp4pp8cp1vp12_gbs1024"),
    "GPT-3 175B, 512 H100, fp8, MLPerf 4.1": "mlperf_v41_eos_gpt3_512",
    "GPT-3 175B, 3,072 H100, fp8, MLPerf 4.1": "mlperf_v41_oracle_h100_gpt3_3072",
    "Nemotron-4 340B, 1,024 H100, NVIDIA 24.11": ("dgxc_v24.11.1_nemotron4-340b_bf16_1024_L96_tp8pp8cp1vp12_gbs256"),
    "Nemotron-4 340B, 6,144 H100, its paper": "Nemotron-4 340B 6144 H100",
    "BLOOM 176B, 384 A100, BigScience": "bloom_L947_h14336_l70_tp4pp12dp8_mbs2_a64",
    "GPT 175B, 256 A100, MegaScale's Megatron-LM": "Megatron-LM 175B 256 A100",
    "GPT 175B, 12,288 A100, MegaScale's Megatron-LM": "Megatron-LM 175B 12288 A100",
}
"""Runs of tests/recorded, by id, under names that people know."""


class Recipe(NamedTuple):
    """A published run and a search of its job. measured: seconds of its step."""

    name: str
    measured: float
    given: LayoutReport
    found: SearchResult

    @property
    def behind(self) -> float:
        """By how much the published layout is planned to be slower than the fastest found."""
        assert self.found.fastest is not None
        return self.given.time.total / self.found.fastest.time.total - 1

    @property
    def error(self) -> float:
        """The error of ranking where such a step is estimated."""
        return self.found.error

    @property
    def suggested(self) -> LayoutReport:
        """The layout that the search suggests."""
        assert self.found.suggested is not None
        return self.found.suggested

    @property
    def is_suggested(self) -> bool:
        """Whether the published layout is that, whatever the order of axes."""
        return self.given.layout._replace(order="") == self.suggested.layout._replace(order="")

    @property
    def verdict(self) -> str:
        """Whether the published layout is the suggested one, ties with the fastest, or is behind."""
        if self.is_suggested:
            return "is suggested"
        if self.behind <= self.error:
            return f"tie ({self.behind:+.1%}, error {self.error:.0%})"
        return f"**behind {self.behind:.1%}** (error {self.error:.0%})"


def recipe(name: str) -> Recipe:
    """The published run of this name, searched."""
    job, measured = _runs()[RECIPES[name]]
    plan = make_plan(job)
    assert plan.estimate is not None and job.cluster.device is not None
    left = 100 * (1 - plan.estimate.fullest_stage.device_bytes / job.cluster.device.memory_bytes)
    headroom = min(job.cluster.headroom, floor(left))
    job = job.model_copy(update={"cluster": job.cluster.model_copy(update={"headroom": headroom})})
    found = answer_search(
        SearchRequest(job, {}, {}, {}),
        [job.world_size],
        top=5,
        objective="tokens",
        exhaustive=False,
        on_progress=lambda stage, done, total: None,
    )
    assert found.given is not None
    return Recipe(name, measured, found.given, found)


@cache
def _runs() -> dict[str, tuple[JobSpec, float]]:
    runs = {run.id: (run.job, run.measured["step_seconds"]) for run in published_runs() if run.id in RECIPES.values()}
    for name in set(RECIPES.values()) - set(runs):
        outside = outside_run(name)
        runs[name] = outside.plan.job, outside.seconds
    return runs


def table_lines(recipes: list[Recipe]) -> Iterator[str]:
    """A row for each run."""
    yield "| run | published layout | measured | planned | suggested by a search | planned | published |"
    yield "|---|---|---|---|---|---|---|"
    yield from map(table_line, recipes)


def table_line(one: Recipe) -> str:
    """The row of a run."""
    best = one.suggested
    best_text = "the same" if one.is_suggested else short_text(best.layout)
    cells = (
        one.name,
        short_text(one.given.layout),
        seconds_text(one.measured),
        seconds_text(one.given.time.total),
        best_text,
        seconds_text(best.time.total),
        one.verdict,
    )
    return f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |"


def short_text(layout: LayoutSettings) -> str:
    """A layout as recipes write it: `tp4 cp2 pp4 mbs1 sp zero1`."""
    text = layout_text(layout).replace("sequence parallel", "sp").replace("micro batch ", "mbs")
    return re.sub(r"\b(tp|cp|dp|pp|vpp|zero) (\d+)", r"\1\2", text).replace(",", "")


def reason_lines(recipes: list[Recipe]) -> Iterator[str]:
    """How each published layout compares with the suggested one, by part."""
    for one in recipes:
        yield f"- {one.name}: {given_reason(one.suggested, one.given)}"


def page_with(recipes: list[Recipe]) -> str:
    """docs/recipes.md with this table."""
    head, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    tail = rest.partition(END)[2]
    return f"{head}{BEGIN}\n" + "\n".join(table_lines(recipes)) + f"\n\n{END}{tail}"


def main() -> None:
    """Search every recipe; --write: into docs/recipes.md."""
    recipes = [recipe(name) for name in RECIPES]
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page_with(recipes), "utf-8")
    else:
        print("\n".join([*table_lines(recipes), "", *reason_lines(recipes)]))


if __name__ == "__main__":
    main()
