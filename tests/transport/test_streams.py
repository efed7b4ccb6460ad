"""A device that does everything in order has side streams that do nothing; tests/late checks what
theirs are for."""

import pytest
import torch

from mpctl.transport.streams import HOST_STREAM, side_stream


def test_a_cpu_and_a_rehearsal_have_the_host_s_stream():
    for device in ("cpu", "meta"):
        assert side_stream(torch.device(device), is_urgent=True) is HOST_STREAM
    x = torch.ones(2)
    HOST_STREAM.follow()
    with HOST_STREAM.running():
        x.add_(1)
    HOST_STREAM.keep(x)
    HOST_STREAM.lend(x)
    HOST_STREAM.join()
    assert x.tolist() == [2, 2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_stream_of_cuda_goes_beside_the_current_one():
    """Memory of either stream is used on the other and freed: many times, so that it is handed out
    again."""
    device = torch.device("cuda", 0)
    stream = side_stream(device, is_urgent=True)
    for number in range(50):
        x = torch.full((1 << 20,), float(number), device=device)
        stream.follow()
        with stream.running():
            y = x + 1
        stream.keep(x)
        del x
        torch.zeros(1 << 20, device=device)
        stream.join()
        stream.lend(y)
        assert (y * 2).sum().item() == (number + 1) * 2 * (1 << 20)
        del y
