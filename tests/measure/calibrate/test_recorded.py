"""The recorded runs of others: all are there, each with its source, none twice."""

from __future__ import annotations

import json

import pytest

from mpctl.plan.batch.answers import answers
from tests.nanotron import nanotron_rows
from tests.published import expert_rows, mlperf6_rows, published_rows


def test_the_sweep_of_nanotron_is_read_as_rows() -> None:
    ran, soft, failed = (nanotron_rows(outcome) for outcome in ("ran", "soft", "failed"))
    assert (len(ran), len(soft), len(failed)) == (467, 406, 757)
    first = ran[0]
    assert first["id"] == "nanotron_1B_16n_dp128_tp1_pp1_mbs1_acc2_z0"
    assert first["measured"]["step_seconds"] == pytest.approx(256 * 4096 / (24_494 * 128))
    assert first["measured"]["peak_mem_gib_reserved"] == 36.7
    for row in (*ran, *soft, *failed):
        parallel, cluster = row["job"]["parallel"], row["job"]["cluster"]
        ranks = parallel["tp"] * parallel["pp"] * parallel["dp"]
        assert ranks == cluster["nodes"] * cluster["gpus_per_node"], row["id"]


def test_every_row_has_its_own_name_and_a_source() -> None:
    rest = [*nanotron_rows("soft"), *nanotron_rows("failed")]
    rows = [*published_rows(), *expert_rows(), *mlperf6_rows(), *rest]
    assert len({row["id"] for row in rows}) == len(rows) == 209 + 196 + 95 + 19 + 1630
    assert [row["id"] for row in rows if not row["source"]] == []
    assert not any("experts" in row["job"]["model"] for row in published_rows())


@pytest.mark.slow
def test_rows_with_experts_are_planned_by_every_rule() -> None:
    lines = [json.dumps(row["job"]).encode() for row in expert_rows()]
    for row, found in zip(expert_rows(), answers(lines), strict=True):
        assert found["step_seconds"] is not None, (row["id"], found["issues"])
