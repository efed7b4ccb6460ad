"""The published runs of systems that no preset was fitted to are read, legal, and fit."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.outside import outside_run, read_rows, settings_of

# 32 micro batches fill all of 8,192 GPUs' chunks: docs/recipes.md says which kernels leave room.
NO_ROOM = ("Llama 3 405B 8192 H100, 8192 tokens",)


def test_every_row_is_a_published_run_of_its_own() -> None:
    rows = read_rows()
    assert len({row["id"] for row in rows}) == len(rows) >= 40
    for row in rows:
        assert {"id", "system", "args", "published", "unit", "source"} <= set(row)
        assert row["unit"] in {"s", "tok"}, row["id"]
        assert row["published"] > 0
    systems = Counter(row["system"] for row in rows)
    assert len(systems) >= 12, systems


@pytest.mark.parametrize("name", [row["id"] for row in read_rows()])
def test_a_run_that_ran_is_legal_and_fits(name: str) -> None:
    run = outside_run(name)
    assert run.plan.errors == []
    assert run.plan.fits is (run.id not in NO_ROOM)
    assert 0.4 < 1 + run.error < 2.5, "a row that was read wrong"


def test_arguments_are_read_as_the_command_line_reads_them() -> None:
    words = [
        "--set",
        "model.layers=4",
        "--tp",
        "2",
        "--no-sequence-parallel",
        "--runtime",
        "fsdp",
        "--cluster",
        "{clusters}/p4d.toml",
    ]
    settings = settings_of(words)
    assert settings.pop("cluster").endswith("recorded/clusters/p4d.toml")
    assert settings == {
        "model.layers": 4,
        "parallel.tp": 2,
        "parallel.sequence_parallel": False,
        "training.runtime": "fsdp",
    }


def test_an_error_and_a_band_are_those_of_a_published_step() -> None:
    """InternLM's first row: 4,062 tokens/s a GPU, 64 x 2,048 tokens on 8 GPUs are 4.03 s."""
    run = outside_run("InternLM-7B tp1 zero1 8 A100")
    assert run.seconds == pytest.approx(64 * 2048 / 8 / 4062)
    assert run.plan.estimate is not None
    time = run.plan.estimate.time
    assert run.error == pytest.approx(time.total / 4.0335 - 1, abs=1e-4)
    assert run.in_band == (time.low <= run.seconds <= time.high)
