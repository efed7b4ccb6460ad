"""The keys of a step's dropout masks on the device, sent there once a step.

A key is a hash of (seed, step, site) that the host computes (counter_rng.py). As a number in the
arguments of a kernel it would change at each step, which a compiled function would be compiled anew
for and a CUDA graph could not follow; as an element of a tensor on the device it does neither.

By hand, sites "a" and "b": a table of 2 int32, whose first element is the key of "a".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from mpctl.kernels.counter_rng import as_int32, dropout_key


class StepKeys(Mapping[str, Tensor]):
    """The key of each site as a tensor of no dimensions, int32; `fill` says of which step."""

    def __init__(self, sites: Sequence[str], seed: int, device: torch.device) -> None:
        self.seed, self.places = seed, {site: place for place, site in enumerate(sites)}
        pinned = device.type == "cuda"
        # Two by turns: a copy out of one may still be under way when the next step fills its own.
        self._host = [
            torch.zeros(len(self.places), dtype=torch.int32, pin_memory=pinned) for _ in range(2)
        ]
        self._table = torch.zeros(len(self.places), dtype=torch.int32, device=device)
        self._keys = dict(zip(self.places, self._table.unbind(), strict=True))

    def fill(self, step: int) -> None:
        """Send the keys of a step; the host does not wait."""
        host = self._host[step % 2]
        keys = [as_int32(dropout_key(self.seed, step, site)) for site in self.places]
        host.copy_(torch.tensor(keys, dtype=torch.int32))
        self._table.copy_(host, non_blocking=True)

    def __getitem__(self, site: str) -> Tensor:
        return self._keys[site]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)
