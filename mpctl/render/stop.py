"""A run that is being stopped, and what it left."""

from __future__ import annotations

import shlex
from types import TracebackType

from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.text import Text

from mpctl.render.console import get_console
from mpctl.render.runs import STYLES
from mpctl.render.show import failure_text
from mpctl.runs.stop import Stopped
from mpctl.units import bytes_text


class StopView:
    """On a terminal a moving line on stderr; elsewhere a line for each new text."""

    def __init__(self, name: str) -> None:
        self.console = get_console(stderr=True)
        self.name, self.text = name, ""
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False))
        self.bar = Progress(*columns, console=self.console, transient=True,
                            disable=not self.console.is_terminal)  # fmt: skip
        self.task = self.bar.add_task("", total=None)

    def __enter__(self) -> StopView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.bar.stop()
        if kind is KeyboardInterrupt:
            self.console.print(f"the request stays: `mpctl status {self.name}` tells when it ended")

    def update(self, text: str) -> None:
        """Show what the run is doing."""
        if text == self.text:
            return
        if not self.text:
            self.bar.start()
        is_same_work = text.split(":")[0] == self.text.split(":")[0]
        self.text = text
        self.bar.update(self.task, description=f"stopping {self.name}: {text}")
        if not self.console.is_terminal and not is_same_work:
            self.console.print(f"stopping {self.name}: {text}", soft_wrap=True)


def print_stopped(stopped: Stopped, *, now: bool) -> None:
    """Print on stdout how the run ended, what it saved and how to go on."""
    console, run = get_console(), stopped.run
    steps = f"{run.step:,}" if run.steps is None else f"{run.step:,} of {run.steps:,}"
    if stopped.cancelled:
        console.print(f"{run.name}  its job was cancelled before it began: {stopped.cancelled}")
        return
    before = "" if stopped.was_running else "was not running: "
    status = Text(run.status, STYLES[run.status])
    console.print(Text.assemble(f"{run.name}  {before}", status, f" after step {steps}"))
    if run.status == "failed" and run.failure is not None:
        console.print(Text(failure_text(run.failure.model_dump())), soft_wrap=True)
    if run.status == "running":
        console.print(Text("the request stays; the run ends when its step is done and saved"))
        return
    if not run.checkpoints:
        console.print(Text("no checkpoint was saved"))
        return
    saved = run.checkpoints[-1]
    lost = run.step - saved.step
    more = f"; {lost:,} later steps are lost" if lost > 0 else ""
    console.print(Text(f"saved as step {saved.step:,} ({bytes_text(saved.bytes)}){more}"))
    if run.status != "finished":
        command = shlex.join(["mpctl", "launch", "--resume", "--run-dir", str(run.path)])
        console.print(Text.assemble(("→ ", "cyan"), f"go on with: {command}"), soft_wrap=True)
