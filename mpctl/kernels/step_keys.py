"""The keys of a step's dropout masks on the device, sent there once a step.

A key is a hash of (seed, step, site) that the host computes (counter_rng.py). As a number in the
arguments of a kernel it would change at each step, which a compiled function would be compiled anew
for and a CUDA graph could not follow; as an element of a tensor on the device it does neither.

By hand, sites "mlp" and "attention" of the scope "layers.0": a table of 2 int32, whose first
element is the key of "layers.0.mlp".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from mpctl.kernels.counter_rng import CounterRNG, as_int32, dropout_key, site_name


class StepKeys(Mapping[str, Mapping[str, Tensor]]):
    """The keys of each scope's sites as tensors of no dimensions, int32; `fill` says of which step.

    sites: names of sites by scope, as CounterRNG has them.
    """

    def __init__(self, sites: Mapping[str, Sequence[str]], seed: int, device: torch.device) -> None:
        self.seed, self.step = seed, 0
        self.names = [site_name(scope, site) for scope, own in sites.items() for site in own]
        pinned = device.type != "cpu"
        # Two by turns: a copy out of one may still be under way when the next step fills its own.
        self._host = [
            torch.zeros(len(self.names), dtype=torch.int32, pin_memory=pinned) for _ in range(2)
        ]
        self._table = torch.zeros(len(self.names), dtype=torch.int32, device=device)
        places = iter(self._table.unbind())
        self._keys = {scope: {site: next(places) for site in own} for scope, own in sites.items()}

    def fill(self, step: int) -> None:
        """Send the keys of a step; the host does not wait."""
        self.step, host = step, self._host[step % 2]
        keys = [as_int32(dropout_key(self.seed, step, name)) for name in self.names]
        host.copy_(torch.tensor(keys, dtype=torch.int32))
        self._table.copy_(host, non_blocking=True)

    def rng(self, samples: Tensor) -> CounterRNG:
        """What draws the masks of a micro batch of these samples in the step."""
        keys = self._keys.get("")
        return CounterRNG(self.seed, self.step, samples, keys=keys, table=self)

    def __getitem__(self, scope: str) -> Mapping[str, Tensor]:
        return self._keys[scope]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)
