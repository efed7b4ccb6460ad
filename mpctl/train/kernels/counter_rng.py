"""Random numbers as a function of an integer key and global coordinates; there is no generator.

This is counter-based randomness (Salmon et al., SC 2011, doi 10.1145/2063384.2063405). The number
of an element is a hash of (seed, step, site, coordinates), so that each rank computes its slice of
the global tensor and nothing else. Weights and dropout masks therefore do not depend on tp, cp, dp,
pp or the order of execution, and recomputed activations get the same mask again.

fold(k, c) = mix(k ^ mix(odd * c + odd')), where mix is a 32-bit avalanche hash of three xorshifts
and two multiplications (the family of MurmurHash3's finaliser). For a fixed key it is a bijection
of c, so that no two rows of a table share a key. Coordinates are folded one after another; only the
last fold works on a tensor of full size.

>>> x = torch.arange(12)
>>> bool((normal(7, (x,))[5:9] == normal(7, (x[5:9],))).all())
True

Element (sample, row, column) of a dropout mask, of attention's (sample, head, row, column), is kept
where the hash of its coordinates under the key is at least p 2^32. A fused kernel computes the same
bits without writing coordinates to memory.

A mask needs less of the last fold, z = mix(k ^ c), than its bits. The first xorshift is linear,
f(k ^ c) = f(k) ^ f(c), so that rows and columns are shifted before they meet. The last one,
z = y ^ (y >> 16), leaves the high half as it is, and the low half decides only where the high half
is the threshold's, h: z >= t where y ^ h >= t. By hand, with two halves of 4 bits, t = 0xA3 and
y = 0xA7: z = 0xAD, y ^ 0xA = 0xAD; with y = 0xB7: 0xBC and 0xBD, both above.

Dropout of [8, 512, 1024], forward, best of 25, takes 3.3 to 4.2 ns an element in float32 (torch's
dropout: 5.5 to 6.0) and 3.5 to 3.7 in bf16 (5.7 to 5.9), of which the mask takes 2.0; `normal`
takes 5.8. Measured on one thread of a 2-core Xeon with AVX-512, shared with other work, with torch
2.13, 2026-11-20.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mpctl.train.kernels.masks import Positions, numbers

_GOLDEN, _M1, _M2 = 0x9E3779B1, 0x7FEB352D, 0x846CA68B
_SIGN = 1 << 31


def site_key(seed: int, *names: str | int) -> int:
    """A 32-bit key for a seed and a name, the same on every machine and in every Python.

    names: what the random numbers are for, such as "dropout", a step number and a layer's name.
    """
    text = "\x1f".join(map(repr, (int(seed), *names)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def fold(key: int | Tensor, coordinates: Tensor) -> Tensor:
    """Mix one more coordinate into a key: int32 bits, in the shape that both broadcast to.

    key: an integer (`site_key`), or the tensor of an earlier fold. coordinates: integers, taken
    modulo 2^32.
    """
    wrapped = key if isinstance(key, Tensor) else as_int32(key)
    return _mix_(torch.bitwise_xor(_scrambled(coordinates), wrapped))


def _scrambled(coordinates: Tensor) -> Tensor:
    return _mix_(_signed(coordinates.to(torch.int64) * _GOLDEN + _M1))


def fold_all(key: int | Tensor, coordinates: Sequence[Tensor]) -> Tensor:
    """Fold several coordinates into a key, first to last: int32 bits.

    The coordinates broadcast against each other. Raises ValueError if there are none.
    """
    if not coordinates:
        raise ValueError("0 coordinates given, at least 1 is needed")
    for each in coordinates:
        key = fold(key, each)
    assert isinstance(key, Tensor)
    return key


def uniform(key: int | Tensor, coordinates: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform numbers in the open interval (0, 1), in the shape that the coordinates broadcast to.

    float64 numbers have 32 random bits, those of other types 23.
    """
    bits = fold_all(key, coordinates)
    if dtype == torch.float64:
        return bits.to(dtype).add_(_SIGN + 0.5).mul_(2.0**-32)
    # 23 bits + 1/2 fill float32's 24-bit significand exactly: 1.0 cannot be rounded to.
    steps = torch.bitwise_right_shift(bits, 9).bitwise_and_((1 << 23) - 1)
    return steps.to(torch.float32).add_(0.5).mul_(2.0**-23).to(dtype)


