"""How the input of a recomputed block is kept until backward: in parts, on the host, both, neither.

ZeRO-R (arXiv 1910.02054, section 6.1, P_a and P_a+cpu; Megatron's distribute-saved-activations):
under tensor parallelism every rank of the group holds the same input, so rank r may keep the r-th
of t equal parts of its flattened elements. Backward puts it together by one all-gather of the whole
message. On the host the part costs no device memory, but two copies over the bus.

Kept on a device, in bytes, for [b, s, h] of 16 bit: 2bsh; partition 2bsh/t; offload 0. b=1, s=4,
h=2 on t=2: rank 1 keeps elements 4..8, that is positions 2 and 3, 8 bytes.

Letters: b batch, s sequence, h hidden, t ranks of the group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mpctl.sharding import local_range
from mpctl.transport.group import Group


@dataclass(frozen=True)
class InputCheckpointer:
    """Saves a tensor until backward.

    partition: save 1/t of it on each rank of `group`, where it is equal on all of them. offload:
    save it in host memory.
    """

    group: Group
    partition: bool = False
    offload: bool = False

    def save(self, tensor: Tensor) -> Tensor:
        """What `restore` needs of `tensor`: [n] or [n/t], on the device or on the host.

        Raises ValueError where t does not divide the number of elements.
        """
        saved = tensor.detach()
        if self._splits:
            own = local_range(saved.numel(), parts=self.group.size, index=self.group.rank)
            # [b, s, h] -> [b*s*h] -> [b*s*h/t], a copy so that the whole can be freed
            saved = saved.reshape(-1)[own.start : own.stop].clone()
        return _to_host(saved) if self.offload else saved

    def restore(self, saved: Tensor, shape: torch.Size, device: torch.device) -> Tensor:
        """The tensor that was saved, bit for bit, outside autograd; one all-gather if split."""
        saved = saved.detach().to(device, non_blocking=True)
        return (self.group.all_gather(saved, 0) if self._splits else saved).view(shape)

    @property
    def _splits(self) -> bool:
        return self.partition and self.group.size > 1


def _to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory; from an accelerator into pinned pages, without waiting.

    Both directions run on the stream of the computation, so the copy back follows the copy out.
    """
    pinned = tensor.device.type != "cpu"
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
    return host.copy_(tensor, non_blocking=pinned)
