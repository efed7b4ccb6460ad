"""Copies on a side stream: what arrives is what was there when they were asked for."""

from __future__ import annotations

import torch

from mpctl.train.checkpoint.snapshot import HostCopies
from mpctl.train.layers.recompute import HostOffload, checkpointed
from mpctl.train.transport.streams import side_stream

SIZE = 512


def busy(device: torch.device) -> None:
    """Give a GPU work for some ms, so that a copy that does not wait would be early; on a CPU
    everything is done in order."""
    x = torch.full((SIZE, SIZE), 0.01, device=device)
    for _ in range(20 if device.type == "cuda" else 0):
        x = (x @ x).clamp(-1, 1)


def test_offloaded_inputs_come_back_to_the_bit(device: torch.device) -> None:
    """Five recomputed layers, two micro batches in flight."""
    gradients = []
    for offload in (None, HostOffload.of(side_stream(device), device)):
        generator = torch.Generator(device).manual_seed(1)
        weights = [
            (torch.randn(SIZE, SIZE, device=device, generator=generator) / 32).requires_grad_() for _ in range(5)
        ]
        losses = []
        for number in range(2):
            if offload is not None:
                offload.begin_pass()
            x = torch.full((64, SIZE), 0.1 * (number + 1), device=device)
            for weight in weights:
                busy(device)
                x = checkpointed(lambda x, w: (x @ w).tanh(), x, weight, offload=offload)
            losses.append(x.sum())
        for loss in losses:
            loss.backward()
        gradients.append([weight.grad for weight in weights])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert all(bool(gradient.any()) for gradient in gradients[0])


def offloaded(device: torch.device, layers: int) -> tuple[float, int]:
    """A number of the result of so many offloaded layers, and the memory reserved meanwhile."""
    offload, puts = HostOffload.of(side_stream(device), device), []
    x = torch.zeros(1 << 20, device=device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(layers):
        puts.append(offload.put(x))
        x = x + 1
    while puts:
        x = x + offload.take(*puts.pop())
    reserved = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
    return x[-1].item(), reserved


def test_more_offloaded_layers_take_no_more_memory(device: torch.device) -> None:
    """The host queues all of them at once; each has an input of 4 MiB."""
    offloaded(device, 8)
    found = {layers: offloaded(device, layers) for layers in (8, 64)}
    assert [value for value, _ in found.values()] == [8 + 28, 64 + 2016]
    assert found[64][1] - found[8][1] <= 4 << 22


def test_a_snapshot_has_the_values_of_its_step(device: torch.device) -> None:
    """Kept tensors change after the stream was waited for, gathered ones are freed at once."""
    copies = HostCopies(side_stream(device))
    kept = torch.zeros(SIZE, SIZE, device=device)
    for step in range(3):
        busy(device)
        kept += 1
        first = copies.keep("kept", kept)
        for number in range(4):  # each takes the memory of the one before
            gathered = torch.full((SIZE, SIZE), float(number), device=device)
            found = copies.keep(f"gathered {number}", gathered, is_passing=True)
            del gathered
        arrived = copies.stream.mark()
        copies.join()
        kept += 100
        arrived.synchronize()
        assert first.unique().tolist() == [1.0 + 101 * step] and found.unique().tolist() == [3.0]
        for number in range(4):
            assert copies.tensors[f"gathered {number}"].unique().tolist() == [float(number)]
        assert first.is_pinned() == (device.type == "cuda")
