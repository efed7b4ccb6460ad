"""How wide a band must be: quantiles of the errors on runs that a fit did not see.

Nine of ten of n left-out errors are within the k-th smallest, k = ceil(0.9 (n + 1)); so are nine of
ten new ones of their kind (split conformal prediction, arXiv 1905.03222). A spread is that error over
`QUANTILE` (plan/estimate/step.py), the same quantile of a normal distribution of standard deviation 1.

Of the errors 0.01 to 0.19, nineteen of them, k = 18: 0.18, a spread of 0.109.
"""

from __future__ import annotations

from collections.abc import Iterable

from mpctl.measure.calibrate.runs import Run
from mpctl.spec.runtime import FittedRuns

INSIDE = 0.9  # of new runs
LEAST = 0.02  # spread: smaller ones are below the noise of replicates


def quantile(weighed: Iterable[tuple[float, float]]) -> float:
    """The least of the sizes that a new one does not exceed in INSIDE of all cases.

    weighed: (size, weight) of each; the largest where they are too few.

    >>> quantile([(n / 100, 1.0) for n in range(1, 20)])
    0.18
    """
    in_order = sorted(weighed)
    wanted = INSIDE * (sum(weight for _, weight in in_order) + 1)
    reached = 0.0
    for size, weight in in_order:
        reached += weight
        if reached >= wanted - 1e-9:
            return size
    return in_order[-1][0]


def seen_by(runs: Iterable[Run]) -> FittedRuns:
    """The devices, clusters, dtypes and sizes of these runs."""
    known = list(runs)
    devices = {run.job.cluster.device.name for run in known if run.job.cluster.device}
    return FittedRuns(
        devices=sorted(devices),
        clusters=sorted({run.job.cluster.name or "" for run in known}),
        links={run.job.cluster.name or "": run.job.cluster.bandwidths for run in known},
        dtypes=sorted({run.job.training.chosen_dtype for run in known}),
        gpus=max((run.job.world_size for run in known), default=1),
        parameters=max((run.layout.table.numel for run in known), default=1),
    )
