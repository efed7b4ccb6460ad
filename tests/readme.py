"""The output and the pictures of README.md and the guides: `make readme`, `python -m tests.readme`.

docs/page.png is a photograph of an HTML page, taken where there is a chromium.

A block of these pages that begins with `$ mpctl ...` shows what the command prints, stdout and
stderr; `| head -N` behind it keeps the first N lines, `| tail -N` the last. A command with
`--svg NAME.svg` draws docs/NAME.svg. `--slow` also makes the blocks of commands that train.
The table of published runs in README.md has the rows RUNS. tests/cli/test_readme.py compares what
is there with what the commands print and the table says.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from math import exp
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = (README, ROOT / "docs" / "guide.md", ROOT / "docs" / "tour.md")
LAUNCHERS = (ROOT / "docs" / "other-launchers.md", ROOT / "tests" / "recorded" / "emitted.md")
"""Pages whose blocks alone are made here; tests/cli/test_interop.py compares them."""
EXCERPTS = tuple(ROOT / "docs" / f"{name}.md" for name in ("fine-tuning", "goodput", "presets", "tensor-modes"))
"""Pages whose blocks are lines of what their commands print, chosen by hand."""
TABLE = re.compile(r"(<!-- published runs: [^\n]*-->\n)(.*?)(<!-- end -->)", re.S)
RUNS = {
    "korth22_t5_175B_full": ("GPT-3 175B, 64 A100", "arXiv 2205.05198, Table 5"),
    "narayanan21_t1_1T": ("GPT 1T, 3,072 A100", "arXiv 2104.04473, Table 1"),
    "bloom_L947_h14336_l70_tp4pp12dp8_mbs2_a64": ("BLOOM 176B, 384 A100", "BigScience's log"),
    "mosaic_30b_2048_256_h100_80gb_mbs8_ac1_L79": ("MPT 30B, 256 H100, FSDP", "llm-foundry"),
    "titan_8b_8_compile_bf16": ("Llama 3 8B, 8 H100, torchtitan", "torchtitan, 2024-12"),
    "dgxc_v25.02_llama3-70b_bf16_64_L80_tp4pp4cp2vp5_gbs128": ("Llama 3 70B, 64 H100", "DGX Cloud recipes 25.02"),
    "dgxc_v24.11.1_nemotron4-340b_bf16_1024_L96_tp8pp8cp1vp12_gbs256": (
        "Nemotron-4 340B, 1,024 H100",
        "DGX Cloud recipes 24.11",
    ),
    "mlperf_v41_oracle_h100_gpt3_3072": ("GPT-3 175B, 3,072 H100, fp8", "MLPerf 4.1, Oracle"),
    "mlperf_v50_eos_h100_405b_512": ("Llama 3.1 405B, 512 H100, fp8", "MLPerf 5.0, NVIDIA"),
    "mlperf_v51_hsg_gb200_405b_5120": ("Llama 3.1 405B, 5,120 GB200, nvfp4", "MLPerf 5.1, NVIDIA"),
}
"""Rows of the table: runs of tests/recorded/, by id, under names that people know, with sources."""
SHOWN = re.compile(r"```\n\$ (mpctl [^\n]*)\n(.*?)```", re.S)
CUT = re.compile(r" \| (head|tail) -(\d+)$")
PAGE = ROOT / "docs" / "page.png"
SHOWN_PAGE = (
    "mpctl plan --cluster dgx-h100 --nodes 8 --model llama-3-70b --runtime megatron-core --tp 4 "
    "--pp 4 --cp 2 --vpp 4 --sequence-parallel --zero 1 --global-batch-size 128 --html plan.html"
)
"""The page of the photograph, by the command that README.md has for it."""
SVG = re.compile(r"^mpctl [^#\n]*--svg (\S+\.svg)", re.M)


def is_slow(command: str) -> bool:
    """Whether the command trains."""
    return command.startswith("mpctl launch") and "--dry-run" not in command


def shown(command: str) -> str:
    """What the command prints, as README.md shows it: without spaces at the ends of lines."""
    cut = CUT.search(command)
    with tempfile.TemporaryDirectory() as folder:
        lines = _run(CUT.sub("", command), folder).splitlines()
    if cut is not None:
        count = int(cut[2])
        lines = lines[:count] if cut[1] == "head" else lines[-count:]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def pictures(text: str) -> dict[str, str]:
    """The command of each picture that the pages have a line for, by its path."""
    return {f"docs/{match[1]}": match[0] for match in SVG.finditer(text)}


def drawn(command: str, path: str) -> str:
    """The picture that the command draws."""
    with tempfile.TemporaryDirectory() as folder:
        _run(command, folder)
        return (Path(folder) / Path(path).name).read_text("utf-8")


def photograph() -> None:
    """Take the picture of the page again."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        print(f"there is no chromium here: {PAGE.relative_to(ROOT)} stays as it is")
        return
    with tempfile.TemporaryDirectory() as folder:
        _run(SHOWN_PAGE, folder)
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        subprocess.run(
            [chromium, *options, "--window-size=1180,1660", f"--screenshot={PAGE}", f"file://{folder}/plan.html"],
            check=True,
            capture_output=True,
        )
    print(f"wrote {PAGE.relative_to(ROOT)}")


def published_table() -> str:
    """The rows of RUNS: layout, measured seconds of a step, those of a forecast whose constants had
    not seen the run, source."""
    from tests.cross_validation import read_record
    from tests.published import CROSS_VALIDATED, published_runs

    record, runs = read_record(CROSS_VALIDATED), {run.id: run for run in published_runs()}
    rows = ["| published run | layout | measured | forecast | | source |\n|---|---|--:|--:|--:|---|\n"]
    for key, (name, source) in RUNS.items():
        run, error = runs[key], exp(record.fifths[key][0])
        job, seconds = run.job, run.measured["step_seconds"]
        sizes = {**job.sizes, "vpp": job.parallel.vpp}
        axes = ("tp", "cp", "pp", "vpp", "dp")
        layout = " ".join(f"{axis} {sizes[axis]}" for axis in axes if sizes[axis] > 1)
        rows.append(
            f"| {name} | {layout} | {seconds:.2f} s | {seconds * error:.2f} s | {error - 1:+.0%} "
            f"| {source} |\n".replace("%", " %")
        )
    return "".join(rows)


def _run(command: str, folder: str) -> str:
    """stdout and stderr of a command in a folder, as wide as where there is no terminal."""
    kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "MPCTL_PRESETS")}
    done = subprocess.run(
        [sys.executable, "-m", "mpctl", *shlex.split(command)[1:]],
        cwd=folder,
        env={**kept, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        check=False,
    )
    return done.stdout


def main(*, slow: bool) -> None:
    """Write the blocks and the pictures."""

    def block(match: re.Match[str]) -> str:
        if is_slow(match[1]) and not slow:
            return match[0]
        return f"```\n$ {match[1]}\n{shown(match[1])}```"

    for page in (*PAGES, *LAUNCHERS):
        page.write_text(SHOWN.sub(block, page.read_text("utf-8")), "utf-8")
        print(f"wrote {page.relative_to(ROOT)}")
    text = README.read_text("utf-8")
    README.write_text(TABLE.sub(lambda m: m[1] + published_table() + m[3], text), "utf-8")
    for path, command in pictures("\n".join(page.read_text("utf-8") for page in PAGES)).items():
        (ROOT / path).write_text(drawn(command, path), "utf-8")
        print(f"wrote {path}")
    photograph()


if __name__ == "__main__":
    main(slow="--slow" in sys.argv)
