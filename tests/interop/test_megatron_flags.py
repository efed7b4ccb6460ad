"""Our table of flags compared with Megatron-LM's parser: a record of it, and the parser itself.

The parser is in the wheel of megatron-core 0.19.2; tests/interop/megatron_parser.py says how it is
found. What needs it is skipped elsewhere.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

from mpctl.core.errors import InputError
from mpctl.interop.emitted import emit_plan
from mpctl.interop.from_megatron import OLDER, READ, read_megatron
from mpctl.interop.megatron_experts import ALL_FLAGS, BALANCING
from mpctl.interop.megatron_flags import ROWS, VARIANT_FLAGS
from mpctl.interop.megatron_others import FORK_FLAGS, GONE, NEUTRAL, is_apart, parser_flags, refusal_of
from mpctl.plan.planning.plan import Plan
from mpctl.spec.job import JobSpec
from tests.interop.jobs import EXAMPLE, LAYOUTS, plan_of
from tests.interop.megatron_parser import Line, Parsed, parse_lines, words_of

FILE = Path(__file__).parents[1] / "recorded" / "megatron_flags.json"
RECORD: dict[str, dict[str, Any]] = json.loads(FILE.read_text("utf-8"))["flags"]
KINDS: dict[str, Any] = {"int": int, "float": float}
PLAIN = [row for row in (*ROWS, *ALL_FLAGS) if row.setting and row.kind is not bool and row not in VARIANT_FLAGS]
PLANS = {**LAYOUTS, "example": EXAMPLE}


def plan_named(name: str) -> Plan:
    return plan_of({}, base=EXAMPLE) if name == "example" else plan_of(LAYOUTS[name])


def recorded_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for name, row in RECORD.items():
        if row["kind"] == "switch":
            parser.add_argument(name, action="store_true")
        else:
            kind = KINDS.get(row["kind"], str)
            parser.add_argument(name, type=kind, nargs=row.get("nargs"), choices=row.get("choices"))
    return parser


FREE_WORDS = ("--muon-coefficient-type",)  # Megatron's parser takes any; Emerging-Optimizers names them


@pytest.mark.parametrize("flag", PLAIN, ids=lambda flag: flag.key)
def test_kind_and_default_are_megatron_s(flag: Any) -> None:
    row = RECORD[flag.key]
    kinds = {int: ("int", "float"), float: ("float",), str: ("str", "enum_type_handler")}
    assert row["kind"] in kinds[flag.kind]
    if flag.key != "--attention-backend":  # auto: flash where it can be
        assert flag.default == row.get("default")
    words = set((flag.words or {}).values())
    assert words <= set(row.get("choices", words if flag.key in FREE_WORDS else ()))


def test_every_flag_that_is_read_or_refused_is_one_of_megatron_s() -> None:
    assert {*READ, *GONE, *NEUTRAL} - {*OLDER, *FORK_FLAGS} - {*RECORD} == set()
    assert not {*FORK_FLAGS} & {*RECORD}


def test_the_flags_that_are_known_are_those_of_the_parser() -> None:
    assert [*parser_flags()] == sorted(RECORD)
    for name, row in RECORD.items():
        count = 0 if row["kind"] == "switch" else {None: 1, 3: 3}.get(row.get("nargs"), -1)
        default = row.get("default") if count else None
        changes, *known = parser_flags()[name]
        assert changes in ("layout", "model", "other", "data"), name
        assert known == [count, "" if default is None else str(default)], name


def test_no_flag_of_model_training_memory_or_speed_is_said_to_change_nothing() -> None:
    """By words that such flags have in their names, but for those of logs and of inference."""
    words = re.compile(
        r"dtype|offload|fp8|fp4|bf16|fp16|dropout|layernorm|norm|rope|rotary|yarn|attn|recompute|"
        r"activation|fusion|fused|overlap|grad|decay|warmup|-lr\b|beta|optimizer|softmax|graph|mtp|"
        r"batch|bucket|precision|init-method|interpolation|loss|embedding|swiglu|comm"
    )
    apart = {name for name in RECORD if is_apart(name)}
    assert len(apart) > 200
    harmless = re.compile(r"--(no-|disable-)?(log-|inference-|gpu-|check-for|ft-num|dist-ckpt)")
    assert not {n for n in apart if words.search(n) and not harmless.match(n)}


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--tensor-model-paralel-size 8", "did you mean --tensor-model-parallel-size?"),
        ("--sequence-parralel", "did you mean --sequence-parallel?"),
        ("--log-intervall 3", "did you mean --log-interval?"),
        ("--zzz", "leave it out to plan without it"),
    ],
)
def test_a_flag_that_megatron_lacks_is_refused_with_the_nearest(flag: str, hint: str) -> None:
    with pytest.raises(InputError, match="is no flag of Megatron-LM") as caught:
        read_megatron(f"--micro-batch-size 1 {flag}")
    (issue,) = caught.value.issues
    assert (issue.where, issue.hint) == (flag.split()[0], hint)


def test_a_flag_with_a_layout_s_word_is_refused_unless_its_line_says_otherwise() -> None:
    """Those that are passed over are of speed, faults and dumps, each known to be harmless."""
    words = ("parallel-size", "virtual", "sharding-strategy", "fsdp", "expert")
    named = {name for name in RECORD if any(word in name for word in words)} - READ
    passed = {name for name in named if refusal_of(name, ("2",)) is None}
    harmless = ("overlap", "fsdp-", "save-tokens", "glu-interleave", "use-grouped", "microbatch-group")
    assert len(named) > 20
    assert [name for name in passed if not any(word in name for word in harmless)] == []


@pytest.mark.parametrize("name", PLANS)
def test_the_recorded_parser_takes_what_is_written(name: str) -> None:
    plan = plan_named(name)
    got, job = recorded_parser().parse_args(words_of(plan)), plan.job
    assert got.tensor_model_parallel_size == job.parallel.tp
    assert got.pipeline_model_parallel_size == job.parallel.pp
    assert got.global_batch_size == job.training.global_batch_size
    assert got.num_layers == (job.model.layers if job.model else None)


@pytest.fixture(scope="module")
def parsed() -> Parsed:
    """The result of Megatron-LM's parser for every plan, in the order of PLANS."""
    lines = []
    for name in PLANS:
        plan = plan_named(name)
        is_once = "CUDA_DEVICE_MAX_CONNECTIONS=1 " in emit_plan(plan, "megatron").text
        environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if is_once else {}
        model = plan.job.model
        has_config = model is not None and (model.experts is not None or model.is_mla)
        lines.append(Line(words_of(plan), plan.job.world_size, environment, has_config))
    return parse_lines(lines)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_megatron_s_own_parser_takes_what_is_written(name: str, parsed: Parsed) -> None:
    job = plan_named(name).job
    if job.training.dtype == "nvfp4" and not parsed.has_transformer_engine:
        pytest.skip("Megatron-LM takes --fp4-format beside Transformer Engine, which is not there")
    answer = parsed.answers[[*PLANS].index(name)]
    assert "error" not in answer, answer
    args = answer["namespace"]
    assert args["context_parallel_size"] == job.parallel.cp
    assert args["data_parallel_size"] == job.sizes["dp"]
    assert (args["virtual_pipeline_model_parallel_size"] or 1) == job.parallel.vpp
    assert args["global_batch_size"] == job.training.global_batch_size
    dtypes = {"fp32": "torch.float32", "fp16": "torch.float16"}
    assert args["params_dtype"] == dtypes.get(job.training.dtype, "torch.bfloat16")
    if config := answer.get("config"):
        check_experts(job, config)


