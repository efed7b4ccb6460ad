"""No step makes the host wait for its device but where it reports: every family and layout, on fake
CUDA tensors.

First what the check itself sees, by hand.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mpctl.rehearsal.fake_backend import fake_tensors
from mpctl.rehearsal.host_sync import HostSyncCheck, HostSyncError
from mpctl.runtime.memory_tracker import MemoryTracker

META = torch.device("meta")
WAITS = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "tolist": lambda x: x.tolist(),
    "condition": lambda x: 1 if x.sum() > 0 else 0,
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "index on the host": lambda x: x[torch.arange(2)],
    "numbers": lambda x: torch.tensor([1.0, 2.0], device=META),
    "numbers like": lambda x: x.new_tensor([1.0]),
    "pageable": lambda x: x.copy_(torch.zeros(4), non_blocking=True),
    "blocking": lambda x: x.copy_(torch.zeros(4, pin_memory=True)),
    "numpy": lambda x: torch.from_numpy(np.zeros(4)).to(META),
    "to the host": lambda x: x.cpu(),
}
GOES_ON = {
    "kernels": lambda x: x.mul(2.0).add_(1.0).sum(),
    "a number as an argument": lambda x: torch.full((2,), 3.0, device=META),
    "index there": lambda x: x[torch.arange(2, device=META)],
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "pinned": lambda x: x.copy_(torch.zeros(4, pin_memory=True), non_blocking=True),
    "pinned later": lambda x: torch.zeros(4).pin_memory().to(META, non_blocking=True),
    "a view of pinned": lambda x: torch.zeros(8, pin_memory=True)[4:].to(META, non_blocking=True),
    "to the host, not waited for": lambda x: x.to("cpu", non_blocking=True),
    "on the host": lambda x: float(torch.zeros(4).sum()) + int(torch.ones(3).nonzero().sum()),
}


def watched(work: object, *args: object) -> HostSyncCheck:
    check = HostSyncCheck(META)
    with fake_tensors(), MemoryTracker(torch.device("cpu")), check:
        x = torch.zeros(4, device=META)
        with check.watching():
            try:
                work(x, *args)  # type: ignore[operator]
            except Exception as error:  # fake tensors have no sizes that depend on values
                if "Dynamic" not in type(error).__name__:
                    raise
    return check


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_is_found_with_its_line(name: str) -> None:
    found = [str(sync) for sync in watched(WAITS[name]).found]
    assert len(found) == 1 and found[0].startswith("rehearsal/test_host_sync.py:")


@pytest.mark.parametrize("name", GOES_ON)
def test_what_does_not_wait_is_not_found(name: str) -> None:
    assert not watched(GOES_ON[name]).found


class Waiting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.amax().item()


def test_the_module_is_named_and_what_is_outside_is_not_watched() -> None:
    model, check = nn.Sequential(nn.Identity(), Waiting()), HostSyncCheck(META)
    with fake_tensors(), MemoryTracker(META), check:
        x = torch.zeros(4, device=META)
        x.sum().item()
        with check.watching(model):
            model(x)
            model(x)
            assert check.read(x) == [1.0] * 4
    (sync,) = check.found
    assert sync.module == "1" and "reads a number" in sync.what
    with pytest.raises(HostSyncError, match=r"test_host_sync.py:\d+: aten._local_scalar_dense.* 1"):
        check.require_none()


def test_a_report_is_read_once() -> None:
    check = HostSyncCheck(META)
    with fake_tensors(), MemoryTracker(META), check:
        with check.watching():
            check.read(torch.zeros(3, device=META))
        check.require_none()
        with check.watching():
            check.read(torch.zeros(3, device=META))
    with pytest.raises(HostSyncError, match="2 times where it may, 1 is enough"):
        check.require_none()
