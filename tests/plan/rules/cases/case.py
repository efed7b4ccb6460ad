"""A case of a rule: settings that keep it, settings that break it, and what is then said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TWO_NODES = {"cluster.nodes": 2, "cluster.gpus_per_node": 8}
T5 = {"model.family": "t5", "model.position": "relative", "model.decoder_layers": 12, "model.decoder_seq_length": 256}
LLAMA_3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192.0}


@dataclass(frozen=True)
class Case:
    """kept, broken: settings; says: what the message must name; hint: what the way out must."""

    rule: str
    kept: dict[str, Any]
    broken: dict[str, Any]
    where: str
    says: tuple[str, ...]
    hint: str
    status: str = "error"
