"""What hosts say of themselves, compared: one machine under two names."""

from __future__ import annotations

from dataclasses import replace

from mpctl.launch.control.host_checks import doubled_hosts
from mpctl.launch.node.facts import host_facts


def test_one_machine_under_two_names_is_found() -> None:
    here = host_facts()
    other = replace(here, name="n2", boot="n2 5f0e")
    alias = replace(here, name="10.0.0.1")
    assert doubled_hosts([here, other]) == []
    (issue,) = doubled_hosts([replace(here, name="n1"), other, alias])
    assert (issue.rule, issue.where) == ("host-doubled", "n1, 10.0.0.1")
    assert here.name in issue.message
    assert "2 nodes" in issue.message


def test_hosts_that_say_nothing_of_themselves_are_not_taken_for_one() -> None:
    unknown = replace(host_facts(), boot="")
    assert doubled_hosts([unknown, unknown]) == []
