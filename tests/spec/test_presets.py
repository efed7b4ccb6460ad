"""Every preset loads strictly, says where its numbers come from, and has the published size."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.core.errors import InputError
from mpctl.plan.planning.plan import make_plan
from mpctl.spec.cluster import ClusterSpec, DeviceSpec
from mpctl.spec.load import job_from_raw, load_job
from mpctl.spec.model import ModelSpec
from mpctl.spec.parallel import ParallelSpec
from mpctl.spec.presets import KINDS, find_preset, get_file, preset_names
from tests.model.families.hub_models import MODELS

GIB = 2**30
DEMOS = {"demo-gpt", "demo-llama", "demo-bert", "demo-t5", "demo-glm", "demo-moe"}


def table(kind: Any, name: str) -> dict[str, Any]:
    found = find_preset(kind, name)
    assert found is not None
    return found


def model_of(name: str) -> ModelSpec:
    model = load_job(None, {"model": name}).model
    assert model is not None
    return model


def cluster_of(name: str) -> ClusterSpec:
    return load_job(None, {"cluster": name}).cluster


def test_a_preset_says_where_its_numbers_come_from() -> None:
    for kind in KINDS:
        key = "description" if kind == "jobs" else "source"
        short = [name for name in preset_names(kind) if len(table(kind, name)[key].strip()) <= 20]
        assert short == [], kind


def test_devices_are_strict_and_dense() -> None:
    for name in preset_names("devices"):
        device = DeviceSpec.model_validate(table("devices", name))
        peaks = device.peak_flops
        assert device.memory_bytes >= 8 * GIB
        assert device.memory_bandwidth is not None
        assert "fp32" in peaks
        # A figure with 2:4 sparsity beside a dense one would break these ratios of the hardware.
        if device.kind == "cuda":
            assert peaks.get("bf16", peaks["fp16"]) == peaks["fp16"]
            assert peaks.get("tf32", peaks["fp16"] / 2) == pytest.approx(peaks["fp16"] / 2, rel=0.02)
            for eight_bit in ("fp8", "mxfp8"):
                told = peaks.get(eight_bit, peaks["fp16"] * 2)
                assert told == pytest.approx(peaks["fp16"] * 2, rel=0.02)
            assert 3.99 < peaks.get("nvfp4", peaks["fp16"] * 4) / peaks["fp16"] <= 6.01


def test_clusters_are_strict_and_name_a_device_preset() -> None:
    for name in preset_names("clusters"):
        assert table("clusters", name)["device"] in preset_names("devices")
        cluster = cluster_of(name)
        assert cluster.device is not None
        assert cluster.gpus_per_node is not None
        assert cluster.intra_node is not None
        if cluster.inter_node is not None:  # per GPU, no network here outruns the link inside a node
            per_gpu = cluster.inter_node.bandwidth / cluster.gpus_per_node
            assert per_gpu < cluster.intra_node.bandwidth


# Preset, GPUs of a node, bytes per second inside a node and between nodes.
LINKS = (
    ("selene", 8, 300e9, 8 * 200e9 / 8),
    ("dgx2-v100", 16, 150e9, 8 * 100e9 / 8),
    ("jean-zay", 8, 300e9, 4 * 100e9 / 8),
    ("vtrain-a100", 8, 300e9, 4 * 200e9 / 8),
    ("zb-a100-roce", 8, 300e9, 4 * 200e9 / 8),
    ("megascale-a100", 8, 300e9, 8 * 200e9 / 8),
    ("b200-node", 8, 900e9, None),
    ("grand-teton-h100", 8, 450e9, 8 * 400e9 / 8),
    ("h200-cx7", 8, 450e9, 8 * 400e9 / 8),
    ("llama3-h100", 8, 450e9, 8 * 400e9 / 8),
    ("mosaic-a100-40gb", 8, 300e9, 1600e9 / 8),
    ("dgx-2x8", 8, 300e9, 8 * 200e9 / 8),
    ("dgx-b200", 8, 900e9, 8 * 400e9 / 8),
    ("dgx-b300", 8, 900e9, 8 * 800e9 / 8),
    ("dgx-gb200", 4, 900e9, 4 * 400e9 / 8),
    ("dgx-gb300", 4, 900e9, 4 * 800e9 / 8),
    ("hf-h100", 8, 450e9, 32 * 100e9 / 8),
    ("gcp-a3mega-h100", 8, 450e9, 8 * 200e9 / 8),
    ("ibm-a100", 8, 300e9, 400e9 / 8),
    ("deepseek-h800", 8, 200e9, 8 * 400e9 / 8),
)


def test_links_are_bytes_a_second_in_one_direction() -> None:
    for name, *wanted in LINKS:
        c = cluster_of(name)
        between = c.inter_node and c.inter_node.bandwidth
        assert c.intra_node is not None
        assert [c.gpus_per_node, c.intra_node.bandwidth, between] == wanted, name


def parameters(m: ModelSpec) -> int:
    """Parameters of the released model, written out matrix by matrix.

    The word table counts its existing tokens, but for t5, whose released table is padded to 128.
    """
    size, bias = m.head_size, 1 if m.bias else 0
    query, keys = m.heads * size, m.kv_heads * size
    norm = m.hidden * (2 if m.norm == "layernorm" else 1)
    attention = 2 * m.hidden * query + 2 * m.hidden * keys + bias * (query + 2 * keys + m.hidden)
    up = 2 if m.gated else 1
    mlp = (up + 1) * m.hidden * m.ffn + bias * (up * m.ffn + m.hidden)
    if m.experts is not None:  # in every layer
        mlp = m.experts * (mlp + m.hidden)
    block = attention + mlp + (4 if m.norm_order == "sandwich" else 2) * norm
    words = m.vocab * m.hidden * (1 if m.tied_embeddings else 2)
    if m.family == "bert":  # two segments, norm of the embeddings, pooler
        rest = (m.max_positions + 2) * m.hidden + norm + m.hidden**2 + m.hidden
        return m.layers * block + words + rest
    if m.family == "glm":  # two position tables
        return m.layers * block + words + 2 * m.max_positions * m.hidden + norm
    if m.family == "t5":
        assert m.decoder_layers is not None
        decoder = m.decoder_layers * (block + attention + norm)
        buckets, padded = 2 * 32 * m.heads, -(-m.vocab // 128) * 128 * m.hidden
        return m.layers * block + decoder + 2 * norm + buckets + padded
    positions = m.max_positions * m.hidden if m.position == "learned" else 0
    return m.layers * block + words + positions + norm


# Published count and the relative tolerance that its rounding, or a detail named here, leaves.
PUBLISHED: dict[str, tuple[float, float]] = {
    "gpt2": (124_439_808, 0),  # the released checkpoints, to the parameter
    "gpt2-medium": (354_823_168, 0),
    "gpt2-large": (774_030_080, 0),
    "gpt2-xl": (1_557_611_200, 0),
    "bert-base": (109_482_240, 0),
    "bert-large": (335_141_888, 0),
    "t5-base": (222_903_552, 0),
    "t5-large": (737_668_096, 0),  # "770 million" in the paper
    "llama-2-7b": (6_738_415_616, 0),
    "llama-3-8b": (8_030_261_248, 0),
    "llama-3-70b": (70_553_706_496, 0),
    "llama-3-405b": (405e9, 0.003),
    "gpt3-175b": (174.6e9, 0.001),  # arXiv 2104.04473, Table 2
    "megatron-1.2b": (1.2e9, 0.02),
    "megatron-2.5b": (2.5e9, 0.01),
    "megatron-4.2b": (4.2e9, 0.01),
    "megatron-8.3b": (8.3e9, 0.005),
    "grok-1": (314e9, 0.006),  # its announcement
    "glm-base": (110e6, 0.01),
    "glm-large": (335e6, 0.003),
}


def test_models_have_their_published_sizes() -> None:
    for name in PUBLISHED:
        published, tolerance = PUBLISHED[name]
        size = pytest.approx(published, rel=tolerance, abs=0.5)
        assert parameters(model_of(name)) == size, name


def test_every_model_preset_is_held_against_a_published_size() -> None:
    """Those of tests/model/families/hub_models.py are held to it in tests/model/families/test_hub.py."""
    assert set(preset_names("models")) - set(PUBLISHED) - set(MODELS) == DEMOS


def test_jobs_fill_their_world_and_divide_their_batch() -> None:
    for name in preset_names("jobs"):
        job = load_job(name)
        sizes = job.sizes
        assert sizes["tp"] * sizes["cp"] * sizes["dp"] * sizes["pp"] == job.world_size
        per_pass = job.training.micro_batch_size * sizes["dp"]
        assert job.training.global_batch_size == per_pass * job.num_microbatches
        assert job.model is not None
        p = job.parallel
        layers = job.model.all_layers + p.embedding_is_layer + p.loss_is_layer
        assert p.stage_balance == "cost" or layers % (sizes["pp"] * p.vpp) == 0
        assert job.model.heads % sizes["tp"] == 0


LAYOUTS = {
    "two-nodes-16-gpus": (16, {"tp": 2, "cp": 1, "dp": 2, "pp": 4}),
    "megatron-8.3b-512": (512, {"tp": 8, "cp": 1, "dp": 64, "pp": 1}),
    "tp8-dp192": (1536, {"tp": 8, "cp": 1, "dp": 192, "pp": 1}),
    "gpt3-175b-1024": (1024, {"tp": 8, "cp": 1, "dp": 8, "pp": 16}),
    "deepseek-v3-2048": (2048, {"tp": 1, "cp": 1, "dp": 128, "pp": 16}),
    "qwen3-235b-256": (256, {"tp": 2, "cp": 1, "dp": 16, "pp": 8}),
    "demo": (2, {"tp": 2, "cp": 1, "dp": 1, "pp": 1}),
}


def test_layouts_of_job_presets() -> None:
    found = {name: load_job(name) for name in LAYOUTS}
    assert {name: (job.world_size, job.sizes) for name, job in found.items()} == LAYOUTS


def test_deepseeks_own_run_fits_and_is_as_fast_as_published() -> None:
    """arXiv 2412.19437, section 1: 2.664 M hours of H800 for 14.8 T tokens, so 3.16 M tokens/s on
    2,048 of them; the plan says 2.93."""
    published = 14.8e12 * 2048 / (2.664e6 * 3600)
    plan = make_plan(load_job("deepseek-v3-2048"))
    assert plan.fits and plan.estimate is not None
    assert plan.estimate.tokens_per_second == pytest.approx(published, rel=0.15)


def published(**tables: Any) -> dict[str, Any]:
    return tables


# Rows as published, in the keys of a job file: paper's table, layout, what ran it.
PUBLISHED_RUNS = {
    "arXiv 2104.04473, Table 1, 18.4B": published(
        cluster={"preset": "selene", "nodes": 32, "gpus_per_node": 8},
        model={
            "family": "gpt",
            "layers": 40,
            "hidden": 6144,
            "ffn": 24576,
            "heads": 48,
            "kv_heads": 48,
            "head_dim": 128,
            "vocab": 51200,
            "seq_length": 2048,
            "activation": "gelu",
            "tied_embeddings": True,
            "position": "learned",
            "attention": "unfused",
        },
        parallel={"tp": 8, "pp": 1, "vpp": 1, "cp": 1, "dp": 32, "zero": 0, "schedule": "1f1b"},
        training={"global_batch_size": 1024, "dtype": "fp16", "recompute": "full", "runtime": "megatron-2021"},
    ),
    "arXiv 1909.08053, Table 1, 8.3B": published(
        cluster={"preset": "dgx2-v100", "nodes": 32},
        model={"preset": "megatron-8.3b", "attention": "unfused"},
        parallel={"tp": 8, "pp": 1, "dp": 64, "sequence_parallel": False},
        training={
            "micro_batch_size": 8,
            "global_batch_size": 512,
            "dtype": "fp16",
            "recompute": "full",
            "runtime": "megatron-2020",
        },
    ),
    "torchtitan, December 2024, Table 1, FSDP": published(
        cluster={"preset": "grand-teton-h100", "nodes": 1, "gpus_per_node": 8},
        model="llama-3-8b",
        parallel={"tp": 1, "dp": 8, "zero": 3},
        training={
            "micro_batch_size": 2,
            "global_batch_size": 16,
            "dtype": "bf16",
            "recompute": "selective",
            "runtime": "torchtitan",
        },
    ),
}


@pytest.mark.parametrize("source", PUBLISHED_RUNS)
def test_a_published_run_is_a_job(source: str) -> None:
    raw = PUBLISHED_RUNS[source]
    job = job_from_raw(raw, {})
    sizes = job.sizes
    assert sizes["tp"] * sizes["cp"] * sizes["dp"] * sizes["pp"] == job.world_size
    assert job.cluster.device is not None  # from the preset, beside the row's own nodes
    assert job.cluster.nodes == raw["cluster"]["nodes"]


def test_runtimes_of_job_presets_are_known() -> None:
    runtimes = {load_job(name).training.runtime for name in preset_names("jobs")}
    assert runtimes <= set(preset_names("runtimes"))
    assert ParallelSpec().order == "tp-cp-dp-pp"


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(InputError) as caught:
        get_file("models", "gpt-2", where="model")
    (issue,) = caught.value.issues
    assert issue.rule == "unknown-preset"
    assert "'gpt-2'" in issue.message
    assert "gpt2" in issue.hint


@pytest.mark.parametrize("name", ["../devices/cpu", "/nowhere/gpt2", "", "gpt2.toml", "..", "*"])
def test_a_name_is_never_looked_for_outside_of_its_folder(name: str) -> None:
    assert find_preset("models", name) is None


def test_a_llama_turns_by_its_own_base() -> None:
    """arXiv 2407.21783, Table 3: RoPE (theta = 500,000); Llama 2's params.json names none."""
    bases = {"llama-2-7b": 1e4, "llama-3-8b": 5e5, "llama-3-70b": 5e5, "llama-3-405b": 5e5}
    assert {name: model_of(name).rotary_base for name in bases} == bases
