"""`torchlazy::random_bits`: counter-based random bits that are the same on every device and at every recomputation.

Element i of the result is word 0 of Philox4x32-10 with key = (low, high 32 bits of the seed) and counter =
(low 32, high 32 of i, stream, 0). Invariant: the value of an element depends on (seed, stream, i) only.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torchlazy.prims.philox import LOW as _LOW
from torchlazy.prims.philox import MULTIPLIERS, ROUNDS, WEYL, philox, words

# For torch's jiterator, which compiles it once for a GPU and keeps it on disk. Numbers come in the type of the tensor.
_CODE = f"""
template <typename T> T random_bits(T index, T low, T high, T stream) {{
  unsigned int c0 = (unsigned long long)index, c1 = (unsigned long long)index >> 32, c2 = stream, c3 = 0;
  unsigned int k0 = low, k1 = high;
  for (int round = 0; round < {ROUNDS}; ++round) {{
    const unsigned long long p0 = {MULTIPLIERS[0]}ull * c0, p1 = {MULTIPLIERS[1]}ull * c2;
    c0 = (unsigned int)(p1 >> 32) ^ c1 ^ k0;
    c1 = (unsigned int)p1;
    c2 = (unsigned int)(p0 >> 32) ^ c3 ^ k1;
    c3 = (unsigned int)p0;
    k0 += {WEYL[0]}u;
    k1 += {WEYL[1]}u;
  }}
  return (int)c0;
}}
"""


@functools.cache
def _kernel() -> Callable[..., torch.Tensor]:
    # Documented, as a beta; its name has the underscore there too.
    return torch.cuda.jiterator._create_jit_fn(_CODE, low=0, high=0, stream=0)  # type: ignore[no-any-return]


def _block_on_device(shape: Sequence[int], seed: int, stream: int, device: torch.device) -> torch.Tensor:
    """The same on an accelerator: by one kernel, or without a compiler for it by some 130 torch operations."""
    count = 1
    for size in shape:
        count *= size
    index = torch.arange(count, dtype=torch.int64, device=device)
    low, high = int(seed) & _LOW, (int(seed) >> 32) & _LOW
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):
            return _kernel()(index, low=low, high=high, stream=int(stream)).to(torch.int32).reshape(tuple(shape))
    return by_torch_operations(index, low, high, int(stream)).reshape(tuple(shape))


def by_torch_operations(index: torch.Tensor, low: int, high: int, stream: int) -> torch.Tensor:
    """The bits of these elements, for the key's two words: 32-bit words in int64, whose products keep 64 bits."""
    # The last two words of the counter are equal for all elements, and stay numbers for a round.
    c0, c1, c2, c3 = index & _LOW, index >> 32, stream & _LOW, 0
    k0, k1 = low, high
    for _ in range(ROUNDS):
        (h0, l0), (h1, l1) = _wide_product(c0, MULTIPLIERS[0]), _wide_product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = c1 ^ (h1 ^ k0), l1, h0 ^ (c3 ^ k1), l0
        k0, k1 = (k0 + WEYL[0]) & _LOW, (k1 + WEYL[1]) & _LOW
    return torch.where(c0 >= 1 << 31, c0 - (1 << 32), c0).to(torch.int32)


def _wide_product(x: Any, m: int) -> tuple[Any, Any]:
    """(high, low) 32-bit words of x * m, of a tensor or of a number.

    The product of two 32-bit words has 64 bits. As an int64 it may come out negative: the bits are right all the same,
    and the mask takes off what the shift drags in from the sign.
    """
    product = x * m
    return (product >> 32) & _LOW, product & _LOW


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
    return torch.from_numpy(words(int(seed), int(stream), count)).reshape(tuple(size))


# No tensor argument: the dispatcher finds the device only through a backend select, so one kernel serves all.
_library.impl("random_bits", random_bits, "BackendSelect")
_library.impl("random_bits", _meta, "Meta")

philox_reference = words

__all__ = ["MULTIPLIERS", "ROUNDS", "WEYL", "philox", "philox_reference", "random_bits"]
