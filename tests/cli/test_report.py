"""`mpctl report`: one page on the layout to run."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from shutil import which

import pytest

from mpctl.core.units import count_text, days_text
from tests.cli.calls import Mpctl
from tests.cli.test_documents import require_valid

JOB = ("--model", "gpt2", "--cluster", "dgx-h100", "--nodes", 1, "--runtime", "megatron-core", "--tokens", "10B")
BATCH = ("--pp", 1, "--cp", 1, "--global-batch-size", 64, "--price", 2)


def test_a_report_recommends_what_a_search_suggests(mpctl: Mpctl, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    document = mpctl("report", *JOB, *BATCH, "--json", "--out", page).document
    require_valid(document)
    search = mpctl("search", *JOB, *BATCH, "--json").document
    best, risk = document["recommended"], document["risk"]
    assert best == search["suggested"]
    days = best["run"]["days"] - search["fastest"]["run"]["days"]
    price = best["run"]["price"] - search["fastest"]["run"]["price"]
    assert (
        f"slower than the fastest ({days_text(days)}, price {count_text(price)} more), within" in search["suggestion"]
    )
    assert len(document["others"]) == 2 and best["layout"] not in {other["layout"] for other in document["others"]}
    assert risk["low_seconds"] < best["step_seconds"] < risk["high_seconds"] and risk["is_measured"]
    assert 0 < risk["kept_back"] < 0.5 and best["run"]["price"] == pytest.approx(2 * best["run"]["gpu_hours"])
    assert all(other["price"] == pytest.approx(2 * 8 * 24 * other["days"], rel=0.1) for other in document["others"])
    said = mpctl("report", *JOB, *BATCH).out
    for text in (best["layout"], "Why not the next two", "Risk", "Measure first", "mpctl emit"):
        assert text in page.read_text("utf-8") and text in said


def test_a_system_never_measured_is_said_to_be_none(mpctl: Mpctl) -> None:
    document = mpctl("report", "--model", "gpt2", "--gpus", "4xrtx-4090", "--runtime", "fsdp2", "--json").document
    assert document["measure_first"][0] == "five runs of a few steps, given to `mpctl calibrate`"
    assert not document["risk"]["is_measured"] and "run" not in document["recommended"]


def test_words_of_a_job_are_escaped(mpctl: Mpctl, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    mpctl("report", *JOB, *BATCH, "--set", "model.name=<script>alert(1)</script>", "--out", page)
    assert "<script" not in page.read_text("utf-8")


@pytest.mark.slow
@pytest.mark.skipif(which("chromium") is None, reason="no chromium")
def test_it_prints_on_one_sheet(mpctl: Mpctl, tmp_path: Path) -> None:
    page, pdf = tmp_path / "report.html", tmp_path / "report.pdf"
    mpctl("report", *JOB, *BATCH, "--out", page)
    line = ["chromium", "--headless", "--no-sandbox", "--no-pdf-header-footer", f"--print-to-pdf={pdf}", page.as_uri()]
    subprocess.run(line, check=True, capture_output=True, timeout=120)
    assert len(re.findall(rb"/Type\s*/Page[^s]", pdf.read_bytes())) == 1
