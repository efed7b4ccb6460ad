"""The result of a collective that is still under way.

By hand, a gather of [n] over t ranks along dim 0: pending blocks [t, n], which `wait` returns as
[t n].
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mpctl.transport.logged_work import Work


@dataclass(frozen=True)
class Pending:
    """A collective under way: its result may be read once `wait` has returned it."""

    result: Tensor
    work: Work | None = None

    def wait(self) -> Tensor:
        """The result. The host waits for it; on CUDA the current stream does, and kernels may still
        be running when this returns."""
        if self.work is not None:
            self.work.wait()
        return self.result


@dataclass(frozen=True)
class PendingConcatenation(Pending):
    """Gathered blocks [t, ..], which `wait` concatenates along `dim`."""

    dim: int = 0

    def wait(self) -> Tensor:
        """The blocks side by side."""
        # [t, m, .., n, ..] -> [m, .., t, n, ..] -> [m, .., t*n, ..]
        return super().wait().movedim(0, self.dim).flatten(self.dim, self.dim + 1)
