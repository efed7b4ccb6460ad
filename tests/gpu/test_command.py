"""`python -m benchmarks.gpu` without a device, and the page that it writes with one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/gpu.md"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure for ten minutes")
def test_without_a_device_nothing_is_measured_and_the_page_stays() -> None:
    before = PAGE.read_bytes()
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu"], cwd=ROOT, capture_output=True,
                          text=True, timeout=120)  # fmt: skip
    assert done.returncode == 1 and "no CUDA device: nothing was measured" in done.stderr
    assert PAGE.read_bytes() == before


def test_the_page_has_each_part_that_is_written_once() -> None:
    text = PAGE.read_text("utf-8")
    parts = re.findall(r"<!-- measured: (\w+) -->\n(.+?)\n<!-- end -->", text, re.S)
    assert [name for name, _ in parts] == ["machine", "training", "goals"]
    assert text.count("<!-- end -->") == 3


@pytest.mark.slow
def test_the_script_works_on_small_models(tmp_path: Path) -> None:
    """Ours and a peer, on a CPU where there is no GPU; the tables are printed."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--no-tests", "--only",
               "llama-8b-tp8 ", "--json", str(tmp_path / "figures.json")]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "llama-8b-tp8, torch, bf16 with float32 masters, compiled: " in done.stderr
    assert (
        len(re.findall(r"^\| llama-8b-tp8 \| (?:mpctl|torch): .* \d[\d,]* \|", done.stdout, re.M))
        == 3
    )
    assert "failed" not in done.stdout and (tmp_path / "figures.json").exists()
