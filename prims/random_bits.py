"""`torchlazy::random_bits`: counter-based random bits that are the same on every device and at every recomputation.

Element i of the result is word 0 of Philox4x32-10 with key = (low, high 32 bits of the seed) and counter =
(low 32, high 32 of i, stream, 0). Invariant: the value of an element depends on (seed, stream, i) only.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
_LOW = 0xFFFFFFFF
_CHUNK = 1 << 14  # elements at a time: the working set of ten uint64 arrays stays in the L2 cache


def philox(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """All four words of one Philox4x32-10 block, in Python integers: the definition."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _LOW, (p0 >> 32) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + WEYL[0]) & _LOW, (k1 + WEYL[1]) & _LOW
    return c0, c1, c2, c3


def philox_reference(seed: int, stream: int, n: int) -> np.ndarray:
    """int32[n]: the first n elements of `random_bits` for this seed and stream."""
    result = np.empty(n, np.int32)
    for start in range(0, n, _CHUNK):
        result[start : start + _CHUNK] = _block(seed, stream, start, min(_CHUNK, n - start))
    return result


def _block(seed: int, stream: int, start: int, count: int) -> np.ndarray:
    """Elements start .. start + count - 1, vectorised; products of 32-bit words are exact in uint64."""
    low, shift = np.uint64(_LOW), np.uint64(32)
    index = np.arange(start, start + count, dtype=np.uint64)
    c0, c1 = index & low, index >> shift
    c2 = np.full(count, int(stream) & _LOW, np.uint64)
    c3 = np.zeros(count, np.uint64)
    k0, k1 = int(seed) & _LOW, (int(seed) >> 32) & _LOW
    m0, m1 = map(np.uint64, MULTIPLIERS)
    for _ in range(ROUNDS):
        p0, p1 = c0 * m0, c2 * m1
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ np.uint64(k0), p1 & low, (p0 >> shift) ^ c3 ^ np.uint64(k1), p0 & low
        k0, k1 = (k0 + WEYL[0]) & _LOW, (k1 + WEYL[1]) & _LOW
    return c0.astype(np.uint32).view(np.int32)


def _block_on_device(shape: Sequence[int], seed: int, stream: int, device: torch.device) -> torch.Tensor:
    """The same with torch operations, for accelerators: int64 arithmetic on 32-bit words, split products."""
    count = 1
    for size in shape:
        count *= size
    index = torch.arange(count, dtype=torch.int64, device=device)
    c0, c1 = index & _LOW, (index >> 32) & _LOW
    c2, c3 = torch.full_like(index, int(stream) & _LOW), torch.zeros_like(index)
    k0, k1 = int(seed) & _LOW, (int(seed) >> 32) & _LOW
    for _ in range(ROUNDS):
        (h0, l0), (h1, l1) = _wide_product(c0, MULTIPLIERS[0]), _wide_product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0, k1 = (k0 + WEYL[0]) & _LOW, (k1 + WEYL[1]) & _LOW
    return torch.where(c0 >= 1 << 31, c0 - (1 << 32), c0).to(torch.int32).reshape(tuple(shape))


def _wide_product(x: torch.Tensor, m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(high, low) 32-bit words of x * m; halves of 16 bits keep every product within int64."""
    upper, lower = (x >> 16) * m, (x & 0xFFFF) * m
    middle = upper + (lower >> 16)  # < 2**49
    return middle >> 16, ((middle & 0xFFFF) << 16) | (lower & 0xFFFF)


_library = torch.library.Library("torchlazy", "FRAGMENT")
_library.define("random_bits(SymInt[] size, Scalar seed, int stream, *, Device device) -> Tensor")


def _meta(size: Sequence[int], seed: Any, stream: int, *, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int32, device="meta")


def random_bits(size: Sequence[int], seed: int, stream: int, *, device: torch.device) -> torch.Tensor:
    """int32 random bits of the given shape; pure: equal arguments give equal bits."""
    device = torch.device(device)
    if device.type == "meta":
        return _meta(size, seed, stream, device=device)
    if device.type != "cpu":
        return _block_on_device(size, seed, stream, device)
    count = 1
    for extent in size:
        count *= int(extent)
    return torch.from_numpy(philox_reference(int(seed), int(stream), count)).reshape(tuple(size))


# No tensor argument: the dispatcher finds the device only through a backend select, so one kernel serves all.
_library.impl("random_bits", random_bits, "BackendSelect")
_library.impl("random_bits", _meta, "Meta")
