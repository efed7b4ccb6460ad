"""What the host reads and writes itself, beside a device that it runs ahead of: pinned buffers, and
the copies that a thread writes checkpoints from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from mpctl.train.checkpoint.saver import Saver
from mpctl.train.checkpoint.snapshot import HostCopies
from mpctl.train.layers.recompute import HostOffload
from mpctl.train.runtime.batches import sent_batch
from mpctl.train.runtime.train import Trainer
from tests.late.order import HOST, Race
from tests.late.ranks import LateSaver, late_trainer
from tests.late.world import LateMark, LateWorld
from tests.train.runtime.tiny import make_trainer, tiny_job

CPU = torch.device("cpu")
OFTEN = {"training__steps": 4, "training__eval_samples": 0, "checkpoint__interval": 1, "training__clip_norm": 0.0}


def pinned() -> Tensor:
    """Memory of the host's own, filled by it."""
    return torch.zeros(4, pin_memory=False).fill_(1)


def test_a_buffer_of_the_host_is_refilled_when_its_copy_has_passed() -> None:
    """The host knows that when it has waited for anything behind the copy."""
    with LateWorld(0).entered():
        buffer = pinned()
        copy = buffer.to(CPU, non_blocking=True)
        with pytest.raises(Race, match=r"fill_.* writes what .*copy_.*: the host does not wait for"):
            buffer.fill_(2)
        assert (copy + 1).tolist() == [2] * 4
        buffer.fill_(2)


def test_what_the_host_has_filled_is_there_for_every_stream() -> None:
    with LateWorld(0).entered() as world:
        buffer, stream = pinned(), world.make_stream(CPU)
        with stream.running():
            assert torch.empty(4).copy_(buffer, non_blocking=True).shape == (4,)


def test_the_host_waits_for_a_mark_before_it_reads() -> None:
    with LateWorld(0).entered() as world:
        buffer, stream = pinned(), world.make_stream(CPU)
        stream.follow()
        with stream.running():
            buffer.copy_(torch.ones(4), non_blocking=True)
        mark = stream.mark()
        with pytest.raises(Race, match=r"tolist reads what .*copy_.* writes: the host does not"):
            buffer.tolist()
        mark.synchronize()
        assert buffer.tolist() == [1] * 4


def test_micro_batches_have_buffers_of_their_own() -> None:
    """A step's are sent one after the other, and the host waits for none."""
    with LateWorld(0).entered():
        fields = [{"tokens": np.full((2, 3), number)} for number in range(3)]
        batches = [sent_batch([number], one, CPU) for number, one in enumerate(fields)]
        assert [batch["tokens"][0, 0].item() for batch in batches] == [0, 1, 2]


def test_a_copy_is_of_what_was_computed_before_it() -> None:
    with LateWorld(0).entered() as world:
        copies, x = HostCopies(world.make_stream(CPU)), torch.ones(4)
        x.add_(1)
        copy = copies.keep("x", x)
        mark = copies.stream.mark()
        copies.join()
        x.add_(1)
        mark.synchronize()
        assert copy.tolist() == [2] * 4


def late(data: Path, run_dir: Path, world: LateWorld) -> Trainer:
    return late_trainer(tiny_job(data, **OFTEN), run_dir, 0, world)


def files(run_dir: Path) -> dict[str, bytes]:
    found = sorted((run_dir / "checkpoints").glob("*/*.safetensors"))
    return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in found}


def test_checkpoints_are_read_when_they_have_arrived(data: Path, tmp_path: Path) -> None:
    """Saved after each step, whose update would change what is copied."""
    list(make_trainer(tiny_job(data, **OFTEN), tmp_path / "usual").run())
    with LateWorld(0).entered() as world:
        trainer = late(data, tmp_path / "late", world)
        list(trainer.run())
        assert trainer.saver.copies is not None
        trainer.saver.copies.join()
    assert files(tmp_path / "late") == files(tmp_path / "usual") != {}


def unawaited(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateMark, "synchronize", lambda mark: None)


def unjoined(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer.optimizer.before_step = lambda: None


def unfinished(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateSaver, "finish", Saver.finish)


Fault = Callable[[Trainer, pytest.MonkeyPatch], None]
FAULTS: dict[Fault, str] = {
    unawaited: "the file of step 1 reads what .* writes: thread saving does not wait for",
    unjoined: "adamw.* writes what .*copy_.* reads: the main stream does not wait for side stream",
    unfinished: "copy_.* writes what the file of step 1 reads: side stream .* does not wait for",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.quick(1)
def test_a_save_without_a_wait_is_a_race(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    with LateWorld(0).entered() as world:
        trainer = late(data, tmp_path, world)
        fault(trainer, monkeypatch)
        with pytest.raises(Race, match=FAULTS[fault]):
            list(trainer.run())


def test_the_host_s_memory_of_offloaded_inputs_is_that_of_one_forward() -> None:
    """Three micro batches of four layers, while the host waits for nothing: its memory is used
    again in the order of the copies."""
    with LateWorld(0).entered() as world:
        offload, total = HostOffload.of(world.make_stream(CPU), CPU), torch.zeros(8)
        for number in range(3):
            puts = [offload.put(torch.full((8,), float(number))) for _ in range(4)]
            for put in reversed(puts):
                total += offload.take(*put)
        assert world.order.amounts[HOST].most == 4 * 32
        assert total.tolist() == [4 * (0 + 1 + 2)] * 8