def normal(key: int | Tensor, coordinates: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers, |z| < 6.4, in the shape that the coordinates broadcast to.

    They are the inverse error function of 32 random bits, computed in float64 and rounded once: the
    last bit of erfinv may differ between machines, which float32 then hardly ever shows.
    """
    bits = fold_all(key, coordinates)
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-31).erfinv_().mul_(math.sqrt(2)).to(dtype)


def keep_mask(key: int | Tensor, p: float, coordinates: Sequence[Tensor]) -> Tensor:
    """A bool mask, each element True with probability 1 - p (to 2^-32).

    Its shape is what the coordinates broadcast to; the last coordinate is one-dimensional. Rows are
    computed in blocks that fit a CPU's cache. Raises ValueError unless 0 <= p < 1.
    """
    if not 0 <= p < 1:
        raise ValueError(f"dropout {p} is not in 0 <= p < 1")
    *outer, last = coordinates
    keys, least = fold_all(key, outer), round(p * 2**32) - _SIGN
    shape = (*keys.shape[:-1], len(last))
    # both halves of the last fold's argument, shifted before they meet: see the module's docstring
    columns, keys = _xor_shift_(_scrambled(last), 16), _xor_shift_(keys, 16)
    if torch.compiler.is_compiling():  # into one loop, which needs no blocks
        return _least_bits(keys, columns, least) >= least
    # [b, s, 1] -> [b*s, 1], against [h]
    rows = keys.reshape(-1, 1)
    mask = torch.empty((len(rows), len(last)), dtype=torch.bool, device=rows.device)
    step = max(1, block_elements(rows.device) // max(1, len(last)))
    for start in range(0, len(rows), step):
        bits = _least_bits(rows[start : start + step], columns, least)
        torch.ge(bits, least, out=mask[start : start + step])
    return mask.view(shape)


def _least_bits(rows: Tensor, columns: Tensor, least: int) -> Tensor:
    """Numbers that are at least `least` where those of the fold are."""
    bits = _xor_shift_(torch.bitwise_xor(rows, columns).mul_(_M1), 15).mul_(as_int32(_M2))
    return bits.bitwise_xor_(least >> 16 & 0xFFFF)


def block_elements(device: torch.device) -> int:
    """Elements to compute at a time: as many as a CPU caches, or as fill an accelerator."""
    return 1 << 17 if device.type == "cpu" else 1 << 24


@dataclass(frozen=True, eq=False)
class CounterRNG:
    """The dropout masks of one micro batch, as a function of seed, step, site and coordinates.

    samples: [b], global numbers of the samples in this micro batch, on their device. Two ranks that
    hold the same element (sample, position, feature) drop it or keep it alike, at any layout.
    training: False turns dropout off. scope: the part of the model whose sites are meant, such as
    `layers.7`; empty for the full model. keys: those of the scope's sites in this step as tensors
    on the device; None computes them on the host when they are needed. table: the keys of all
    scopes, where there are any (`StepKeys`).
    """

    seed: int
    step: int
    samples: Tensor
    training: bool = True
    scope: str = ""
    keys: Mapping[str, Tensor] | None = None
    table: Mapping[str, Mapping[str, Tensor]] | None = None

    def within(self, scope: str) -> CounterRNG:
        """The same numbers with sites named from `scope` on: "mlp" within "layers.7" is
        "layers.7.mlp"."""
        keys = None if self.table is None else self.table[scope]
        return replace(self, scope=scope, keys=keys)

    def active(self, p: float) -> bool:
        """Whether dropout of probability p changes anything: in training, where p > 0."""
        return self.training and p > 0

    def mask(
        self,
        shape: Sequence[int],
        p: float,
        *,
        rng_site: str,
        columns: Positions | None = None,
        rows: Positions | None = None,
        heads: Positions | None = None,
    ) -> DropoutMask:
        """The mask of a tensor [b, s, h_local], or with `heads` of probabilities [b, a, s, keys].

        rng_site: the place in the model, unique within the scope. rows, columns, heads: global
        numbers along the last dimensions, each a range or a 1-d tensor; by default rows and columns
        count from 0.
        Raises ValueError if positions or samples do not match the shape, or p is not in 0 <= p < 1.
        """
        *outer, s, h = shape
        checked = [("rows", rows, s), ("columns", columns, h)]
        if heads is not None:
            checked.append(("heads", heads, outer[1]))
        places = {name: _checked(positions, size) for name, positions, size in checked}
        if self.samples.shape != tuple(outer[:1]):
            raise ValueError(f"{tuple(self.samples.shape)} samples for a batch of {outer[0]} rows")
        if not 0 <= p < 1:
            raise ValueError(f"dropout {p} is not in 0 <= p < 1")
        return DropoutMask(self._key(rng_site), p, self.samples, **places)

    def _key(self, rng_site: str) -> int | Tensor:
        if self.keys is not None:
            return self.keys[rng_site]
        return dropout_key(self.seed, self.step, site_name(self.scope, rng_site))


def site_name(scope: str, rng_site: str) -> str:
    """The name of a site in the full model: site_name("layers.7", "mlp") is "layers.7.mlp"."""
    return f"{scope}.{rng_site}" if scope else rng_site


def dropout_key(seed: int, step: int, rng_site: str) -> int:
    """The key of the dropout masks of a step at one place of the model."""
    return site_key(seed, "dropout", step, rng_site)


def drop(x: Tensor, mask: DropoutMask) -> Tensor:
    """x with the elements that the mask does not keep set to 0, the others divided by 1 - p."""
    kept = keep_mask(mask.key, mask.p, mask.coordinates())
    return torch.mul(x, kept).mul_(1 / (1 - mask.p))


def _checked(positions: Positions | None, size: int) -> Positions:
    positions = range(size) if positions is None else positions
    if len(positions) != size:
        raise ValueError(f"{positions} names {len(positions)} places, the tensor has {size}")
    return positions


def as_int32(number: int) -> int:
    """The low 32 bits of an integer as a signed number."""
    return (number + _SIGN) % (1 << 32) - _SIGN


def _signed(wide: Tensor) -> Tensor:
    """The low 32 bits of int64 numbers, as int32."""
    return ((wide + _SIGN) % (1 << 32) - _SIGN).to(torch.int32)


def _xor_shift_(x: Tensor, shift: int) -> Tensor:
    # int32 shifts copy the sign; the mask makes the shift logical.
    return x.bitwise_xor_(torch.bitwise_right_shift(x, shift).bitwise_and_((1 << 32 - shift) - 1))


def _mix_(x: Tensor) -> Tensor:
    """Hash int32 numbers in place: an input bit flips each output bit with probability 1/2."""
    x = _xor_shift_(_xor_shift_(x, 16).mul_(_M1), 15)
    return _xor_shift_(x.mul_(as_int32(_M2)), 16)


@dataclass(frozen=True, eq=False)
class DropoutMask:
    """Mask of the elements of a tensor that are kept; these are divided by 1 - p.

    key: 32 bits, as an integer or as a tensor of no dimensions, int32, on the device. samples: [b],
    global numbers, on the device of the tensor. heads: of attention probabilities [b, a, s, keys]
    the global numbers of the local heads; None for a tensor [b, s, h]. rows, columns: global
    numbers of the last two dimensions.
    """

    key: int | Tensor
    p: float
    samples: Tensor
    rows: Positions
    columns: Positions
    heads: Positions | None = None

    def coordinates(self) -> list[Tensor]:
        """One tensor for each dimension, which broadcast against each other; the last is
        one-dimensional."""
        device = self.samples.device
        inner = [positions for positions in (self.heads, self.rows) if positions is not None]
        tensors = [self.samples, *(numbers(each, device) for each in (*inner, self.columns))]
        dims = len(tensors)
        return [each.view(-1, *[1] * (dims - 1 - i)) for i, each in enumerate(tensors)]


class StepKeys(Mapping[str, Mapping[str, Tensor]]):
    """The keys of each scope's sites as tensors of no dimensions, int32; `fill` says of which step.

    sites: names of sites by scope, as CounterRNG has them.
    """

    def __init__(self, sites: Mapping[str, Sequence[str]], seed: int, device: torch.device) -> None:
        self.seed, self.step = seed, 0
        self.names = [site_name(scope, site) for scope, own in sites.items() for site in own]
        pinned = device.type != "cpu"
        # Two by turns: a copy out of one may still be under way when the next step fills its own.
        self._host = [torch.zeros(len(self.names), dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._table = torch.zeros(len(self.names), dtype=torch.int32, device=device)
        places = iter(self._table.unbind())
        self._keys = {scope: {site: next(places) for site in own} for scope, own in sites.items()}

    def fill(self, step: int) -> None:
        """Send the keys of a step; the host does not wait."""
        self.step, host = step, self._host[step % 2]
        keys = [as_int32(dropout_key(self.seed, step, name)) for name in self.names]
        host.copy_(torch.tensor(keys, dtype=torch.int32))
        self._table.copy_(host, non_blocking=True)

    def rng(self, samples: Tensor) -> CounterRNG:
        """The masks of a micro batch of these samples in the step."""
        keys = self._keys.get("")
        return CounterRNG(self.seed, self.step, samples, keys=keys, table=self)

    def __getitem__(self, scope: str) -> Mapping[str, Tensor]:
        return self._keys[scope]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)
