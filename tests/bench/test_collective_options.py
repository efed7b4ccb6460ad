"""Options as nccl-tests has them: sizes with suffixes and steps, names, every issue at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mpctl.bench.collective_cases import (
    KINDS,
    CollectiveFlags,
    parse_dtype,
    parse_size,
    read_options,
)
from mpctl.errors import InputError

FLAGS = CollectiveFlags()


def sizes(**changes: Any) -> tuple[int, ...]:
    return read_options(replace(FLAGS, **changes)).sizes


def issues(**changes: Any) -> dict[str, str]:
    """Where each issue is, by rule."""
    with pytest.raises(InputError) as caught:
        read_options(replace(FLAGS, **changes))
    return {issue.where: issue.rule for issue in caught.value.issues}


@pytest.mark.parametrize(
    ("text", "size"),
    [("8", 8), ("1K", 1024), ("1.5k", 1536), ("16M", 16 << 20), ("2G", 2 << 30), ("1T", 1 << 40)],
)
def test_sizes_are_in_powers_of_1024(text: str, size: int) -> None:
    assert parse_size(text, "--minbytes") == size


@pytest.mark.parametrize("text", ["", "x", "-8", "0", "1KB", "1 K", "2T", "1e3", "nan", "٣", "0.1"])
def test_other_texts_are_no_sizes(text: str) -> None:
    with pytest.raises(InputError, match="--minbytes"):
        parse_size(text, "--minbytes")


def test_sizes_grow_by_a_factor_or_by_a_step() -> None:
    assert sizes(minbytes="1K", maxbytes="20K") == (1024, 4096, 16384)
    assert sizes(minbytes="1", maxbytes="9", stepfactor=2.0) == (1, 2, 4, 8)
    assert sizes(minbytes="1", maxbytes="4", stepfactor=1.1) == (1, 2, 3, 4)
    assert sizes(minbytes="8", maxbytes="20", stepbytes="6") == (8, 14, 20)
    assert sizes(minbytes="8", maxbytes="8") == (8,)


def test_every_issue_is_told_at_once() -> None:
    assert issues(minbytes="x", maxbytes="y", stepfactor=1.0, kinds="all", transports="tcp",
                  datatype="quad") == {
        "--minbytes": "bad-size", "--maxbytes": "bad-size", "--stepfactor": "bad-step",
        "--kinds": "unknown-word", "--transports": "unknown-word", "--datatype": "bad-datatype",
    }  # fmt: skip
    assert issues(minbytes="2K", maxbytes="1K") == {"--minbytes": "bad-size"}
    assert issues(stepfactor=2.0, stepbytes="8") == {"--stepbytes": "bad-step"}
    assert issues(minbytes="8", stepbytes="8") == {"--stepbytes": "bad-step"}
    assert issues(stepfactor=float("nan")) == {"--stepfactor": "bad-step"}


def test_kinds_stand_in_their_own_order_once_each() -> None:
    chosen = read_options(replace(FLAGS, kinds="broadcast, all-reduce,broadcast")).kinds
    assert chosen == ("all_reduce", "broadcast")
    assert read_options(FLAGS).kinds == KINDS


def test_only_the_all_reduce_finds_a_maximum() -> None:
    kinds = read_options(replace(FLAGS, op="max")).kinds
    assert "all_reduce" in kinds and "broadcast" in kinds
    assert not {"reduce", "reduce_scatter"} & set(kinds)
    assert issues(op="max", kinds="reduce") == {"--op": "no-such-op"}


def test_types_have_the_names_of_nccl_tests_and_ours() -> None:
    assert {parse_dtype(name) for name in ("float", "fp32", "float32")} == {"float32"}
    assert parse_dtype("half") == parse_dtype("fp16") == "float16"