def check_experts(job: JobSpec, config: dict[str, Any]) -> None:
    """The experts and latents of Megatron-Core's own configuration are those of the job."""
    model, p, t = job.model, job.parallel, job.training
    assert model is not None
    assert config["multi_latent_attention"] == model.is_mla
    if model.is_mla:
        widths = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        ours = (model.q_lora_rank, model.kv_lora_rank, model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim)
        assert tuple(config[name] for name in widths) == ours
        assert (config["rope_type"], config["qk_layernorm"]) == ("yarn", True)
        yarn = (config["rotary_scaling_factor"], config["mscale"], config["mscale_all_dim"])
        assert yarn == ((1.0, 1.0, 0.0) if model.yarn_scaling is None else (40.0, 0.707, 0.707))
    if model.experts is None:
        return
    freq, layers = config["moe_layer_freq"], range(model.layers)
    pattern = freq if isinstance(freq, list) else [int(n % freq == 0) for n in layers]
    assert pattern == [int(model.has_experts(layer)) for layer in layers]
    sizes = (config["expert_model_parallel_size"], config["expert_tensor_parallel_size"])
    assert sizes == (p.ep, p.etp)
    assert config["moe_ffn_hidden_size"] == model.expert_width
    assert (config["moe_shared_expert_intermediate_size"] or 0) == model.shared_expert_ffn
    assert config["moe_router_load_balancing_type"] == BALANCING[t.moe_load_balancing]
    assert config["moe_aux_loss_coeff"] == t.moe_aux_loss_coeff
    assert config["moe_expert_capacity_factor"] is None


def test_what_megatron_has_flags_for() -> None:
    text = emit_plan(plan_of(LAYOUTS["windows"]), "megatron").text.replace("\\\n", "")
    words = text.split()
    for said in ("--squared-relu", "--qk-layernorm", "--add-qkv-bias", "--disable-bias-linear"):
        assert said in words
    for flag, value in (
        ("--window-size", "15,0"),
        ("--window-attn-skip-freq", "3"),
        ("--rotary-percent", "0.5"),
        ("--mtp-num-layers", "1"),
    ):
        assert words[words.index(flag) + 1] == value


def test_what_it_has_none_for_is_refused_in_words() -> None:
    changes: dict[str, object] = {
        "position": "alibi",
        "norm": "nonparametric",
        "norm_order": "sandwich",
        "bias": "mlp",
        "parallel_residual": True,
        "embedding_norm": True,
        "attention_softcap": 50.0,
        "qk_norm": "width",
        "head_bias": True,
    }
    for key, value in changes.items():
        plan = plan_of({f"model.{key}": value})
        for target in ("megatron", "megatron-bridge"):
            with pytest.raises(InputError) as caught:
                emit_plan(plan, target)
            assert f"model.{key}" in [issue.where for issue in caught.value.issues]
            assert all(issue.hint for issue in caught.value.issues)


@pytest.mark.parametrize(
    ("said", "link", "emitted"),
    [(None, "dgx-h100", True), (None, "dgx-a100", False), (False, "dgx-h100", False), (True, "dgx-a100", True)],
)
def test_overlap_that_a_plan_counts_on_is_written(said: bool | None, link: str, emitted: bool) -> None:
    """Links with multicast: Megatron is planned with messages sent during products."""
    layout = {"parallel.tp": 2, "parallel.sequence_parallel": True, "training.runtime": "megatron-core"}
    plan = plan_of({**layout, "cluster.preset": link, "parallel.tp_comm_overlap": said}, base=EXAMPLE)
    assert ("--tp-comm-overlap" in emit_plan(plan, "megatron").text) == emitted
    assert f"tp_comm_overlap = {emitted}" in emit_plan(plan, "megatron-bridge").text
