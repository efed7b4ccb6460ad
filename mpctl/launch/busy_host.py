"""Whether other programs take the processors that a forecast counts on."""

from __future__ import annotations

from mpctl.units import plural, seconds_text

BUSY = 0.5  # of the processors, running in the mean of the last minute: a warning


def is_busy(load: float, processors: int) -> bool:
    """Whether a host of so many processors is busy at this load average of a minute."""
    return load > BUSY * processors


def busy_text(load: float, processors: int, predicted: float | None) -> str | None:
    """What a run on this host's processors says before its first step; None where they are free, or
    nothing is forecast. predicted: seconds of a step."""
    if predicted is None or not is_busy(load, processors):
        return None
    return (
        f"this host is busy: {load:.1f} processes ran in the last minute, on "
        f"{plural(processors, 'processor')}; the forecast of {seconds_text(predicted)} a step is "
        "for a host that does nothing else"
    )
