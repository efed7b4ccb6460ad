"""Whether a job fits the memory of its devices, in one line.

By hand, 84.9 GiB on a device of 79.6 with a headroom of 5 %, which leaves 75.6: 9.3 GiB too much.
"""

from __future__ import annotations

from mpctl.spec.cluster import ClusterSpec
from mpctl.units import bytes_text, part_text


def fit_text(cluster: ClusterSpec, need: int, who: str) -> str:
    """Whether so many bytes on a device of the cluster leave its headroom free, and what is left or
    lacking: `fits: 61.2 of 79.6 GiB, 18.4 GiB free (headroom 5 %)`, or
    `does not fit: 9.3 GiB too much on stage 0 (84.9 of 79.6 GiB, headroom 5 %)`. Without a device
    only the need is known. who: the rank or stage that needs them."""
    if cluster.device is None:
        unknown = f"legal; not known whether it fits: {who} needs {bytes_text(need)}"
        return f"{unknown}, and no device is named (--cluster NAME)"
    have, headroom = cluster.device.memory_bytes, f"headroom {cluster.headroom:g} %"
    over = need - (cluster.usable_bytes or 0)
    if over <= 0:
        return f"fits: {part_text(need, have)}, {bytes_text(have - need)} free ({headroom})"
    lacking = f"does not fit: {bytes_text(over)} too much on {who}"
    return f"{lacking} ({part_text(need, have)}, {headroom})"
