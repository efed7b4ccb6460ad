"""Names of Kubernetes: derived ones are always legal, others are judged as the API server does."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.clusters.kubernetes.submission import (
    LONGEST_JOB_NAME,
    env_issues,
    is_label,
    is_qualified,
    is_quantity,
    is_subdomain,
    job_name,
)


@given(st.text(max_size=80), st.floats(0, 4e9))
def test_a_derived_name_begins_the_host_names_of_pods(run: str, when: float) -> None:
    name = job_name(run, when)
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert len(name) <= LONGEST_JOB_NAME and "--" not in name
    assert len(f"{name}-worker-1048575-abcde") <= 63


def test_a_derived_name_is_that_of_the_run_and_the_time() -> None:
    assert job_name("Llama 3 (tuned)", 0) == "llama-3-tuned-0101-000000"
    assert job_name("70B", 0) == "run-70b-0101-000000"
    assert job_name("Ü", 0) == "run-0101-000000"


@pytest.mark.parametrize(
    ("name", "is_legal"),
    [("a", True), ("team-a", True), ("-a", False), ("A", False), ("a.b", False), ("", False),
     ("a" * 63, True), ("a" * 64, False), ("a\n", False)],
)  # fmt: skip
def test_labels(name: str, is_legal: bool) -> None:
    assert is_label(name) is is_legal


def test_subdomains_qualified_names_and_quantities() -> None:
    assert is_subdomain("a.b-c.d") and not is_subdomain("a..b") and not is_subdomain("a." * 200)
    assert is_qualified("nvidia.com/gpu") and is_qualified("gpu") and is_qualified("a/B_c.d")
    assert not any(map(is_qualified, ("/gpu", "a/", "a/b/c", "nvidia com/gpu", "")))
    assert is_quantity("512Gi") and is_quantity("1.5T") and is_quantity("7")
    assert not any(map(is_quantity, ("512GB", "-1Gi", "lots", "")))


def test_variables_that_place_a_pod_cannot_be_set() -> None:
    names = ["NCCL_DEBUG", "PET_NNODES", "RANK", "MASTER_ADDR", "A-B", "1A"]
    wrong = {issue.message.split()[0].strip("'"): issue.rule for issue in env_issues(names)}
    assert wrong == {"PET_NNODES": "reserved-variable", "RANK": "reserved-variable",
                     "MASTER_ADDR": "reserved-variable", "A-B": "bad-name",
                     "1A": "bad-name"}  # fmt: skip
