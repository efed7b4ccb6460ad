"""Random numbers as a function of an integer key and global coordinates; there is no generator.

Counter-based randomness (Salmon et al., SC 2011, doi 10.1145/2063384.2063405): the number at a
place is a hash of (seed, step, site, coordinates), so any rank computes exactly its own slice of
the one global tensor. Weights and dropout masks then do not depend on tp, cp, dp, pp or on the
order of execution, and recomputed activations draw the same mask again.

fold(k, c) = mix(k ^ mix(odd * c + odd')), with mix the three xorshifts and two multiplications of a
32-bit avalanche hash (MurmurHash3's finaliser family). For a fixed key it is a bijection of c, so
no two rows of a table share a key. Coordinates fold in turn; only the last fold is full size.

>>> x = torch.arange(12)
>>> bool((normal(7, (x,))[5:9] == normal(7, (x[5:9],))).all())
True

Cost, ns an element, forward of [8, 512, 1024], best of 25: float32 3.3 to 4.2 (torch's dropout 5.5
to 6.0), bf16 3.5 to 3.7 (5.7 to 5.9), of which the mask 2.0; `normal` 5.8. One thread of a 2-core
Xeon with AVX-512, shared with other work, torch 2.13, 2026-11-20.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mpctl.kernels.masks import Positions, numbers

_GOLDEN, _M1, _M2 = 0x9E3779B1, 0x7FEB352D, 0x846CA68B
_SIGN = 1 << 31


def site_key(seed: int, *names: str | int) -> int:
    """A 32-bit key for a named place, the same on every machine and in every Python."""
    text = "\x1f".join(map(repr, (int(seed), *names)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def fold(key: int | Tensor, coordinates: Tensor) -> Tensor:
    """key and coordinates broadcast to int32 bits: one more coordinate mixed into the key.

    Coordinates count modulo 2^32. A tensor key is the result of an earlier fold.
    """
    scrambled = _signed(coordinates.to(torch.int64) * _GOLDEN + _M1)
    scrambled = _mix_(scrambled)
    wrapped = key if isinstance(key, Tensor) else _wrap(key)
    return _mix_(torch.bitwise_xor(scrambled, wrapped))


def fold_all(key: int | Tensor, coordinates: Sequence[Tensor]) -> Tensor:
    """Fold several coordinates, first to last; each may broadcast against the others."""
    if not coordinates:
        raise ValueError("0 coordinates given, at least 1 is needed")
    for each in coordinates:
        key = fold(key, each)
    assert isinstance(key, Tensor)
    return key


def uniform(
    key: int | Tensor, coordinates: Sequence[Tensor], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Uniform in the open interval (0, 1): 32 bits in float64, 23 bits otherwise."""
    bits = fold_all(key, coordinates)
    if dtype == torch.float64:
        return bits.to(dtype).add_(_SIGN + 0.5).mul_(2.0**-32)
    # 23 bits + 1/2 fill float32's 24-bit significand exactly: 1.0 cannot be rounded to.
    steps = torch.bitwise_right_shift(bits, 9).bitwise_and_((1 << 23) - 1)
    return steps.to(torch.float32).add_(0.5).mul_(2.0**-23).to(dtype)


