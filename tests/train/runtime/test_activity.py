"""What a rank is doing, as another thread reads it."""

from __future__ import annotations

from mpctl.model.pipeline.schedule.orders import Action
from mpctl.model.pipeline.schedule.program import Step
from mpctl.train.runtime.activity import Activity


class Moving(Activity):
    """Training ends the step of the pipeline program after its first look."""

    looks = 0

    def __getattribute__(self, name: str) -> object:
        if name == "current":
            self.looks += 1
            return Step("compute", Action("forward", 2)) if self.looks == 1 else None
        return super().__getattribute__(name)


def test_a_thread_may_read_it_while_training_moves_on() -> None:
    assert Moving(stage=1, phase="step 3").text == "step 3, stage 1, forward of micro batch 2"
