"""How the input of a recomputed block is kept until backward: in parts, on the host, both, neither.

ZeRO-R (arXiv 1910.02054, section 6.1, P_a and P_a+cpu; Megatron's distribute-saved-activations):
under tensor parallelism every rank of the group holds the same input, so rank r may keep the r-th
of t equal parts of its flattened elements. Backward puts it together by one all-gather of the whole
message. On the host the part costs no device memory, but two copies over the bus (host_offload.py).

Kept on a device, in bytes, for [b, s, h] of 16 bit: 2bsh; partition 2bsh/t; offload 0. b=1, s=4,
h=2 on t=2: rank 1 keeps elements 4..8, that is positions 2 and 3, 8 bytes.

Letters: b batch, s sequence, h hidden, t ranks of the group.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mpctl.kernels.host_offload import HostOffload, OffloadedTensor
from mpctl.sharding import local_range
from mpctl.transport.group import Group


@dataclass
class InputCheckpointer:
    """Saves one tensor until backward.

    partition: save 1/t of it on each rank of `group`, where it is equal on all of them. offload:
    save it in host memory, None for on the device.
    """

    group: Group
    partition: bool = False
    offload: HostOffload | None = None
    _put: OffloadedTensor | None = field(default=None, init=False)

    def save(self, tensor: Tensor) -> Tensor:
        """What `restore` needs of `tensor`: [n] or [n/t], on the device or on the host.

        Raises ValueError where t does not divide the number of elements.
        """
        saved = tensor.detach()
        if self._splits:
            own = local_range(saved.numel(), parts=self.group.size, index=self.group.rank)
            # [b, s, h] -> [b*s*h] -> [b*s*h/t], a copy so that the whole can be freed
            saved = saved.reshape(-1)[own.start : own.stop].clone()
        if self.offload is not None:
            saved, self._put = self.offload.put(saved)
        return saved

    def restore(self, saved: Tensor, shape: torch.Size) -> Tensor:
        """The tensor that was saved, bit for bit, outside autograd; one all-gather if split."""
        saved = saved.detach()
        if self.offload is not None and self._put is not None:
            saved = self.offload.take(saved, self._put)
        return (self.group.all_gather(saved, 0) if self._splits else saved).view(shape)

    @property
    def _splits(self) -> bool:
        return self.partition and self.group.size > 1
