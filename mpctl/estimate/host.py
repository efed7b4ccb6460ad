"""Seconds of the host thread that launches a layer's kernels.

A runtime takes as long for every layer, whatever its size (`host.layer` of its profile), and longer
where its matrices are split, for messages and pieces of products (`host.split`). Where tp ranks
wait for each other at every message it is longer (`host.sync`), and in a pipeline whose stages send
from node to node each rank of tp may add to it (`host.rank_in_pipeline`).

By hand, 1.5 ms a layer and 0.7 ms a rank: 1.5 ms at tp 1, at tp 8 in a pipeline across nodes 7.1 ms
forward and twice that backward.
"""

from __future__ import annotations

from mpctl.estimate.network import Network
from mpctl.spec.parallel import ParallelSpec
from mpctl.spec.runtime import HostCosts

SYNCED = 8  # ranks of tp for which host.sync is stated


def layer_host(host: HostCosts, tp: int) -> float:
    """Host seconds of a layer's forward, wherever it lies."""
    own = host.layer + host.split * (tp > 1)
    return own + host.sync * (min(tp, SYNCED) / SYNCED) ** 3


def pipeline_host(host: HostCosts, parallel: ParallelSpec, network: Network) -> float:
    """Host seconds by which a pipeline across nodes makes a layer's forward longer."""
    if parallel.pp == 1 or parallel.tp == 1 or not host.rank_in_pipeline:
        return 0.0
    return host.rank_in_pipeline * parallel.tp * network.pipelines_cross_nodes
