"""Find the measurement that would narrow the band of a plan most, on a system never measured.

Each unknown counts by the part of the step that depends on it: the speed of messages between nodes
within a factor of NETWORK, that of kernels within KERNELS if the device's kernels were never measured,
the full step within SPREAD. Own runs measure the last; benches of collectives and of kernels measure the
others before a job can run, and are suggested if they make half of SPREAD's variance.

By hand, a step of 2 s of which messages between nodes are 1 s that nothing hides: 1.35 times as
long they make it 2.35 s, ln 1.175 = 0.16, more than 0.12 / sqrt(2): measure the network first.
"""

from __future__ import annotations

from math import log, sqrt

from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.estimate.kernels import MissingFigure
from mpctl.plan.estimate.network import MissingLink
from mpctl.plan.estimate.system import SPREAD
from mpctl.plan.estimate.time import StepTimeModel, step_time_model

KERNELS = 1.15  # one standard deviation, as a factor, of kernels that nobody measured
OWN_RUNS = "five runs of a few steps, given to `mpctl calibrate`"
BENCHES = {"messages": "`mpctl bench collectives` on its nodes", "kernels": "`mpctl bench kernels` on its device"}


def next_measurement(layout: JobLayout) -> str | None:
    """Name the first measurement to make, in words; None if the system was measured or no time can be stated."""
    try:
        time_model = step_time_model(layout)
        if time_model.operators.network.system.is_measured:
            return None
        doubts = {"messages": time_model.network_doubt, "kernels": _kernel_doubt(time_model)}
    except (MissingFigure, MissingLink):
        return None
    what = max(doubts, key=lambda name: doubts[name])
    if doubts[what] < SPREAD / sqrt(2):
        return OWN_RUNS
    return f"{BENCHES[what]}, as the step rests on {what} of unknown speed; then {OWN_RUNS}"


def _kernel_doubt(time_model: StepTimeModel) -> float:
    device = time_model.job.cluster.device
    if device is None or device.kernels is not None:
        return 0.0
    return log(time_model.slower(kernels=KERNELS).seconds / time_model.seconds)
