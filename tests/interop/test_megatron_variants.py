"""Decoders of other shapes in Megatron's words, and what it has no words for."""

from __future__ import annotations

import pytest

from mpctl.errors import InputError
from mpctl.interop.from_megatron import read_megatron
from mpctl.interop.registry import emit_plan
from tests.interop.jobs import LAYOUTS, plan_of

SHAPE = "--num-layers 12 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --vocab-size 1000"


def test_what_megatron_has_flags_for() -> None:
    text = emit_plan(plan_of(LAYOUTS["windows"]), "megatron").text.replace("\\\n", "")
    words = text.split()
    for said in ("--squared-relu", "--qk-layernorm", "--add-qkv-bias", "--disable-bias-linear"):
        assert said in words
    for flag, value in (
        ("--window-size", "15,0"), ("--window-attn-skip-freq", "3"), ("--rotary-percent", "0.5"),
        ("--mtp-num-layers", "1"),
    ):  # fmt: skip
        assert words[words.index(flag) + 1] == value


@pytest.mark.parametrize(
    ("key", "value"),
    [("position", "alibi"), ("norm", "nonparametric"), ("norm_order", "sandwich"),
     ("parallel_residual", True), ("embedding_norm", True), ("bias", "mlp"),
     ("attention_softcap", 50.0), ("qk_norm", "width"), ("head_bias", True)],
)  # fmt: skip
@pytest.mark.parametrize("target", ["megatron", "megatron-bridge"])
def test_what_it_has_none_for_is_refused_in_words(key: str, value: object, target: str) -> None:
    with pytest.raises(InputError) as caught:
        emit_plan(plan_of({f"model.{key}": value}), target)
    assert f"model.{key}" in [issue.where for issue in caught.value.issues]
    assert all(issue.hint for issue in caught.value.issues)


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ("--squared-relu", {"model.activation": "relu2"}),
        ("--add-qkv-bias --disable-bias-linear", {"model.bias": "qkv"}),
        ("--window-size 127,0", {"model.attention_window": 128}),
        ("--window-size '(127,0)'", {"model.attention_window": 128}),
        ("--mtp-num-layers 2", {"model.mtp_layers": 2}),
    ],
)
def test_flags_are_read(flags: str, settings: dict[str, object]) -> None:
    assert settings.items() <= dict(read_megatron(f"{SHAPE} {flags}").settings).items()


@pytest.mark.parametrize("flags", ["--window-size 4,4", "--mtp-num-layers many"])
def test_flags_that_no_job_says_are_refused(flags: str) -> None:
    with pytest.raises(InputError) as caught:
        read_megatron(f"{SHAPE} {flags}")
    assert [issue.where for issue in caught.value.issues] == [flags.split()[0]]
