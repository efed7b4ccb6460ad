"""Whom a connection counts for before it has proved itself."""

from __future__ import annotations

import pytest

from mpctl.run.launch.control.admission import source_of


@pytest.mark.parametrize(
    ("address", "source"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),  # at a socket for both families
        ("fe80::1:2%eth0", "fe80:0:0:0"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2"),
        ("::1", "0:0:0:0"),
    ],
)
def test_one_host_is_one_source(address: str, source: str) -> None:
    assert source_of(address) == source
