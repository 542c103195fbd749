"""Philox4x32-10 against its published vectors, and the operator against the definition."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from torchlazy.prims import ops
from torchlazy.prims.philox import _fill, words
from torchlazy.prims.random_bits import _block_on_device, _kernel, by_torch_operations, philox, philox_reference

FULL = 0xFFFFFFFF


def test_published_vectors() -> None:
    # the known answers that accompany Random123
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox((FULL,) * 4, (FULL, FULL)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    counter = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox(counter, (0xA4093822, 0x299F31D0)) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def word(seed: int, stream: int, index: int) -> int:
    bits = philox((index & FULL, index >> 32, stream & FULL, 0), (seed & FULL, (seed >> 32) & FULL))[0]
    return bits - (1 << 32) if bits >> 31 else bits


def test_reference_and_operator_follow_the_definition() -> None:
    for seed, stream in ((0, 0), (1, 2), (-1, 7), (0x123456789ABCDEF, 3), (2**63 - 1, 2**31 - 1)):
        expected = [word(seed, stream, i) for i in range(100)]
        assert philox_reference(seed, stream, 100).tolist() == expected
        actual = torch.ops.torchlazy.random_bits([10, 10], seed, stream, device="cpu")
        assert actual.dtype == torch.int32 and actual.flatten().tolist() == expected
        on_device = _block_on_device((100,), seed, stream, torch.device("cpu"))
        assert on_device.tolist() == expected
        prim = ops.random_bits(shape=(100,), seed=seed, stream=stream, device="cpu")
        assert prim.tolist() == expected


def test_chunks_join() -> None:
    n = (1 << 14) + 5
    bits = philox_reference(5, 1, n)
    assert bits[n - 1] == word(5, 1, n - 1) and bits[1 << 14] == word(5, 1, 1 << 14)


def test_every_way_of_dividing_the_work_gives_the_same_bits(monkeypatch) -> None:
    n = (1 << 16) + 777
    whole = words(0x1234567890ABCDEF, 3, n)
    monkeypatch.setattr("torchlazy.prims.philox._WORTH_A_THREAD", 1 << 12)
    for threads in (2, 3, 8):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert (words(0x1234567890ABCDEF, 3, n) == whole).all()
    on_device = _block_on_device((n,), 0x1234567890ABCDEF, 3, torch.device("cpu"))
    assert (on_device.numpy() == whole).all()
    assert words(1, 2, 0).shape == (0,)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_kernel_of_a_gpu_gives_the_same_bits() -> None:
    for seed, stream in ((0, 0), (-1, 7), (0x123456789ABCDEF, 3), (2**63 - 1, 2**31 - 1)):
        found = torch.ops.torchlazy.random_bits([1001, 77], seed, stream, device="cuda")
        assert (found.flatten().cpu().numpy() == philox_reference(seed, stream, 77077)).all()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ops.torchlazy.random_bits([64], 3, 0, device="cuda")
    assert len(profile.events()) < 20  # no operator of its own for each step of each round


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_counters_beyond_32_bits_on_a_gpu() -> None:
    index = torch.arange((1 << 32) - 5, (1 << 32) + 5, device="cuda")
    key = {"low": 9, "high": FULL, "stream": 4}
    assert torch.equal(_kernel()(index, **key).to(torch.int32), by_torch_operations(index, *key.values()))


def test_counters_beyond_32_bits() -> None:
    for first in ((1 << 32) - (1 << 14), 1 << 32, 5 << 32):
        part = np.empty((1 << 14) + 3, np.int32)
        _fill(part, first, -7, 2)
        for i in (0, 1, (1 << 14) - 1, 1 << 14, (1 << 14) + 2):
            assert part[i] == word(-7, 2, first + i)


def test_bits_are_even() -> None:
    bits = philox_reference(3, 0, 1 << 16).view(np.uint32)
    for position in range(32):
        assert abs(((bits >> position) & 1).mean() - 0.5) < 0.01


def test_meta_and_speed() -> None:
    assert torch.ops.torchlazy.random_bits([2, 3], 1, 0, device="meta").shape == (2, 3)
    start = time.thread_time()
    torch.ops.torchlazy.random_bits([1 << 20], 1, 0, device="cpu")
    assert time.thread_time() - start < 2.0
