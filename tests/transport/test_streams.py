"""A device that does everything in order has side streams that do nothing."""

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
    HOST_STREAM.join()
    assert x.tolist() == [2, 2]
