"""Lists of nodes, as `scontrol show hostnames` expands them (compared in tests/multinode)."""

from __future__ import annotations

import time

import pytest

from mpctl.clusters.slurm.node_list import MOST_NODES, expand_node_list, read_addresses
from mpctl.errors import InputError


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("gpu[003-005,7],login1", ["gpu003", "gpu004", "gpu005", "gpu7", "login1"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("rack[0-1]n[1-2]-ib", ["rack0n1-ib", "rack0n2-ib", "rack1n1-ib", "rack1n2-ib"]),
        ("b,a,b2", ["b", "a", "b2"]),
        ("n2,n1", ["n2", "n1"]),
    ],
)
def test_a_list_is_expanded_in_its_order(text: str, names: list[str]) -> None:
    assert expand_node_list(text) == names


@pytest.mark.parametrize(
    "text",
    ["", "a,", ",a", "a,,b", "a b", "n[1-", "n]", "n[]", "n[1,]", "n[3-1]", "n[1]]", "n[a-b]",
     "n[1-2-3]", "n[-1]", "n\n", "n[[1]]"],
)  # fmt: skip
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is not a list of nodes"):
        expand_node_list(text)


@pytest.mark.parametrize("text", [f"n[1-{MOST_NODES + 1}]", "a[1-999]b[1-999]", f"n[0-{9**18}]"])
def test_a_list_has_a_bound(text: str) -> None:
    with pytest.raises(InputError, match="more than 65,536 nodes"):
        expand_node_list(text)


def test_a_thousand_nodes_take_no_time() -> None:
    start = time.process_time()
    assert len(expand_node_list(",".join(f"rack{n}[001-010]" for n in range(100)))) == 1000
    assert time.process_time() - start < 1


def test_addresses_of_nodes() -> None:
    listing = "n1|10.0.0.1\nn1|10.0.0.1\nn2|n2.cluster\n\nn3|\n"
    assert read_addresses(listing) == {"n1": "10.0.0.1", "n2": "n2.cluster"}
