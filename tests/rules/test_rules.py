"""Each rule once kept and once broken: a broken one says value, bound and a way out."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import mpctl.rules
from mpctl.errors import Offer
from mpctl.pipeline.schedule import legality
from mpctl.planning.plan import make_plan
from mpctl.rules.check import Check, divides, listed, way_out
from tests.jobs import answers, job_of

TWO_NODES = {"cluster.nodes": 2, "cluster.gpus_per_node": 8}
T5 = {
    "model.family": "t5",
    "model.position": "relative",
    "model.decoder_layers": 12,
    "model.decoder_seq_length": 256,
}
LLAMA_3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position": 8192.0}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """kept, broken: settings; says: what the message must name; hint: what the way out must."""

    rule: str
    kept: dict[str, Any]
    broken: dict[str, Any]
    where: str
    says: tuple[str, ...]
    hint: str
    status: str = "error"


CASES = (
    Case(
        "recompute-full",
        {"training.recompute": "full", "training.offload_activations": True},
        {"training.recompute": "selective", "training.offload_activations": True},
        "training.offload_activations",
        ("true", "recompute is selective"),
        r"recompute full",
    ),
    Case(
        "partition-or-sequence",
        {"training.recompute": "full", "training.partition_activations": True},
        {
            **TWO_NODES,
            "parallel.tp": 2,
            "parallel.sequence_parallel": True,
            "training.recompute": "full",
            "training.partition_activations": True,
        },
        "training.partition_activations",
        ("true", "sequence parallelism"),
        r"--no-sequence-parallel",
    ),
    Case(
        "world-size",
        {"cluster.nodes": 2**21, "cluster.gpus_per_node": 8},
        {"cluster.nodes": 10**9, "cluster.gpus_per_node": 8},
        "cluster.nodes",
        ("8,000,000,000 ranks",),
        r"at most 16,777,216 ranks",
    ),
    Case(
        "schedule-vpp",
        {
            "parallel.pp": 2,
            "parallel.vpp": 2,
            "parallel.schedule": "interleaved",
            "training.global_batch_size": 4,
        },
        {
            "parallel.pp": 2,
            "parallel.vpp": 2,
            "parallel.schedule": "gpipe",
            "training.global_batch_size": 4,
        },
        "parallel.schedule",
        ("gpipe", "2 chunks"),
        r"interleaved or 1f1b",
    ),
    Case(
        "world-size",
        {**TWO_NODES, "parallel.tp": 2},
        {**TWO_NODES, "parallel.tp": 3},
        "parallel",
        ("tp 3", "= 3", "2 nodes x 8 GPUs = 16"),
        r"tp 1, 2 or 4; or a multiple of 3 nodes",
    ),
    Case(
        "world-size",
        {**TWO_NODES, "parallel.tp": 2, "parallel.dp": 8},
        {**TWO_NODES, "parallel.tp": 2, "parallel.dp": 3},
        "parallel.dp",
        ("dp 3", "= 6 ranks", "16 ranks"),
        r"dp 8$",
    ),
    Case(
        "axis-order",
        {"parallel.order": "dp-tp"},
        {"parallel.order": "tp-tp-xp"},
        "parallel.order",
        ("'tp-tp-xp'", "unknown xp", "repeated tp"),
        r"tp, cp, dp, pp once",
    ),
    Case(
        "axis-order",
        {**TWO_NODES, "parallel.tp": 2, "parallel.order": "tp-dp"},
        {**TWO_NODES, "parallel.tp": 2, "parallel.order": "tp-pp"},
        "parallel.order",
        ("'tp-pp'", "missing dp"),
        r"tp, cp, dp, pp once",
    ),
    Case(
        "tp-within-node",
        {**TWO_NODES, "parallel.tp": 4},
        {**TWO_NODES, "parallel.tp": 4, "parallel.order": "dp-tp"},
        "parallel.tp",
        ("4 tensor-parallel groups", "8 GPUs", "[0, 4, 8, 12]"),
        r"tp 1, 2, 4 or 8 .*--allow-tp-across-nodes",
    ),
    Case(
        "tp-within-node",
        {**TWO_NODES, "parallel.tp": 8, "model.heads": 16},
        {
            **TWO_NODES,
            "parallel.tp": 16,
            "model.heads": 16,
            "parallel.allow_tp_across_nodes": True,
        },
        "parallel.tp",
        ("1 tensor-parallel group leaves its node of 8",),
        r"tp 1, 2, 4 or 8",
        status="warning",
    ),
    Case(
        "vpp-needs-pp",
        {"parallel.vpp": 2, "parallel.pp": 2, "training.global_batch_size": 2},
        {"parallel.vpp": 2},
        "parallel.vpp",
        ("2 chunks", "pp is 1"),
        r"use vpp 1; or pp 2, 3 or 4",
    ),
    Case(
        "microbatches-fill-pipeline",
        {"parallel.vpp": 2, "parallel.pp": 2, "training.global_batch_size": 6},
        {"parallel.vpp": 2, "parallel.pp": 2, "training.global_batch_size": 5},
        "training.global_batch_size",
        ("5 micro batches", "2 interleaved stages"),
        r"multiple of 2 micro batches",
    ),
    Case(
        "layers-per-stage",
        {"parallel.pp": 4},
        {"parallel.pp": 5},
        "model.layers",
        ("12 layers", "5 stages"),
        r"pp 3, 4 or 6; or parallel.stage_balance cost; or model.layers 10 or 15",
    ),
    Case(
        "layers-per-stage",
        {"parallel.pp": 5, "parallel.stage_balance": "cost"},
        {"parallel.pp": 13, "parallel.stage_balance": "cost"},
        "model.layers",
        ("12 layers", "13 stages"),
        r"use 13 layers or more",
    ),
    Case(
        "layers-per-stage",
        {"parallel.pp": 3, "parallel.first_stage_layers": 4},
        {"parallel.pp": 3, "parallel.first_stage_layers": 12},
        "model.layers",
        ("12 layers", "cannot fill"),
        r"fewer stages or more layers",
    ),
    Case(
        "layers-per-stage",
        {**T5, "model.decoder_layers": 6, "parallel.pp": 3},
        {**T5, "model.decoder_layers": 7, "parallel.pp": 3},
        "model.layers",
        ("19 layers", "3 stages"),
        r"model.layers 11 or 14",
    ),
    Case(
        "stage-balance",
        {"parallel.pp": 4, "model.vocab": 512},
        {"parallel.pp": 4},  # a head of 4.47 layers: 3 + 4.47 against 1 + 4.47
        "parallel",
        ("stage 3", "1.37 times", "above 1.1"),
        r"use parallel.stage_balance cost$",
        status="warning",
    ),
    Case(
        "stage-balance",
        {"parallel.pp": 4, "parallel.stage_balance": "cost"},
        {**T5, "parallel.pp": 2, "model.decoder_seq_length": 64},
        "parallel",
        ("stage 0", "1.", "above 1.1"),
        r"use parallel.stage_balance cost$",
        status="warning",
    ),
    Case(
        "tensor-mode",
        {"parallel.tensor_mode": "2d", "parallel.tp": 4},
        {"parallel.tensor_mode": "2d", "parallel.tp": 6},
        "parallel.tp",
        ("6 ranks", "a square", "2d"),
        r"tp 1, 4, 9 or 16",
    ),
    Case(
        "tensor-mode",
        {"parallel.tensor_mode": "3d", "parallel.tp": 8, "model.heads": 16},
        {"parallel.tensor_mode": "3d", "parallel.tp": 4},
        "parallel.tp",
        ("4 ranks", "a cube", "3d"),
        r"tp 1, 8 or 27",
    ),
    Case(
        "zero-needs-dp",
        {"parallel.dp": 2, "parallel.zero": 1},
        {"parallel.dp": 1, "parallel.zero": 1},
        "parallel.zero",
        ("ZeRO 1", "dp and cp are 1"),
        "",
        status="warning",
    ),
    Case(
        "decoder-layers",
        T5,
        {**T5, "model.decoder_layers": None},
        "model.decoder_layers",
        ("family t5 needs",),
        r"use 12",
    ),
    Case(
        "decoder-layers",
        {},
        {"model.decoder_layers": 3},
        "model.decoder_layers",
        ("family gpt", "3 layers"),
        r"leave it out, or use family t5",
    ),
    Case(
        "decoder-length",
        T5,
        {**T5, "model.decoder_seq_length": None},
        "model.decoder_seq_length",
        ("family t5 needs",),
        r"use 229",  # span corruption of 1024 inputs
    ),
    Case(
        "decoder-length",
        {},
        {"model.decoder_seq_length": 64},
        "model.decoder_seq_length",
        ("family gpt", "64 tokens"),
        r"leave it out, or use family t5",
    ),
    Case(
        "cp-divides-decoder",
        {**T5, "parallel.cp": 2},
        {**T5, "parallel.cp": 2, "model.decoder_seq_length": 114},
        "model.decoder_seq_length",
        ("4", "114 decoder tokens"),
        r"multiple of 4",
    ),
    Case(
        "sp-divides-decoder",
        {**T5, "parallel.tp": 4, "parallel.sequence_parallel": True},
        {
            **T5,
            "parallel.tp": 4,
            "parallel.sequence_parallel": True,
            "model.decoder_seq_length": 114,
        },
        "model.decoder_seq_length",
        ("4", "114 decoder tokens"),
        r"multiple of 4",
    ),
    Case(
        "family-positions",
        {"model.position": "rotary"},
        {"model.family": "bert", "model.position": "rotary"},
        "model.position",
        ("bert", "rotary"),
        r"use learned",
    ),
    Case(
        "freeze-matches",
        {"training.freeze": ["embedding.*", "layers.[0-5].*", "*norm*", "layers.11.mlp.up.bias"]},
        {"training.freeze": ["embedding.*", "layers.12.*"]},
        "training.freeze",
        ("'layers.12.*'", "none of 148 parameters", "layers 0 to 11"),
        r"whole name, such as layers\.0\.",
    ),
    Case(
        "freeze-leaves-some",
        {"training.freeze": ["embedding.*", "layers.*"]},
        {"training.freeze": ["embedding.*", "layers.*", "final_norm.*"]},
        "training.freeze",
        ("'embedding.*' with 'layers.*' with 'final_norm.*'", "148 of 148", "nothing is trained"),
        r"leave out a pattern",
    ),
    Case(
        "shortest-sequence",
        {"model.family": "bert", "model.seq_length": 5},
        {"model.family": "bert", "model.seq_length": 4},
        "model.seq_length",
        ("4 is too short", "bert"),
        r"use 5",
    ),
    Case(
        "family-norms",
        {"model.family": "bert", "model.norm_order": "post"},
        {"model.norm_order": "post"},
        "model.norm_order",
        ("gpt", "before"),
        r"use pre",
    ),
    Case(
        "family-kv-heads",
        T5,
        {**T5, "model.kv_heads": 4},
        "model.kv_heads",
        ("4", "12"),
        r"use 12",
    ),
    Case(
        "max-positions",
        {"model.max_positions": 1024},
        {"model.max_positions": 512},
        "model.max_positions",
        ("512", "1024"),
        r"at least 1024",
    ),
    Case(
        "heads-divide-hidden",
        {"model.head_dim": None},
        {"model.heads": 13},
        "model.heads",
        ("13", "768"),
        r"model.heads 8, 12 or 16; or give model.head_dim",
    ),
    Case(
        "tp-divides-heads",
        {"parallel.tp": 6},
        {"parallel.tp": 8},
        "parallel.tp",
        ("8 does not divide 12 attention heads",),
        r"use 1, 2, 3, 4, 6 or 12",
    ),
    Case(
        "kv-heads-divide-heads",
        {"model.kv_heads": 4},
        {"model.kv_heads": 5},
        "model.kv_heads",
        ("5 does not divide 12 attention heads",),
        r"use 1, 2, 3, 4, 6 or 12",
    ),
    Case(
        "tp-divides-kv-heads",
        {"parallel.tp": 2, "model.kv_heads": 4},
        {"parallel.tp": 3, "model.kv_heads": 4},
        "parallel.tp",
        ("3 neither divides 4 kv heads",),
        r"use 1, 2 or 4",  # not 12: 3 ranks cannot share 64 columns
    ),
    Case(
        "tp-divides-kv-heads",
        {"parallel.tp": 1, "model.kv_heads": 1, "model.head_dim": 7},
        {"parallel.tp": 2, "model.kv_heads": 1, "model.head_dim": 7},
        "parallel.tp",
        ("2 ranks share a kv head", "7 columns"),
        r"use 1$",
    ),
    Case(
        "min-rate",
        {"training.learning_rate": 1e-5, "training.min_learning_rate": 1e-5},
        {"training.learning_rate": 1e-5, "training.min_learning_rate": 2e-5},
        "training.min_learning_rate",
        ("2e-05 is above learning_rate 1e-05",),
        r"use at most 1e-05",
    ),
    Case(
        "lr-decay-steps",
        {"training.lr_decay_steps": 20, "training.warmup_steps": 20},
        {"training.lr_decay_steps": 20, "training.warmup_steps": 21},
        "training.lr_decay_steps",
        ("20 steps end before the warm-up of 21",),
        r"at least 21",
    ),
    Case(
        "lr-decay-steps",
        {"training.lr_schedule": "linear", "training.lr_decay_steps": 20},
        {"training.lr_schedule": "constant", "training.lr_decay_steps": 20},
        "training.lr_decay_steps",
        ("constant has no decay",),
        r"lr_schedule linear, cosine or wsd",
    ),
    Case(
        "lr-wsd-decay-steps",
        {"training.lr_schedule": "wsd", "training.lr_wsd_decay_steps": 90},
        {"training.lr_schedule": "wsd", "training.lr_wsd_decay_steps": 91},
        "training.lr_wsd_decay_steps",
        ("91", "90", "until step 100"),
        r"use at most 90",
    ),
    Case(
        "lr-wsd-decay-steps",
        {"training.lr_schedule": "wsd", "training.lr_wsd_decay_steps": 9},
        {"training.lr_schedule": "wsd"},
        "training.lr_wsd_decay_steps",
        ("needs the length",),
        r"use 9,",
    ),
    Case(
        "lr-wsd-decay-steps",
        {},
        {"training.lr_wsd_decay_steps": 9},
        "training.lr_wsd_decay_steps",
        ("lr_schedule is cosine",),
        r"lr_schedule wsd",
    ),
    Case(
        "rotary-head-dim",
        {"model.position": "rotary", "model.head_dim": 8},
        {"model.position": "rotary", "model.head_dim": 7},
        "model.head_dim",
        ("7 is odd",),
        r"use 8",
    ),
    Case(
        "rotary-scaling",
        {"model.position": "rotary", "model.rotary_scaling": LLAMA_3},
        {"model.position": "rotary", "model.rotary_scaling": {**LLAMA_3, "high_freq_factor": 1.0}},
        "model.rotary_scaling.high_freq_factor",
        ("1 is not above low_freq_factor 1",),
        r"above 1",
    ),
    Case(
        "relative-buckets",
        {**T5, "model.relative_buckets": 8},
        {**T5, "model.relative_buckets": 7},
        "model.relative_buckets",
        ("7 buckets", "at least 4"),
        r"use 8",
    ),
    Case(
        "relative-distance",
        {**T5, "model.relative_buckets": 8, "model.relative_max_distance": 5},
        {**T5, "model.relative_buckets": 8, "model.relative_max_distance": 4},
        "model.relative_max_distance",
        ("4 is not above the 4",),
        r"use 5",
    ),
    Case(
        "tp-divides-kv-heads",
        {"parallel.tp": 4, "model.kv_heads": 4},
        {"parallel.tp": 4, "model.kv_heads": 2},
        "parallel.tp",
        ("2 kv heads are split over 2 ranks",),
        "",
        status="warning",
    ),
    Case(
        "tp-divides-ffn",
        {"parallel.tp": 4},
        {"parallel.tp": 4, "model.ffn": 3073},
        "parallel.tp",
        ("4 does not divide 3073 ffn columns",),
        r"use 1 or 7$",
    ),
    Case(
        "sequence-parallel-needs-tp",
        {"parallel.tp": 2, "parallel.sequence_parallel": True},
        {"parallel.sequence_parallel": True},
        "parallel.sequence_parallel",
        ("tp is 1",),
        r"tp 2, 3 or 4; or --no-sequence-parallel",
    ),
    Case(
        "cp-divides-sequence",
        {"parallel.cp": 4},
        {"parallel.cp": 3},
        "parallel.cp",
        ("6 does not divide 1024 tokens",),
        r"multiple of 6",
    ),
    Case(
        "tp-divides-sequence",
        {"parallel.tp": 2, "parallel.sequence_parallel": True},
        {"parallel.tp": 3, "parallel.sequence_parallel": True},
        "parallel.tp",
        ("3 does not divide 1024 tokens",),
        r"multiple of 3",
    ),
    Case(
        "batch-divides",
        {"parallel.dp": 2, "training.micro_batch_size": 4, "training.global_batch_size": 16},
        {"parallel.dp": 2, "training.micro_batch_size": 4, "training.global_batch_size": 18},
        "training.global_batch_size",
        ("18 samples", "micro batch 4 x dp 2 = 8"),
        r"global batch of 16 or 24; or micro batch 1, 3 or 9",
    ),
    Case(
        "dtype-on-device",
        {"cluster": "dgx-2x8", "training.dtype": "bf16"},
        {"cluster": "dgx-2x8", "training.dtype": "fp8"},
        "training.dtype",
        ("NVIDIA A100", "fp8"),
        r"known: .*bf16",
        status="warning",
    ),
    Case(
        "slow-dtype",
        {"cluster": "dgx-2x8", "training.dtype": "bf16"},
        {"cluster": "dgx-2x8", "training.dtype": "fp32"},
        "training.dtype",
        ("NVIDIA A100", "fp32", "bf16", "16 times"),
        r"use --dtype bf16",
        status="warning",
    ),
    Case(
        "memory-fits",
        {"cluster.device": "cpu"},
        {"cluster.device": "cpu", "model.hidden": 6144, "model.layers": 48},
        "parallel",
        ("stage 0 needs", "8.0 GiB", "above"),
        r"raise tp, pp or zero",
        status="warning",
    ),
)
ALWAYS_OK = {"vocab-padding"}


def checks_of(rule: str, settings: dict[str, Any]) -> list[Check]:
    if rule == "memory-fits":  # asked after the estimate, which needs every other rule kept
        return [check for check in make_plan(job_of(settings)).checks if check.rule == rule]
    return answers(rule, settings)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{case.where}-{case.status}")
def test_a_rule_is_silent_or_ok_when_kept(case: Case) -> None:
    assert {check.status for check in checks_of(case.rule, case.kept)} <= {"ok"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{case.where}-{case.status}")
def test_a_broken_rule_says_value_bound_and_way_out(case: Case) -> None:
    (check,) = [c for c in checks_of(case.rule, case.broken) if c.status != "ok"]
    assert (check.status, check.where) == (case.status, case.where)
    assert [word for word in case.says if word not in check.message] == []
    assert re.search(case.hint, check.hint), check.hint
    assert check.hint or check.status == "warning"
    assert (check.issue.rule, check.issue.message) == (check.rule, check.message)


def test_every_rule_has_a_case() -> None:
    """Rule ids are the dashed words of rules/ and legality.py: whoever adds one adds its case."""
    sources = [*Path(mpctl.rules.__file__).parent.glob("*.py"), Path(legality.__file__)]
    texts = [
        node.value
        for source in sources
        for node in ast.walk(ast.parse(source.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    ids = {text for text in texts if re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", text)}
    assert ids == {case.rule for case in CASES} | ALWAYS_OK


def test_a_padded_vocabulary_is_said_and_is_never_wrong() -> None:
    (padded,) = answers("vocab-padding", {"parallel.tp": 2})
    assert "50257 tokens are padded to 50432 (128 x tp 2), 25216 rows a rank" in padded.message
    (exact,) = answers("vocab-padding", {"parallel.tp": 2, "model.vocab": 512})
    assert exact.message == "512 tokens, 256 rows a rank"
    assert (padded.status, exact.status) == ("ok", "ok")


def test_rules_of_a_model_are_silent_without_one() -> None:
    rules = {c.rule for c in make_plan(job_of(TWO_NODES, model=False)).checks}
    assert rules == {"world-size", "batch-divides"}


def test_kv_heads_that_do_not_divide_are_not_also_reported_as_heads() -> None:
    broken = {"parallel.tp": 2, "model.kv_heads": 5}
    assert [c.status for c in answers("tp-divides-heads", broken)] == ["ok"]


def test_a_size_far_beyond_the_cluster_is_answered_at_once() -> None:
    """Once a loop up to tp: the answer took minutes."""
    (check,) = answers("world-size", {**TWO_NODES, "parallel.tp": 1_000_000_007})
    assert f"a multiple of {1_000_000_007:,} nodes" in check.hint


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([1], "1"), ([1, 2], "1 or 2"), ([1, 2, 3], "1, 2 or 3")]
)
def test_listed(numbers: list[int], text: str) -> None:
    assert listed(numbers) == text


def test_the_nearest_values_are_told_in_their_order() -> None:
    assert way_out([Offer("parallel.tp", (1, 2, 4, 8, 16), "tp", near=7)]) == "use tp 2, 4 or 8"
    assert way_out([Offer("parallel.tp", (1, 2, 4, 8))], "less") == "use 1, 2, 4 or 8; or less"
    assert way_out([Offer("parallel.tp", ())], "less") == "less"


def test_divides_names_only_ways_of_a_sensible_size() -> None:
    check = divides("r", "w", 4096, 24, "things")
    assert check.hint == "use 1, 2, 4, 8, 16, 32 or 64"


@pytest.mark.parametrize("settings", [{"parallel.pp": 4}, {**T5, "parallel.pp": 3}])
def test_the_balanced_cut_is_legal_and_shortens_the_step(settings: dict[str, Any]) -> None:
    job = {**settings, "cluster": "dgx-a100", "cluster.nodes": 1,
           "cluster.gpus_per_node": settings["parallel.pp"], "training.micro_batch_size": 4,
           "training.global_batch_size": 64}  # fmt: skip
    (check,) = [c for c in answers("stage-balance", job) if c.status == "warning"]
    balanced = {**job, "parallel.stage_balance": check.hint.split()[-1]}
    even, better = make_plan(job_of(job)).estimate, make_plan(job_of(balanced)).estimate
    assert even and better and even.step_seconds and better.step_seconds
    assert better.step_seconds < even.step_seconds


@pytest.mark.parametrize(
    "broken",
    [
        {"model.heads": 5},
        {"model.family": "t5"},
        {"model.family": "t5", "model.decoder_layers": 12},
        {"model.seq_length": 1, "parallel.cp": 2},
    ],
)
@pytest.mark.parametrize("how", ["even", "cost"])
def test_stages_of_a_model_that_cannot_be_counted_are_not(broken: dict[str, Any], how: str) -> None:
    """Other rules say what is wrong with it."""
    settings = {"parallel.pp": 2, "parallel.stage_balance": how, **broken}
    assert answers("stage-balance", settings) == []
    assert "error" in {check.status for check in make_plan(job_of(settings)).checks}


@pytest.mark.parametrize(
    ("device", "dtype", "hint"),
    [
        ("h100-sxm", "fp32", "use --dtype bf16"),
        ("h100-sxm", "fp64", "use --dtype bf16"),
        ("v100-32gb", "fp32", "use --dtype fp16"),  # has no bf16
        ("h100-sxm", "bf16", None),
        ("h100-sxm", "tf32", None),
        ("cpu", "fp32", None),
    ],
)
def test_fp32_on_a_gpu_with_faster_16_bit_products(
    device: str, dtype: str, hint: str | None
) -> None:
    found = answers("slow-dtype", {"cluster.device": device, "training.dtype": dtype})
    assert [(check.status, check.hint) for check in found] == ([("warning", hint)] if hint else [])
