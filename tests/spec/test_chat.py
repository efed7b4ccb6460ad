"""[data.chat] of a job: what prepared data says, and what it means for attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpctl.core.errors import InputError
from mpctl.spec.chat import PackedAttention
from mpctl.spec.load import load_job
from tests.jobs import job_of

RECORD = {
    "seq_length": 8,
    "loss_on": "completions",
    "packing": "best-fit",
    "overflow": "drop",
    "splits": {"train": {"rows": 2, "tokens": 11, "counted": 5, "squares": 39, "too_long": 0, "unused": 0}},
}


def prepared(folder: Path, **changes: Any) -> str:
    (folder / "data.json").write_text(json.dumps({"chat": RECORD | changes}))
    return str(folder)


def test_prepared_data_say_what_they_are(tmp_path: Path) -> None:
    """By hand: lengths 5, 3 and 2, 1 in two rows."""
    chat = load_job(None, {"data.path": prepared(tmp_path), "data.chat.packing": "best-fit"}).data.chat
    assert chat is not None and (chat.packing, chat.overflow) == ("best-fit", "drop")
    assert (chat.row_tokens, chat.row_counted, chat.mean_length) == (5.5, 2.5, 39 / 11)


def test_a_job_that_says_otherwise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data\.chat\.packing: 'none', but .* was prepared with 'best-fit'") as caught:
        load_job(None, {"data.path": prepared(tmp_path), "data.chat.packing": "none"})
    assert "mpctl data chat --packing none" in caught.value.issues[0].hint


@pytest.mark.parametrize("text", ["", "[", "{}", '{"chat": {}}', '{"chat": null}', '{"chat": {"splits": []}}'])
def test_other_and_damaged_manifests_are_left_to_the_launch(tmp_path: Path, text: str) -> None:
    (tmp_path / "data.json").write_text(text)
    assert load_job(None, {"data.path": str(tmp_path)}).data.chat is None


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, None),
        ({"data.chat.packing": "none", "data.chat.mean_length": 9.0}, None),
        ({"data.chat.packing": "wrapped", "data.chat.mean_length": 9.0}, PackedAttention(True)),
        ({"data.chat.mean_length": 9.0, "training.runtime": "torchtitan"}, PackedAttention(False, 9.0)),
        ({"data.chat.packing": "wrapped", "training.runtime": "megatron-core"}, PackedAttention(False)),
    ],
)
def test_our_kernels_have_a_mask_and_others_skip(settings: dict[str, Any], expected: PackedAttention | None) -> None:
    assert job_of(settings).packed_attention == expected
