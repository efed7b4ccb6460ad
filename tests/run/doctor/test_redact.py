"""A diagnosis for a public bug report has no names."""

from __future__ import annotations

from mpctl.run.doctor.documents import Diagnosis, Finding, HostReport
from mpctl.run.doctor.redact import redact
from tests.run.doctor.synthetic import host


def diagnosis(*hosts: HostReport, findings: tuple[Finding, ...] = ()) -> Diagnosis:
    return Diagnosis(
        mpctl="0.2.0",
        backend="ssh",
        job="secret-model",
        hosts=list(hosts),
        skew=[],
        pairs=[],
        all_pairs=0,
        collectives=[],
        findings=list(findings),
    )


def test_names_addresses_users_and_homes_are_replaced_everywhere() -> None:
    finding = Finding(
        status="error",
        rule="pair-apart",
        where="network",
        hosts=["gpu07.acme.example"],
        message="gpu07.acme.example to gpu08 (10.0.0.7 port 20001: refused), seen from gpu07",
    )
    first = host(
        "gpu07.acme.example",
        network={"host": "gpu07", "host_addresses": ["10.0.0.7"]},
        folder={"path": "/home/ada/runs", "probed": "/home/ada"},
    )
    text = redact(diagnosis(first, host("gpu08"), findings=(finding,))).model_dump_json()
    for word in ("gpu07", "gpu08", "acme", "10.0.0.7", "10.0.0.1", "ada"):
        assert word not in text
    assert "host-1 to host-2 (address-2 port 20001: refused), seen from host-1" in text
    assert '"path":"~/runs"' in text


def test_words_that_only_contain_a_name_stay() -> None:
    """A host called `n1` must not tear `rank-n12` or `nccl-n1x` apart."""
    finding = Finding(status="warning", rule="r", where="w", hosts=["n1"], message="n12 n1x n1: n1")
    (shown,) = redact(diagnosis(host("n1"), findings=(finding,))).findings
    assert shown.message == "n12 n1x host-1: host-1"


def test_loopback_and_root_are_no_secrets() -> None:
    report = host("vm", software={"user": "root", "home": "/root"})
    shown = redact(diagnosis(report)).hosts[0]
    assert shown.software is not None and shown.software.user == "root"
    assert shown.network is not None
    assert [each.addresses for each in shown.network.interfaces] == [["address-1"], ["127.0.0.1"]]
