"""What one plan of a job costs over another: the step by part, memory, and whether estimates can tell them apart.

An estimate cannot tell layouts apart that differ by less than its own error. That error was measured on the
published sweeps: several layouts of one model on one cluster, estimated by constants that had not seen the run
(tests/measure/calibrate/test_accuracy.py). Of pairs of layouts whose estimates differ by less than RANKING_ERROR,
six in ten ran in the estimated order; of those that differ by more, nine in ten did. On clusters that nobody tuned,
and where constants had not seen the cluster, seven in ten of the pairs up to WIDE_ERROR did: there, as a wide band
says, that is a tie.

By hand, steps of 10.0 s (9 to 11.5) and 10.3 s differ by 3 %, a tie; with a band of 8 to 13, a ratio above 1.5,
10.9 s would be one too.
"""

from __future__ import annotations

from mpctl.core.units import bytes_text, seconds_text
from mpctl.plan.estimate.step import StepTime

RANKING_ERROR, WIDE_ERROR = 0.04, 0.1
WIDE_BAND = 1.5
"""A band is wide if the ratio of its ends is at least this."""
SHOWN_PARTS = 3
SHOWN_SHARE = 0.002  # of a step: a part that differs by less is not named
SHOWN_MEMORY = 0.02  # as SHOWN_SHARE, of the device's bytes


def ranking_error(band: float) -> float:
    """Return the largest difference of estimates whose order is open. band: the ratio of its ends."""
    return WIDE_ERROR if band >= WIDE_BAND else RANKING_ERROR


def tie_text(error: float) -> str:
    """Return in words that estimates differ by less than their error."""
    return f"within the {100 * error:g} % that estimates cannot tell apart"


def cost_difference(base: StepTime, other: StepTime, base_bytes: int, other_bytes: int) -> str:
    """Describe the slowdown, the parts that differ most, signed, and the memory that it saves. base_bytes,
    other_bytes: on the fullest device.

    `313 ms (3.1%) slower (bubble +420 ms, tp −96.1 ms), 12.4 GiB less memory`.
    """
    slower = other.total - base.total
    word, share = "slower" if slower >= 0 else "faster", abs(slower) / base.total
    text = f"{seconds_text(abs(slower))} ({share:.1%}) {word}"
    ours, theirs = base.parts(), other.parts()
    names = dict.fromkeys((*ours, *theirs))
    differences = sorted(((theirs.get(n, 0.0) - ours.get(n, 0.0), n) for n in names), key=lambda pair: -abs(pair[0]))
    shown = [
        f"{name} {'+' if difference > 0 else '−'}{seconds_text(abs(difference))}"
        for difference, name in differences[:SHOWN_PARTS]
        if abs(difference) > SHOWN_SHARE * base.total
    ]
    text += f" ({', '.join(shown)})" if shown else ""
    return text + memory_difference(base_bytes, other_bytes)


def memory_difference(base: int, other: int) -> str:
    """Describe the bytes that another device's fullest rank needs more or less, after a comma; empty for few."""
    more = other - base
    if abs(more) < SHOWN_MEMORY * base:
        return ""
    return f", {bytes_text(abs(more))} {'less' if more < 0 else 'more'} memory"


def rate_difference(base: float, other: float) -> str:
    """Describe the change of a rate in tokens a second: `69.6% more tokens/s`."""
    share = other / base - 1
    return f"{abs(share):.1%} {'more' if share >= 0 else 'fewer'} tokens/s"