def normal(
    key: int | Tensor, coordinates: Sequence[Tensor], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Standard normal by the inverse error function of 32 bits, |z| < 6.4.

    Computed in float64 and rounded once: the last bit of a library's erfinv, which may differ
    between machines, then all but never shows in float32.
    """
    bits = fold_all(key, coordinates)
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-31).erfinv_().mul_(math.sqrt(2)).to(dtype)


def keep_mask(key: int, p: float, coordinates: Sequence[Tensor]) -> Tensor:
    """True with probability 1 - p (to 2^-32) at each place; bool, the broadcast shape.

    The last coordinate is one-dimensional; blocks of rows keep the integer work in cache.
    """
    if not 0 <= p < 1:
        raise ValueError(f"dropout {p} is not in 0 <= p < 1")
    *outer, last = coordinates
    # [b, s, 1] -> [b*s, 1], against [h]
    keys = fold_all(key, outer)
    rows = keys.reshape(-1, 1)
    mask = torch.empty((len(rows), len(last)), dtype=torch.bool, device=rows.device)
    step = max(1, block_elements(rows.device) // max(1, len(last)))
    for start in range(0, len(rows), step):
        bits = fold(rows[start : start + step], last)
        torch.ge(bits, round(p * 2**32) - _SIGN, out=mask[start : start + step])
    return mask.view(*keys.shape[:-1], len(last))


def block_elements(device: torch.device) -> int:
    """Elements worked on at a time: what a CPU caches, or what fills an accelerator."""
    return 1 << 17 if device.type == "cpu" else 1 << 24


@dataclass(frozen=True, eq=False)
class CounterRNG:
    """The dropout masks of one micro batch.

    samples: [b] global sample numbers of the rows of this micro batch. Two ranks that hold the
    same sample, row and column draw the same decision whatever else they hold.
    """

    seed: int
    step: int
    samples: Tensor
    training: bool = True

    def active(self, p: float) -> bool:
        """Whether dropout of probability p changes anything: in training, where p > 0."""
        return self.training and p > 0

    def dropout(
        self, x: Tensor, p: float, *, rng_site: str,
        columns: Positions | None = None, rows: Positions | None = None,
    ) -> Tensor:  # fmt: skip
        """x [b, s, h_local] with a share p zeroed, the rest scaled by 1 / (1 - p).

        rows, columns: global sequence positions and features that x holds, a range or a 1-d tensor;
        by default the first. Saves the mask, 1 byte an element.
        """
        if not self.active(p):
            return x
        _, s, h = x.shape
        coordinates = (self._samples(x, 3), _numbers(rows, s, x)[:, None], _numbers(columns, h, x))
        return _drop(x, keep_mask(self._key(rng_site), p, coordinates), p)

    def attention_dropout(
        self, probabilities: Tensor, p: float, *, rng_site: str, heads: Positions,
        rows: Positions | None = None, columns: Positions | None = None,
    ) -> Tensor:  # fmt: skip
        """probabilities [b, a_local, s, s_keys]; heads: the global numbers of the local heads.

        rows, columns: global positions of the queries and of the keys; by default the first.
        """
        if not self.active(p):
            return probabilities
        _, a, s, keys = probabilities.shape
        coordinates = (
            self._samples(probabilities, 4),
            _numbers(heads, a, probabilities)[:, None, None],
            _numbers(rows, s, probabilities)[:, None],
            _numbers(columns, keys, probabilities),
        )
        return _drop(probabilities, keep_mask(self._key(rng_site), p, coordinates), p)

    def _key(self, rng_site: str) -> int:
        return site_key(self.seed, "dropout", self.step, rng_site)

    def _samples(self, x: Tensor, dims: int) -> Tensor:
        if self.samples.shape != x.shape[:1]:
            held = tuple(self.samples.shape)
            raise ValueError(f"{held} samples for a batch of {x.shape[0]} rows")
        return self.samples.to(x.device).view(-1, *[1] * (dims - 1))


def _numbers(positions: Positions | None, size: int, like: Tensor) -> Tensor:
    positions = range(size) if positions is None else positions
    if len(positions) != size:
        raise ValueError(f"{positions} names {len(positions)} places, the tensor has {size}")
    return numbers(positions, like.device)


def _drop(x: Tensor, mask: Tensor, p: float) -> Tensor:
    return torch.mul(x, mask).mul_(1 / (1 - p))


def _wrap(number: int) -> int:
    return (number + _SIGN) % (1 << 32) - _SIGN


def _signed(wide: Tensor) -> Tensor:
    """int64 -> its low 32 bits as int32."""
    return ((wide + _SIGN) % (1 << 32) - _SIGN).to(torch.int32)


def _xor_shift_(x: Tensor, shift: int) -> Tensor:
    # int32 shifts copy the sign; the mask makes the shift logical.
    return x.bitwise_xor_(torch.bitwise_right_shift(x, shift).bitwise_and_((1 << 32 - shift) - 1))


def _mix_(x: Tensor) -> Tensor:
    """In place: every input bit flips every output bit with probability near 1/2."""
    x = _xor_shift_(_xor_shift_(x, 16).mul_(_M1), 15)
    return _xor_shift_(x.mul_(_wrap(_M2)), 16)
