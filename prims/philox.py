"""Philox4x32-10: the definition, and many words of it at once on the host.

Only word 0 of each block is wanted, of counters (low and high 32 bits of i, stream, 0). So half of the first two rounds
are numbers, computed once, and half of the last two is left out; the rounds between work in place on chunks that stay
in the L2 cache. NumPy lets go of the interpreter's lock, so large requests are shared between threads.

Invariant: `words` is `philox` for every seed, stream and position, however the work is divided.
Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
LOW = 0xFFFFFFFF
_CHUNK = 1 << 14  # elements at a time; divides 2**32, so that a chunk has one high word
_WORTH_A_THREAD = 1 << 17  # elements; below, starting a thread costs more than it brings
_MOST_THREADS = 8
_M0, _M1 = np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
_LOW64, _HALF = np.uint64(LOW), np.uint64(32)


def philox(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """All four words of one Philox4x32-10 block, in Python integers: the definition."""
    c0, c1, c2, c3 = counter
    for k0, k1 in _round_keys(key[0], key[1]):
        p0, p1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & LOW, (p0 >> 32) ^ c3 ^ k1, p0 & LOW
    return c0, c1, c2, c3


def _round_keys(k0: int, k1: int) -> list[tuple[int, int]]:
    return [((k0 + i * WEYL[0]) & LOW, (k1 + i * WEYL[1]) & LOW) for i in range(ROUNDS)]


def words(seed: int, stream: int, n: int) -> np.ndarray:
    """int32[n]: the first n elements of `random_bits` for this seed and stream."""
    result = np.empty(n, np.int32)
    threads = min(torch.get_num_threads(), n // _WORTH_A_THREAD, _MOST_THREADS)
    if threads < 2:
        _fill(result, 0, seed, stream)
        return result
    step = -(-n // (threads * _CHUNK)) * _CHUNK
    parts = [(result[start : start + step], start, seed, stream) for start in range(0, n, step)]
    # Threads of one call: a pool would not survive a fork.
    helpers = [threading.Thread(target=_fill, args=part) for part in parts[1:]]
    for helper in helpers:
        helper.start()
    _fill(*parts[0])
    for helper in helpers:
        helper.join()
    return result


def _fill(out: np.ndarray, first: int, seed: int, stream: int) -> None:
    """Elements first .. first + len(out) - 1; `first` is a multiple of the chunk."""
    keys = _round_keys(int(seed) & LOW, (int(seed) >> 32) & LOW)
    size = min(_CHUNK, len(out))
    count = np.arange(size, dtype=np.uint64)
    work = [np.empty(size, np.uint64) for _ in range(5)]
    for start in range(0, len(out), _CHUNK):
        part = out[start : start + _CHUNK].view(np.uint32)
        if len(part) < size:
            size = len(part)
            count, work = count[:size], [array[:size] for array in work]
        _chunk(part, count, work, first + start, int(stream) & LOW, keys)


def _chunk(
    out: np.ndarray, count: np.ndarray, work: list[np.ndarray], start: int, stream: int, keys: list[tuple[int, int]]
) -> None:
    """One chunk, into `out`; products of 32-bit words are exact in uint64. Spoils `work`."""
    c0, c1, c2, c3, spare = work
    # Round 1 of c0 = i, c1 = high word, c2 = stream, c3 = 0: what does not depend on i is a number.
    product = stream * MULTIPLIERS[1]
    n0, n1 = (product >> 32) ^ (start >> 32) ^ keys[0][0], product & LOW
    np.add(count, np.uint64(start & LOW), out=c0)
    np.multiply(c0, _M0, out=c0)
    _high_word(c0, keys[0][1], c2)
    np.bitwise_and(c0, _LOW64, out=c3)
    # Round 2, where c0 and c1 are numbers.
    product = n0 * MULTIPLIERS[0]
    np.multiply(c2, _M1, out=c2)
    _high_word(c2, n1 ^ keys[1][0], c0)
    np.bitwise_and(c2, _LOW64, out=c1)
    np.bitwise_xor(c3, np.uint64((product >> 32) ^ keys[1][1]), out=c2)
    c3.fill(product & LOW)
    for k0, k1 in keys[2:8]:
        np.multiply(c0, _M0, out=c0)
        np.multiply(c2, _M1, out=c2)
        _high_word(c2, k0, spare)
        np.bitwise_xor(spare, c1, out=spare)
        np.bitwise_and(c2, _LOW64, out=c1)
        _high_word(c0, k1, c2)
        np.bitwise_xor(c2, c3, out=c2)
        np.bitwise_and(c0, _LOW64, out=c3)
        c0, spare = spare, c0
    # Rounds 9 and 10: only what word 0 needs.
    np.multiply(c0, _M0, out=c0)
    np.multiply(c2, _M1, out=c2)
    np.bitwise_and(c2, _LOW64, out=c1)
    _high_word(c0, keys[8][1], c2)
    np.bitwise_xor(c2, c3, out=c2)
    np.multiply(c2, _M1, out=c2)
    _high_word(c2, keys[9][0], c0)
    np.bitwise_xor(c0, c1, out=c0)
    np.copyto(out, c0, casting="unsafe")


def _high_word(product: np.ndarray, key: int, out: np.ndarray) -> None:
    """The upper 32 bits, with a number folded in."""
    np.right_shift(product, _HALF, out=out)
    np.bitwise_xor(out, np.uint64(key), out=out)
