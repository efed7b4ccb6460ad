"""Seconds of the host thread that launches a layer's kernels."""

from __future__ import annotations

from mpctl.plan.estimate.network import Network
from mpctl.spec.parallel import ParallelSpec
from mpctl.spec.runtime import HostCosts

SYNCED = 8  # ranks of tp for which host.sync is stated


def layer_host(host: HostCosts, tp: int) -> float:
    """Seconds of the host thread that launches the kernels of a layer's forward; a backward has
    twice as many.

    A runtime takes as long for every layer, whatever its size (`host.layer`), and longer where its
    matrices are split, for messages and pieces of products (`host.split`), and where tp ranks wait
    for each other at every message (`host.sync`).
    """
    own = host.layer + host.split * (tp > 1)
    return own + host.sync * (min(tp, SYNCED) / SYNCED) ** 3


def pipeline_host(host: HostCosts, parallel: ParallelSpec, network: Network) -> float:
    """Host seconds by which a pipeline whose stages send from node to node makes a layer's forward
    longer, for each rank of tp."""
    if parallel.pp == 1 or parallel.tp == 1 or not host.rank_in_pipeline:
        return 0.0
    return host.rank_in_pipeline * parallel.tp * network.pipelines_cross_nodes
