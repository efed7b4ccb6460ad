"""What a rank's start costs: imports that are not needed, and the garbage collector's walks. Which
errors only report another rank's failure."""

from __future__ import annotations

import errno
import gc
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import DistBackendError, DistNetworkError, HashStore, TCPStore

from mpctl.core.errors import RunFailed
from mpctl.train.checkpoint.writer import PeersFailed, SaveFailed
from mpctl.train.runtime.process import garbage_collection_paused, is_secondary_failure
from mpctl.train.transport.exchange import PeerLost

TWO_STEPS = """
import sys
from pathlib import Path
from tests.train.runtime.tiny import make_trainer, tiny_job
job = tiny_job(Path(sys.argv[1]), training__steps=2, training__eval_samples=0,
               checkpoint__at_end=False)
trainer = make_trainer(job, Path(sys.argv[2]))
assert len(list(trainer.run())) == 2 and trainer.memory_watch.measured["peak"]
print(*(name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules))
"""


def test_the_collector_is_on_again_and_walks_less() -> None:
    before = gc.get_freeze_count()
    try:
        with pytest.raises(ValueError, match="inside"), garbage_collection_paused():
            assert not gc.isenabled()
            raise ValueError("inside")
        assert gc.isenabled() and gc.get_freeze_count() > before + 1000
    finally:
        gc.unfreeze()


@pytest.mark.slow
def test_training_imports_no_compiler(data: Path, tmp_path: Path) -> None:
    """Importing torch._dynamo takes a rank more than a second of processor time."""
    command = [sys.executable, "-c", TWO_STEPS, str(data), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(f"{GLOO}Connection closed by peer [127.0.0.1]:4711"),
        RuntimeError(f"{GLOO}Timed out waiting 30000ms for recv operation to complete"),
        DistBackendError("NCCL error in: x.cpp:1, remote process exited or there was a network"),
        DistNetworkError("failed to recv, got 0 bytes. Connection was likely closed."),
        PeerLost("tp operation 2: timed out after 1 s of waiting for rank 1"),
        PeersFailed("gave up saving with its peers: no space left"),
    ],
)
def test_what_the_layer_of_messages_says_of_a_peer_is_a_secondary_failure(error: Exception) -> None:
    assert is_secondary_failure(error)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ETIMEDOUT, "Connection timed out", "/data/corpus.bin"),
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        BrokenPipeError(errno.EPIPE, "Broken pipe"),
        RuntimeError("CUDA error: the launch timed out and was terminated"),
        DistBackendError("[Rank 1] watchdog: CUDA error: the launch timed out and was terminated"),
        DistBackendError("NCCL error in: x.cpp:1, invalid usage: Duplicate GPU detected"),
        RunFailed("reading /data/corpus.bin: Connection timed out"),
        SaveFailed("/run/step-4: Connection timed out"),
        ValueError("token 60000"),
    ],
)
def test_the_same_words_of_a_disk_or_a_gpu_are_a_cause(error: Exception) -> None:
    assert not is_secondary_failure(error)


def test_what_torch_raises_for_a_store_that_does_not_answer_is_a_secondary_failure() -> None:
    with pytest.raises(Exception, match="Wait timeout") as waited:
        HashStore().wait(["absent"], timedelta(milliseconds=20))
    with pytest.raises(Exception, match="timed out") as refused:
        TCPStore("127.0.0.1", 1, 2, is_master=False, timeout=timedelta(seconds=1))
    assert is_secondary_failure(waited.value) and is_secondary_failure(refused.value)
