"""What a rank's start costs: imports that are not needed, and the garbage collector's walks."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from mpctl.runtime.process import garbage_collection_paused

TWO_STEPS = """
import sys
from pathlib import Path
from tests.runtime.tiny import make_trainer, tiny_job
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


def test_training_imports_no_compiler(data: Path, tmp_path: Path) -> None:
    """Importing torch._dynamo takes a rank more than a second of processor time."""
    command = [sys.executable, "-c", TWO_STEPS, str(data), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
