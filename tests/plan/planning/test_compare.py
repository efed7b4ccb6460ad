"""Plans side by side: one global batch, and what each costs over the first."""

from __future__ import annotations

from pathlib import Path

from mpctl.plan.planning.compare import CompareDocument, compare_document, load_variants
from mpctl.plan.planning.plan import load_plan

FLAGS = {"model": "llama-3-8b", "cluster": "dgx-h100", "cluster.nodes": 1, "training.runtime": "megatron-core"}
JOB = """\
[cluster]
preset = "dgx-h100"
nodes = 1
[model]
preset = "llama-3-8b"
[training]
runtime = "megatron-core"
"""


def compared(folder: Path, *others: str, more: str = "") -> CompareDocument:
    job = folder / "job.toml"
    job.write_text(JOB + more, "utf-8")
    return compare_document(load_variants([str(job), *others], {}))


def test_layouts_of_an_open_batch_share_the_smallest_that_all_can_run(tmp_path: Path) -> None:
    """8 GPUs: dp 8 runs 8 samples, tp 2 and dp 4 runs 4, or with micro batches of 3 samples 12."""
    document = compared(tmp_path, "tp=2", "tp=2,micro_batch_size=3")
    assert [entry["global_batch_size"] for entry in document["training"]] == [24, 24, 24]
    assert {note[-1]["rule"] for note in document["warnings"]} == {"one-global-batch"}
    alone = load_plan(str(tmp_path / "job.toml"), {"tp": 2, "global_batch_size": 24}).estimate
    assert alone is not None and not isinstance(alone.time, str)
    assert document["figures"][1]["step_seconds"] == alone.time.total


def test_a_batch_that_is_given_stays(tmp_path: Path) -> None:
    document = compared(tmp_path, "tp=2", "tp=2,global_batch_size=4", more="global_batch_size = 16\n")
    assert [entry["global_batch_size"] for entry in document["training"]] == [16, 16, 4]
    assert not any(note["rule"] == "one-global-batch" for notes in document["warnings"] for note in notes)


def test_each_says_what_it_costs_over_the_first_and_whether_that_is_a_tie(tmp_path: Path) -> None:
    others = ("tp=4,dp=2,zero=1", "tp=4,dp=2,pp=1,recompute=full", "tp=8", "tp=4,dp=2,global_batch_size=16")
    document = compared(tmp_path, *others, more="[parallel]\ntp = 4\n")
    first, *costs = document["costs"]
    steps = [figures["step_seconds"] or 0.0 for figures in document["figures"]]
    assert first == ""
    for cost, step in zip(costs[:3], steps[1:], strict=False):
        share = abs(step / steps[0] - 1)
        assert f"({share:.1%}) {'slower' if step > steps[0] else 'faster'}" in cost
        assert ("cannot tell apart" in cost) == (share <= 0.04)
    assert "less memory" in costs[1] and "tp +" in costs[2]
    assert "cannot tell apart" not in costs[3]  # another batch
    for figures, step in zip(document["figures"], steps, strict=True):
        assert (figures["low_seconds"] or 0) < step < (figures["high_seconds"] or 0)
    assert document["is_measured"] == [True] * 5


def test_costs_are_empty_where_a_step_is_not_known(tmp_path: Path) -> None:
    job = tmp_path / "unknown.toml"
    job.write_text('[cluster]\nnodes = 1\ngpus_per_node = 2\n[model]\npreset = "gpt2"\n', "utf-8")
    document = compare_document(load_variants([str(job), "tp=2"], {}))
    assert document["costs"] == ["", ""] and "low_seconds" not in document["figures"][0]


def test_jobs_of_other_files_share_a_batch_or_are_compared_by_their_rates(tmp_path: Path) -> None:
    """As in a gate of CI: with half the replicas a step has half the samples."""
    base = tmp_path / "base.toml"
    base.write_text(JOB + "[parallel]\ntp = 4\n", "utf-8")
    shared = compared(tmp_path, str(base))
    assert [entry["global_batch_size"] for entry in shared["training"]] == [8, 8]
    own = compared(tmp_path, str(base), more="global_batch_size = 64\n")
    assert "tokens/s, at 2 instead of 64 samples a step" in own["costs"][1]
    assert own["warnings"][1][-1]["rule"] == "batches-differ"
    odd = compare_document(load_variants([f"nodes={nodes}" for nodes in (1, 7, 11, 13)], FLAGS, ("llama", {})))
    assert [entry["global_batch_size"] for entry in odd["training"]] == [8, 8, 56, 88, 104]


def test_a_cost_says_what_does_not_fit_and_calls_no_tie_then(tmp_path: Path) -> None:
    (_, tie), (_, four) = (
        (d["costs"][0], d["costs"][1]) for d in (compared(tmp_path, "tp=1"), compared(tmp_path, "tp=8"))
    )
    assert tie.endswith("job.toml does not fit; does not fit") and "cannot tell" not in tie
    assert four.endswith("job.toml does not fit")


def test_a_path_may_hold_what_settings_have(tmp_path: Path) -> None:
    folder = tmp_path / "lr=1,wd=0"
    folder.mkdir()
    (folder / "job.toml").write_text(JOB, "utf-8")
    document = compare_document(load_variants([str(folder / "job.toml"), "tp=4"], {}))
    assert document["settings"]["parallel.tp"] == [1, 4]


def test_a_model_alone_is_compared_by_its_first_settings() -> None:
    document = compare_document(load_variants(["tp=8", "tp=4"], FLAGS, ("llama-3-8b", {}), shows_read=False))
    assert document["jobs"] == ["tp=8", "tp=4"] and document["settings"]["parallel.tp"] == [8, 4]
