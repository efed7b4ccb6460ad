"""GPUs by device and count, `64xh100`: the cluster that they are planned on.

Nodes and links are those of one preset for each device. A count within one node is one node of as
many; more are whole nodes of the preset's size.

>>> read_gpus("16xh100").settings
{'cluster': 'dgx-h100', 'cluster.nodes': 2, 'cluster.gpus_per_node': 8}
>>> read_gpus("32,64,128xA100-80GB").counts
(32, 64, 128)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from mpctl.core.errors import InputError
from mpctl.core.units import plural
from mpctl.spec.presets import find_preset, nearest_names

CLUSTERS = {
    "a100": "dgx-a100",
    "a100-80gb": "dgx-a100",
    "a100-40gb": "mosaic-a100-40gb",
    "a10g": "a10g-node",
    "b200": "dgx-b200",
    "b300": "dgx-b300",
    "gb200": "dgx-gb200",
    "gb300": "dgx-gb300",
    "h100": "dgx-h100",
    "h100-sxm": "dgx-h100",
    "h20": "h20-node",
    "h200": "dgx-h200",
    "h800": "deepseek-h800",
    "l4": "l4-node",
    "l40s": "l40s-node",
    "mi250x": "mi250x-node",
    "mi300x": "mi300x-node",
    "mi325x": "mi325x-node",
    "mi350x": "mi350x-node",
    "mi355x": "mi355x-node",
    "rtx-3090": "rtx-3090-node",
    "rtx-4090": "rtx-4090-node",
    "rtx-5090": "rtx-5090-node",
    "rtx-6000-ada": "rtx-6000-ada-node",
    "rtx-a6000": "rtx-a6000-node",
    "rtx-pro-6000": "rtx-pro-6000-node",
    "t4": "t4-node",
    "v100-32gb": "dgx2-v100",
}
"""The cluster preset whose nodes and links stand for a device."""
MOST = 10**7
EXAMPLE = "for example --gpus 64xh100"


class NamedGpus(NamedTuple):
    """GPUs that a text names. settings: of their cluster, empty where the text has counts alone;
    counts; assumed: the cluster in words."""

    settings: Mapping[str, Any]
    counts: tuple[int, ...]
    assumed: str = ""


def read_gpus(text: str) -> NamedGpus:
    """The GPUs of `64xh100`, `32,64,128` or `32,64,128xh100`, whose largest count is the cluster's.
    Raises InputError for an unknown device, and for a count that does not fill the nodes."""
    found = re.fullmatch(r"([\d,\s]+?)\s*(?:[x*×]\s*(\S.*?)\s*)?", text.strip(), re.IGNORECASE)
    words = [] if found is None else found[1].replace(" ", "").split(",")
    if found is None or not all(word.isdecimal() and 0 < len(word) < 8 and int(word) for word in words):
        message = f"{text[:40]!r} is no count of GPUs"
        near = f"use --gpus 1x{device}" if (device := find_device(text)) else EXAMPLE
        raise InputError.of("bad-gpus", "--gpus", message, f"{near}, or counts alone where --cluster names the rest")
    counts = tuple(dict.fromkeys(map(int, words)))
    if found[2] is None:
        return NamedGpus({}, counts)
    preset = CLUSTERS[device_key(found[2])]
    table = find_preset("clusters", preset) or {}
    sizes = cluster_of(max(counts), table["gpus_per_node"])
    settings = {"cluster": preset, **sizes}
    if sizes["cluster.nodes"] > 1 and "inter_node" not in table:
        message = f"{max(counts)} GPUs are several nodes of {preset}, which states no network between them"
        hint = f"use at most {table['gpus_per_node']}, or --cluster NAME with one"
        raise InputError.of("gpus-one-node", "--gpus", message, hint)
    return NamedGpus(settings, counts, _assumed(max(counts), settings, table))


def cluster_of(count: int, per_node: int) -> dict[str, int]:
    """The nodes of so many GPUs. Raises InputError for a count that does not fill them."""
    if count > per_node and count % per_node:
        below = count // per_node * per_node
        message = f"{count} GPUs do not fill nodes of {per_node}"
        hint = f"use {below} or {below + per_node}, or --nodes and --gpus-per-node"
        raise InputError.of("gpus-fill-nodes", "--gpus", message, hint)
    nodes = max(count // per_node, 1)
    return {"cluster.nodes": nodes, "cluster.gpus_per_node": count // nodes}


def device_names() -> dict[str, str]:
    """The cluster preset of each device that has one, by the device's most exact name."""
    return {name: preset for preset, name in {preset: name for name, preset in CLUSTERS.items()}.items()}


def find_device(text: str) -> str | None:
    """The key of CLUSTERS for a device in any case, with or without hyphens, maker and rtx; None if there is none.

    >>> [find_device(text) for text in ("RTX 4090", "rtx4090", "4090", "NVIDIA A100 80GB", "a6000", "4091")]
    ['rtx-4090', 'rtx-4090', 'rtx-4090', 'a100-80gb', 'rtx-a6000', None]
    """
    name = re.sub(r"[\s_-]+", "", text.lower())
    name = re.sub(r"^(?:nvidia|amd|geforce|instinct)*", "", name)
    known = {key.replace("-", ""): key for key in CLUSTERS}
    words = (name, f"rtx{name}", f"{name}gb", re.sub(r"sxm\d?", "", name))
    return next((known[word] for word in words if word in known), None)


def device_key(text: str, option: str = "--gpus") -> str:
    """The key of CLUSTERS for a device as people write it: `RTX 4090`, `4090`, `A100-80GB`. Raises InputError,
    which names the option, for one that has no cluster."""
    if (found := find_device(text)) is not None:
        return found
    near = nearest_names(text, list(CLUSTERS)) or list(CLUSTERS)
    message = f"no cluster is assumed for {text[:40]!r}"
    hint = f"use {', '.join(near)}; or --cluster NAME, and --set cluster.device=NAME (`mpctl presets devices`)"
    raise InputError.of("bad-gpus", option, message, hint)


def _assumed(count: int, settings: Mapping[str, Any], table: Mapping[str, Any]) -> str:
    device = find_preset("devices", table["device"]) or {}
    nodes = settings["cluster.nodes"]
    where = "on one node" if nodes == 1 else f"on {plural(nodes, 'node')} of {settings['cluster.gpus_per_node']}"
    links = [_link(table["intra_node"], "NVLink", "a GPU")] if count > 1 and "intra_node" in table else []
    links += [_link(table["inter_node"], "the network", "a node")] if nodes > 1 else []
    shown = f"; assumed, from preset {settings['cluster']}: {', '.join(links)}" if links else ""
    return f"{count} x {device.get('name', table['device'])} {where}{shown}"


def _link(link: Mapping[str, Any], name: str, each: str) -> str:
    return f"{link.get('name', name)} {link['bandwidth'] * link.get('efficiency', 1) / 1e9:.3g} GB/s {each}"
