"""Clusters that state what another one leaves out: of one node alone no network is known."""

from __future__ import annotations

from typing import Literal

from mpctl.spec.cluster import ClusterSpec
from mpctl.spec.presets import find_preset, preset_names

Link = Literal["intra_node", "inter_node"]


def linked_clusters(cluster: ClusterSpec, link: Link) -> list[str]:
    """The names of cluster presets that state this link, of the same device and as many of it in a
    node."""
    if cluster.device is None:
        return []
    names = []
    for name in preset_names("clusters"):
        preset = find_preset("clusters", name) or {}
        device = preset.get("device")
        if link not in preset or preset.get("gpus_per_node") != cluster.gpus_per_node:
            continue
        table = find_preset("devices", device) if isinstance(device, str) else device
        if table and table.get("name") == cluster.device.name:
            names.append(name)
    return names


def link_hint(cluster: ClusterSpec, link: Link) -> str:
    """How to state a link that is missing: its bandwidth, or a preset that has it."""
    names = linked_clusters(cluster, link)
    other = f"; or use --cluster {' or '.join(names)}, which has it" if names else ""
    return f"set cluster.{link}.bandwidth, bytes/s in one direction{other}"
