"""What is planned and not launched, and what is not planned at all."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.core.errors import InputError
from mpctl.plan.planning.plan import make_plan
from mpctl.plan.rules.launched import why_not_launched
from mpctl.plan.rules.validate import with_tried_hints
from mpctl.run.hosts.machine import Machine
from mpctl.run.launch.rehearse import check_rehearsal
from mpctl.spec.load import load_job

SMALL = {
    "model.layers": 2,
    "model.hidden": 16,
    "model.heads": 4,
    "model.vocab": 100,
    "model.seq_length": 8,
    "model.position": "rotary",
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_softcap", 50.0),
        ("logit_softcap", 30.0),
        ("head_bias", True),
        ("attention_sinks", True),
        ("activation_limit", 7.0),
        ("rotary_scaling_type", "linear"),
    ],
)
def test_what_workers_do_not_compute_is_planned_and_not_launched(key: str, value: Any) -> None:
    job = load_job(None, {**SMALL, f"model.{key}": value})
    plan = make_plan(job)
    assert not plan.errors and plan.estimate is not None
    (check,) = [check for check in plan.checks if check.rule == "model-launched"]
    assert (check.status, check.where) == ("warning", f"model.{key}") and check.hint
    issues = check_rehearsal(plan, Machine(2, 0, 2**40))
    assert [(issue.rule, issue.where) for issue in issues] == [("not-run-yet", f"model.{key}")]


@pytest.mark.parametrize(
    ("keys", "where"),
    [
        ({"position": "alibi"}, "position"),
        ({"qk_norm": True}, "qk_norm"),
        ({"attention_window": 4}, "attention_window"),
        ({"norm_order": "sandwich"}, "norm_order"),
        ({"norm": "nonparametric"}, "norm"),
        ({"parallel_residual": True}, "parallel_residual"),
        ({"mtp_layers": 1}, "mtp_layers"),
    ],
)
def test_a_grid_of_ranks_is_told_what_it_does_not_run(keys: dict[str, Any], where: str) -> None:
    grid = {"parallel.tp": 4, "parallel.tensor_mode": "2d", "training.micro_batch_size": 2}
    job = load_job(None, {**SMALL, **{f"model.{k}": v for k, v in keys.items()}, **grid})
    plan = make_plan(job)
    issues = check_rehearsal(plan, Machine(4, 0, 2**40))
    assert f"model.{where}" in [issue.where for issue in issues if issue.rule == "not-run-yet"]


@pytest.mark.parametrize(
    ("keys", "where"),
    [
        ({"attention_window_every": 2}, "attention_window_every"),
        ({"attention_window": 4, "attention_window_every": 2, "full_attention_every": 2}, "full_attention_every"),
        ({"shared_norm": True}, "shared_norm"),
        ({"expert_bias": True}, "expert_bias"),
        ({"parallel_residual": True, "norm_order": "output"}, "norm_order"),
        ({"head_dim": 6, "rotary_fraction": 0.5}, "rotary_fraction"),
        ({"family": "bert", "position": "learned", "qk_norm": True}, "qk_norm"),
        ({"family": "bert", "position": "learned", "bias": "qkv"}, "bias"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(keys: dict[str, Any], where: str) -> None:
    job = load_job(None, {**SMALL, **{f"model.{key}": value for key, value in keys.items()}})
    errors = [check for check in make_plan(job).checks if check.status == "error"]
    assert [check.where for check in errors] == [f"model.{where}"]
    assert all(check.hint for check in errors)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("model.num_experts", "use model.experts"),
        ("model.moe_intermediate_size", "use model.expert_ffn"),
        ("model.norm_topk_prob", "use model.router_renormalize"),
        ("model.multi_latent_attention", "use model.attention_kind"),
        ("parallel.expert_model_parallel_size", "use parallel.ep"),
        ("training.router_aux_loss_coef", "use training.moe_aux_loss_coeff"),
        ("model.moe_expert_capacity_factor", "experts take every token that is sent to them"),
        ("model.router_jitter_noise", "would change the loss with the layout"),
    ],
)
def test_experts_are_known_by_the_names_of_other_software(key: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        load_job(None, {**SMALL, key: 8})
    (told,) = caught.value.issues
    assert (told.rule, told.where) == ("unknown-key", key) and words in told.hint


FP8: dict[str, Any] = {
    "model": "gpt2",
    "cluster": "dgx-h100",
    "cluster.nodes": 1,
    "training.dtype": "fp8",
    "parallel.tp": 8,
    "model.heads": 16,
    "model.hidden": 1024,
}


def reasons(**changes: Any) -> list[tuple[str, str]]:
    job = load_job(None, {**FP8, **{key.replace("__", "."): v for key, v in changes.items()}})
    return [(check.where, check.message) for check in why_not_launched(job)]


def test_fp8_is_launched_on_a_device_that_has_it() -> None:
    assert reasons() == []
    assert reasons(training__fp8_recipe="tensorwise", parallel__sequence_parallel=True) == []


@pytest.mark.parametrize(
    ("changes", "where", "words"),
    [
        ({"cluster": "dgx-a100"}, "cluster.device", "A100"),
        ({"parallel__tp": 4, "parallel__tensor_mode": "2d"}, "parallel.tensor_mode", "2d"),
        ({"model__hidden": 1032, "model__head_dim": 64}, "model.hidden", "1032 hidden"),
        ({"model__ffn": 3008}, "parallel.tp", r"376 columns of the MLP a rank (3008 over 8)"),
        ({"model__seq_length": 1000}, "training.micro_batch_size", "1000 tokens"),
        ({"training__dtype": "bf16", "training__gradient_dtype": "fp8"}, "training.gradient_dtype", "fp8 is planned"),
        ({"model": "t5-base", "model.decoder_seq_length": 128}, "model.family", "t5"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], where: str, words: str) -> None:
    found = reasons(**changes)
    assert any(at == where and words in message for at, message in found), found


def test_sides_of_latent_attention_in_fp8() -> None:
    """By hand, 16 heads over tp 8: 2 x (16 + 8) = 48 columns of queries, 2 x (16 + 8) of keys and
    values, 2 x 8 of the heads; with values of 4 columns 40 and 8."""
    latent = {
        "model__attention_kind": "mla",
        "model__position": "rotary",
        "model__bias": "mlp",
        "model__kv_lora_rank": 40,
        "model__qk_nope_head_dim": 16,
        "model__qk_rope_head_dim": 8,
        "model__v_head_dim": 8,
    }
    assert [message.split(":")[0] for _, message in reasons(**latent)] == ["40 columns of the latent"]
    narrow = {**latent, "model__kv_lora_rank": 48, "model__v_head_dim": 4, "model__q_lora_rank": 24}
    assert [(where, message.split(":")[0]) for where, message in reasons(**narrow)] == [
        ("model.q_lora_rank", "24 columns of the queries' latent"),
        ("model.qk_rope_head_dim", "56 columns of latent and positions"),
        ("parallel.tp", "40 columns of keys and values a rank (320 over 8)"),
        ("parallel.tp", "8 columns of the heads a rank (64 over 8)"),
    ]


def test_sides_of_experts_in_fp8() -> None:
    """By hand, over etp 2 48 columns of an expert and over tp 8 16 of the shared ones; the width of
    the MLP is asked for where a layer has one."""
    sparse = {
        "model__experts": 8,
        "model__experts_per_token": 2,
        "model__expert_ffn": 96,
        "model__shared_expert_ffn": 128,
        "parallel__etp": 2,
        "model__ffn": 3008,
        "model__bias": False,
        "parallel__sequence_parallel": True,
    }
    assert reasons(**sparse) == []
    narrow = {**sparse, "model__expert_ffn": 48, "model__shared_expert_ffn": 64, "model__dense_layers": 1}
    assert [(where, message.split(":")[0]) for where, message in reasons(**narrow)] == [
        ("parallel.tp", "376 columns of the MLP a rank (3008 over 8)"),
        ("parallel.etp", "24 columns of an expert a rank (48 over 2)"),
        ("parallel.tp", "8 columns of the shared experts a rank (64 over 8)"),
    ]


def test_a_cpu_computes_it_to_try_a_job_out() -> None:
    """With 16-bit products of the same values; no time is estimated for it."""
    job = load_job(None, {**FP8, "launch.device": "cpu"})
    assert why_not_launched(job) == []


def test_every_reason_has_a_way_out() -> None:
    job = load_job(None, {**FP8, "cluster": "dgx-a100", "model.hidden": 1032, "model.head_dim": 64})
    checks = why_not_launched(job)
    assert checks and all(check.hint.endswith("or --dtype bf16") for check in checks)
    assert with_tried_hints(job, checks) == checks
