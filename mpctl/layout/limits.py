"""Numbers that a worker keeps to and the estimate counts with."""

from __future__ import annotations

STATUS_FIELDS = 2
"""float64 numbers of a step's status that are not one rank's own: the loss, whether to stop."""

AMAX_BYTES = 3 * 4
"""float32 numbers of a linear layer in fp8: the largest elements of X, W and dY."""

MAX_SENDS_IN_FLIGHT = 2
"""Messages to other pipeline stages whose tensors a rank keeps until they have been sent."""

SLICE_ALIGNMENT = 64
"""Elements that a slice of a bucket is padded to a multiple of: 128 bytes of the narrowest dtype,
of 16 bit. NCCL and AdamW then read and write whole lines of memory in the widest words, which they
cannot where a slice begins at any element."""

LAYERS_GATHERED_AHEAD = 1
"""At ZeRO 3, layers whose parameters are being gathered while another is computed. One is enough
where a layer is computed for longer than the next is gathered; where it is not, more would only
move the wait, since messages follow each other, and each costs the memory of a whole layer."""

MAX_REDUCTIONS_IN_FLIGHT = 1
"""At ZeRO 2 and 3, buckets of full-size gradients that are being reduced, besides the one that
backward fills."""
