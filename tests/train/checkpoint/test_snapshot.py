"""A rank reads back the state that it saved, whether an optimizer steps it or none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from mpctl.train.checkpoint.reader import load_checkpoint
from mpctl.train.checkpoint.saver import Saver
from mpctl.train.checkpoint.snapshot import HostCopies, State
from mpctl.train.checkpoint.writer import CheckpointWriter, StoreBarrier
from tests.train.checkpoint.shards import numbered, shard_record


class Momentum:
    """An optimizer of one moment, which a checkpoint knows only by the protocol."""

    gathers_states = False

    def __init__(self, *parameters: nn.Parameter, updates: int) -> None:
        self.moments = {p: torch.full_like(p, 7.0) for p in parameters}
        self.updates = updates

    @property
    def trained(self) -> set[Tensor]:
        return {*self.moments}

    def states(self) -> Iterator[tuple[nn.Parameter, State]]:
        for parameter, moment in self.moments.items():
            yield parameter, {"value": parameter.detach(), "momentum": moment}

    def saved_dtypes(self, parameter: Tensor) -> dict[str, torch.dtype]:
        return {"value": parameter.dtype, "momentum": self.moments[parameter].dtype}

    def frozen_values(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        yield from ()

    def updates_of(self, parameter: Tensor) -> int:
        return self.updates

    def load(self, parameter: nn.Parameter, tensors: State, *, updates: int) -> None:
        parameter.data.copy_(tensors["value"])
        self.moments[parameter].copy_(tensors["momentum"])
        self.updates = updates

    def full_value(self, parameter: Tensor) -> Tensor:
        return parameter

    def set_value(self, parameter: Tensor, value: Tensor) -> None:
        parameter.data.copy_(value)

    def publish(self) -> None:
        pass


class Router(nn.Module):
    """Scores of experts, a table that is frozen, and a bias that no gradient moves."""

    bias: Tensor

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 3), fill))
        self.table = nn.Parameter(torch.full((2,), fill), requires_grad=False)
        self.register_buffer("bias", torch.full((4,), fill))

    @property
    def names(self) -> dict[Tensor, str]:
        return {t: name for name, t in (*self.named_parameters(), *self.named_buffers())}


def test_a_buffer_that_no_gradient_moves_is_saved_and_read(tmp_path: Path) -> None:
    saved, read = Router(3.0), Router(0.0)
    barrier = StoreBarrier(HashStore())
    writer = CheckpointWriter(tmp_path, 0, {0: numbered(0)}, barrier)
    saver = Saver(writer, HostCopies())
    saver.save(5, saved.names, Momentum(saved.weight, updates=4), tables={})
    saved.bias += 1  # what is saved is what was there
    saver.finish()
    optimizer = Momentum(read.weight, updates=0)
    optimizer.moments[read.weight].zero_()
    model = set(read.names.values())
    manifest = load_checkpoint(tmp_path / "step-5", read.names, optimizer, model=model, may_lack={})
    for tensor in read.names:
        assert tensor.unique().tolist() == [3.0]
    assert (optimizer.moments[read.weight].unique().tolist(), optimizer.updates) == ([7.0], 4)
    assert manifest.step == 5
    assert shard_record(tmp_path / "step-5", 0).frozen == ["table", "bias"]
