"""Which measurement would narrow the band of a plan most, on a system that was never measured.

What is not known of it enters a step as far as the step rests on it: the speed of messages between
nodes within a factor of NETWORK, that of kernels within KERNELS where the device's were never
measured, all of the step within the spread of unknown systems. Own runs measure the last, benches
of collectives and of kernels the others before a job can run.

By hand, a step of 2 s of which messages between nodes are 1 s that nothing hides: 1.6 times as long
they make it 2.6 s, ln 1.3 = 0.26, which is more than the spread of 0.13: measure the network first.
"""

from __future__ import annotations

from math import log

from mpctl.estimate.kernels import MissingFigure, device_speed
from mpctl.estimate.network import MissingLink, Network
from mpctl.estimate.operator_times import OperatorTimer
from mpctl.estimate.system import SPREAD, System, find_system
from mpctl.estimate.time import StepTimeModel
from mpctl.layout.job_layout import JobLayout

NETWORK, KERNELS = 1.6, 1.15  # standard deviations as factors, of what was never measured
OWN_RUNS = "five runs of a few steps, given to `mpctl calibrate`"
BENCHES = {
    "collectives": "`mpctl bench collectives` on its nodes",
    "kernels": "`mpctl bench kernels` on its device",
}


def next_measurement(layout: JobLayout) -> str | None:
    """What to measure first, in words; None where the system was measured, or no time can be
    stated."""
    cluster, profile = layout.job.cluster, layout.profile
    system = find_system(cluster, profile)
    if system.is_measured or cluster.device is None:
        return None
    try:
        plain = _seconds(layout, system, system.factor, system.factor)
        unsure = {"collectives": _seconds(layout, system, system.factor * NETWORK, system.factor)}
        if cluster.device.kernels is None:
            slow = system.factor * KERNELS
            unsure["kernels"] = _seconds(layout, system, system.factor, slow)
    except (MissingFigure, MissingLink):
        return None
    spreads = {name: log(seconds / plain) for name, seconds in unsure.items()}
    most = max(spreads, key=lambda name: spreads[name])
    if spreads[most] <= SPREAD:
        return OWN_RUNS
    what = "messages" if most == "collectives" else "kernels"
    return f"{BENCHES[most]}, as the step rests on {what} of unknown speed; then {OWN_RUNS}"


def _seconds(layout: JobLayout, system: System, network: float, kernels: float) -> float:
    """Seconds of a step where messages and kernels take so many times as long."""
    job = layout.job
    speed = device_speed(job.cluster, job.training.chosen_dtype, kernels)
    links = Network(job.cluster, layout.topology, system._replace(factor=network))
    return StepTimeModel(layout, OperatorTimer(layout, speed, links, layout.profile)).seconds
