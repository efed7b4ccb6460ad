"""Numbers that a worker keeps to and the estimate counts with."""

from __future__ import annotations

STATUS_FIELDS = 2
"""float64 numbers of a step's status that are not one rank's own: the loss, whether to stop."""

MAX_SENDS_IN_FLIGHT = 2
"""Messages to other pipeline stages whose tensors a rank keeps until they have been sent."""

MAX_REDUCTIONS_IN_FLIGHT = 1
"""At ZeRO 2 and 3, buckets of full-size gradients that are being reduced, besides the one that
backward fills."""
